"""gradfit trains any PyTorch model, at any batch size, in the memory you have, with the same gradients."""

from gradfit.autograd.gradients import GradientMap, backward
from gradfit.autograd.loss_scale import LossScaler
from gradfit.errors import (
    ActivationOverwritten,
    BudgetInfeasible,
    ExactnessWarning,
    GradfitError,
    GraphError,
    MisuseError,
    NonFiniteGradient,
    StateError,
    UnknownName,
    UnsupportedOp,
)
from gradfit.profiling.meter import Meter, meter
from gradfit.recompute.function import checkpoint, checkpoint_sequential, chunked, is_checkpoint, mark_checkpoint
from gradfit.recompute.scope import CheckpointScope

__all__ = [
    "ActivationOverwritten",
    "BudgetInfeasible",
    "CheckpointScope",
    "ExactnessWarning",
    "GradfitError",
    "GradientMap",
    "GraphError",
    "LossScaler",
    "Meter",
    "MisuseError",
    "NonFiniteGradient",
    "StateError",
    "UnknownName",
    "UnsupportedOp",
    "backward",
    "checkpoint",
    "checkpoint_sequential",
    "chunked",
    "is_checkpoint",
    "mark_checkpoint",
    "meter",
]
__version__ = "0.1.0"
