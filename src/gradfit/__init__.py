"""gradfit trains any PyTorch model, at any batch size, in the memory you have, with the same gradients."""

import gradfit._starting
import gradfit._torch_versions  # noqa: F401  (warns, before anything of torch is missing)
from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.accumulate.buffer import AccumulationBufferDynamic, SymbolicShape
from gradfit.accumulate.context import AccumulationContext
from gradfit.accumulate.dynamic import DynamicBatchAccumulator
from gradfit.accumulate.grad_accumulator import GradAccumulator
from gradfit.accumulate.marks import disable_grad_accumulation, enable_grad_accumulation, has_grad_accumulation
from gradfit.accumulate.result import StepResult
from gradfit.accumulate.scaling import GradientScaling
from gradfit.accumulate.schedule import VariableBatchScheduler
from gradfit.accumulate.strategy import AdaptiveAccumulation, FixedStepCount, FixedTargetBatch, Strategy
from gradfit.accumulate.validate import GradientAccumulationValidator
from gradfit.autograd.check import GradientCheck, check_gradients
from gradfit.autograd.clip import GradientClipper
from gradfit.autograd.context import AutogradContext
from gradfit.autograd.custom import custom_op
from gradfit.autograd.gradients import GradientMap, backward
from gradfit.autograd.graph import AutogradGraph, GradientEntry, topological_sort
from gradfit.autograd.inspect import GradientReport, inspect_gradients
from gradfit.autograd.loss_scale import LossScaler
from gradfit.autograd.memory import MemoryStats
from gradfit.autograd.second_order import hessian_vector_product
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
    NonFiniteGradient,
    RankFailed,
    StateError,
    UnknownName,
    UnsupportedOp,
)
from gradfit.planning.api import frontier, plan
from gradfit.planning.record import Plan
from gradfit.profiling.measure import profile
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.record import Hardware, Profile
from gradfit.recompute.apply import AppliedPlan, apply
from gradfit.recompute.function import checkpoint, checkpoint_sequential, chunked, is_checkpoint, mark_checkpoint
from gradfit.recompute.manager import CheckpointManager
from gradfit.recompute.node import CheckpointNode, GraphNode
from gradfit.recompute.scope import CheckpointScope
from gradfit.tiling.tile import TiledModel, tile
from gradfit.train.audit import AuditReport, audit
from gradfit.train.fit import fit
from gradfit.train.job import Job
from gradfit.train.step import TrainResult, TrainStep
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
    "LogitsMaterialised",
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
    "TiledModel",
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
    "tile",
    "topological_sort",
    "whole",
]
__version__ = "0.1.0"
