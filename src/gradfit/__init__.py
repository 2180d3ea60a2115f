"""gradfit trains any PyTorch model, at any batch size, in the memory you have, with the same gradients."""

import gradfit._starting
import gradfit._torch_versions  # noqa: F401  (warns, before anything of torch is missing)
from gradfit.accumulate.accumulation_context import AccumulationContext
from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.accumulate.grad_accumulator import GradAccumulator
from gradfit.accumulate.marks import disable_grad_accumulation, enable_grad_accumulation, has_grad_accumulation
from gradfit.accumulate.scaling import GradientScaling
from gradfit.accumulate.step_result import StepResult
from gradfit.accumulate.strategy import AdaptiveAccumulation, FixedStepCount, FixedTargetBatch, Strategy
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
    MisuseError,
    NonFiniteGradient,
    RankFailed,
    StateError,
    UnknownName,
    UnsupportedOp,
)
from gradfit.fitting.audit import AuditReport, audit
from gradfit.fitting.fit import fit
from gradfit.fitting.train_step import TrainResult, TrainStep
from gradfit.planning.api import frontier, plan
from gradfit.planning.plan import Plan
from gradfit.profiling.measure import profile
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.profile import Hardware, Profile
from gradfit.recompute.apply import AppliedPlan, apply
from gradfit.recompute.function import checkpoint, checkpoint_sequential, chunked, is_checkpoint, mark_checkpoint
from gradfit.recompute.manager import CheckpointManager
from gradfit.recompute.node import CheckpointNode, GraphNode
from gradfit.recompute.scope import CheckpointScope
from gradfit.runs.job import Job
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

__all__ = [
    "AccumulationBufferDynamic",
    "AccumulationContext",
    "ActivationOverwritten",
    "AdaptiveAccumulation",
    "AppliedPlan",
    "AuditReport",
    "AutogradContext",
    "AutogradGraph",
    "BudgetInfeasible",
    "CheckpointManager",
    "CheckpointNode",
    "CheckpointScope",
    "DynamicBatchAccumulator",
    "ExactnessWarning",
    "FixedStepCount",
    "FixedTargetBatch",
    "GradAccumulator",
    "GradfitError",
    "GradientAccumulationValidator",
    "GradientAccumulator",
    "GradientCheck",
    "GradientClipper",
    "GradientEntry",
    "GradientMap",
    "GradientMismatch",
    "GradientReport",
    "GradientScaling",
    "GraphError",
    "GraphNode",
    "Hardware",
    "InvalidParameter",
    "Job",
    "Loss",
    "LossScaler",
    "MemoryStats",
    "Meter",
    "MisuseError",
    "NonFiniteGradient",
    "Plan",
    "Profile",
    "RankFailed",
    "StateError",
    "StepResult",
    "Strategy",
    "SymbolicShape",
    "TrainResult",
    "TrainStep",
    "UnknownName",
    "UnsupportedOp",
    "VariableBatchScheduler",
    "apply",
    "audit",
    "backward",
    "check_gradients",
    "checkpoint",
    "checkpoint_sequential",
    "chunked",
    "count_tokens",
    "custom_op",
    "disable_grad_accumulation",
    "enable_grad_accumulation",
    "fit",
    "frontier",
    "has_grad_accumulation",
    "hessian_vector_product",
    "inspect_gradients",
    "is_checkpoint",
    "losses",
    "mark_checkpoint",
    "meter",
    "plan",
    "profile",
    "topological_sort",
    "whole",
]
__version__ = "0.1.0"
