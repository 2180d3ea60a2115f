"""gradfit trains any PyTorch model, at any batch size, in the memory you have, with the same
gradients.

Ten names are the front door:

    fit                  a training step that stays below a budget in bytes
    profile              what one step does: operations, bytes, seconds
    plan                 what to keep and what to rebuild, at which micro-batch, for a budget
    apply                put a plan to work on a model, in a loop of your own
    audit                is it bit-identical to plain PyTorch, is it the full batch's gradient?
    meter                live and peak bytes of tensors, on any device
    CheckpointScope      recompute, in the backward pass, what is computed inside
    checkpoint           `torch.utils.checkpoint.checkpoint`, exact
    chunked              a batch in parts, for losses that compare its rows
    GradientAccumulator  many micro-batches, one exact update

The rest is in `__all__`, in the order of use.
"""

import gradfit._starting
import gradfit._torch_versions  # noqa: F401  (warns, before anything of torch is missing)
from gradfit._torch_native import NativeCore, native_core
from gradfit.accumulate.accumulation_context import AccumulationContext
from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.accumulate.grad_accumulator import GradAccumulator
from gradfit.accumulate.marks import (
    disable_grad_accumulation,
    enable_grad_accumulation,
    has_grad_accumulation,
)
from gradfit.accumulate.scaling import GradientScaling
from gradfit.accumulate.step_result import StepResult
from gradfit.accumulate.strategy import (
    AdaptiveAccumulation,
    FixedStepCount,
    FixedTargetBatch,
    Strategy,
)
from gradfit.batches import losses
from gradfit.batches.loss import Loss, count_tokens
from gradfit.errors import (
    ActivationOverwritten,
    BudgetInfeasible,
    ExactnessWarning,
    GradfitError,
    GradientMismatch,
    GraphError,
    InvalidParameter,
    LogitsMaterialised,
    MisuseError,
    NativeCoreMissing,
    NonFiniteGradient,
    OffloadError,
    RankFailed,
    StateError,
    UnknownName,
    UnsupportedOp,
)
from gradfit.fitting.any_loop import BudgetUse, MemoryBudget, auto_checkpoint, budget
from gradfit.fitting.audit import AuditReport, audit
from gradfit.fitting.estimate import Estimate, Lever, estimate
from gradfit.fitting.fit import fit
from gradfit.fitting.train_step import TrainResult, TrainStep
from gradfit.planning.api import frontier, plan
from gradfit.planning.plan import Plan
from gradfit.profiling.make_profile import profile
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.profile import Hardware, Profile
from gradfit.recompute.apply import AppliedPlan, apply
from gradfit.recompute.function import (
    checkpoint,
    checkpoint_sequential,
    chunked,
    is_checkpoint,
    mark_checkpoint,
)
from gradfit.recompute.manager import CheckpointManager
from gradfit.recompute.names import name
from gradfit.recompute.node import CheckpointNode, GraphNode
from gradfit.recompute.scope import CheckpointScope
from gradfit.runs.job import Job
from gradfit.tiling.tile import TiledModel, tile
from gradfit.toolbox.autograd_context import AutogradContext
from gradfit.toolbox.autograd_graph import AutogradGraph, GradientEntry, topological_sort
from gradfit.toolbox.batch_gradients import DynamicBatchAccumulator
from gradfit.toolbox.batch_schedule import VariableBatchScheduler
from gradfit.toolbox.custom_operation import custom_op
from gradfit.toolbox.gradient_check import GradientCheck, check_gradients
from gradfit.toolbox.gradient_clipper import GradientClipper
from gradfit.toolbox.gradient_map import GradientMap, backward
from gradfit.toolbox.gradient_report import GradientReport, inspect_gradients
from gradfit.toolbox.gradient_validator import GradientAccumulationValidator
from gradfit.toolbox.loss_scaler import LossScaler
from gradfit.toolbox.saved_memory import MemoryStats
from gradfit.toolbox.second_order import hessian_vector_product
from gradfit.toolbox.slot_buffer import AccumulationBufferDynamic, SymbolicShape
from gradfit.tree import whole

# In the order of use: the ten that most programs need, then what goes with them.
__all__ = [  # noqa: RUF022
    # the front door
    "fit",
    "profile",
    "plan",
    "apply",
    "audit",
    "meter",
    "CheckpointScope",
    "checkpoint",
    "chunked",
    "GradientAccumulator",
    # a budget in any loop
    "auto_checkpoint",
    "budget",
    "MemoryBudget",
    "BudgetUse",
    # what these take and give
    "Loss",
    "losses",
    "count_tokens",
    "whole",
    "Job",
    "TrainStep",
    "TrainResult",
    "AuditReport",
    "Meter",
    "Profile",
    "Hardware",
    "Plan",
    "frontier",
    "estimate",
    "Estimate",
    "Lever",
    "AppliedPlan",
    "StepResult",
    # tiling
    "tile",
    "TiledModel",
    # recomputing
    "checkpoint_sequential",
    "name",
    "mark_checkpoint",
    "is_checkpoint",
    "CheckpointManager",
    "CheckpointNode",
    "GraphNode",
    "native_core",
    "NativeCore",
    # accumulating
    "GradAccumulator",
    "AccumulationContext",
    "enable_grad_accumulation",
    "disable_grad_accumulation",
    "has_grad_accumulation",
    "Strategy",
    "FixedStepCount",
    "FixedTargetBatch",
    "AdaptiveAccumulation",
    # batches of varying sizes
    "DynamicBatchAccumulator",
    "VariableBatchScheduler",
    "GradientScaling",
    "GradientAccumulationValidator",
    "AccumulationBufferDynamic",
    "SymbolicShape",
    # around a backward pass
    "backward",
    "GradientMap",
    "GradientClipper",
    "inspect_gradients",
    "GradientReport",
    "check_gradients",
    "GradientCheck",
    "custom_op",
    "hessian_vector_product",
    "LossScaler",
    "AutogradContext",
    "AutogradGraph",
    "GradientEntry",
    "MemoryStats",
    "topological_sort",
    # errors and warnings
    "GradfitError",
    "LogitsMaterialised",
    "MisuseError",
    "InvalidParameter",
    "UnknownName",
    "StateError",
    "GraphError",
    "BudgetInfeasible",
    "ExactnessWarning",
    "UnsupportedOp",
    "NativeCoreMissing",
    "ActivationOverwritten",
    "NonFiniteGradient",
    "OffloadError",
    "GradientMismatch",
    "RankFailed",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The public names, without the rooms that they come from: `plan` and not `planning`. `dir`
    itself sorts them.
    """
    return [*__all__, "__version__"]
