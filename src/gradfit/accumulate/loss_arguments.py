"""Reading the weights and losses that users pass; every mistake is named before anything is
changed.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from gradfit.arguments import Number, invalid, plain_number
from gradfit.errors import MisuseError

_LARGEST = 1e150  # sums of many, and their squares, are still numbers


def read_weight(value: Any, name: str = "weight") -> Number:
    """A weight as a Python number: an int, a float, or a tensor or array scalar of one element.

    >>> import torch
    >>> read_weight(torch.tensor([3])), read_weight(0.5)
    (3, 0.5)
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise MisuseError(
            f"{name} has shape {tuple(value.shape)}, expected one number. Pass {name}=mask.sum()."
        )
    number = value if type(value) in (int, float) else plain_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise invalid(
            name, value, "is not a number", f"how many items the loss is about: {name}=len(batch)"
        )
    _require_usable(number, name)
    return number


def _require_usable(number: Number, name: str) -> None:
    if not 0 <= number < math.inf:
        raise invalid(
            name, number, "must be 0 or more, and finite", "how many items the loss is about"
        )
    if number > _LARGEST:
        raise MisuseError(
            f"{name} is more than {_LARGEST:g}, and sums of it overflow. Divide all weights by one"
            " number."
        )


def check_loss(loss: Any, name: str = "loss") -> Tensor:
    """A loss that can be differentiated: one real number with a graph behind it."""
    if not isinstance(loss, Tensor):
        raise MisuseError(
            f"{name} is a {type(loss).__name__}, not a tensor. Pass the tensor the loss function"
            " returned."
        )
    if not (loss.requires_grad and loss.numel() == 1 and loss.is_floating_point()):
        raise _not_differentiable(loss, name)
    return loss


def _not_differentiable(loss: Tensor, name: str) -> MisuseError:
    if loss.numel() != 1:
        return MisuseError(
            f"{name} has shape {tuple(loss.shape)}, expected one number. Pass {name}.mean() or"
            " .sum()."
        )
    if not loss.requires_grad:
        return MisuseError(
            f"{name} has no graph: it does not require a gradient. Compute it outside"
            " torch.no_grad() and without .detach()."
        )
    return MisuseError(
        f"{name} is {loss.dtype}, expected a real number. Pass {name}.abs() or .real."
    )
