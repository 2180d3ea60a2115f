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

__all__ = [
    "ActivationOverwritten",
    "BudgetInfeasible",
    "ExactnessWarning",
    "GradfitError",
    "GradientMap",
    "GraphError",
    "LossScaler",
    "MisuseError",
    "NonFiniteGradient",
    "StateError",
    "UnknownName",
    "UnsupportedOp",
    "backward",
]
__version__ = "0.1.0"
