"""gradfit trains any PyTorch model, at any batch size, in the memory you have, with the same gradients."""

from gradfit.errors import (
    ActivationOverwritten,
    BudgetInfeasible,
    ExactnessWarning,
    GradfitError,
    MisuseError,
    NonFiniteGradient,
    StateError,
    UnsupportedOp,
)

__all__ = [
    "ActivationOverwritten",
    "BudgetInfeasible",
    "ExactnessWarning",
    "GradfitError",
    "MisuseError",
    "NonFiniteGradient",
    "StateError",
    "UnsupportedOp",
]
__version__ = "0.1.0"
