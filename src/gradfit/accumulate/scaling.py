"""Norms, non-finite gradients and scales: the arithmetic around a window."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch
from gradfit._torch_native import core
from gradfit.accumulate.loss_arguments import read_weight
from gradfit.arguments import Number, read_gradient, read_number
from gradfit.errors import NonFiniteGradient
from gradfit.norms import total_norm, values_of

_kind_of = operator.attrgetter("dtype", "layout", "is_cpu")
_USUAL = {(dtype, torch.strided, True) for dtype in (torch.float32, torch.float64)}


class GradientScaling:
    """Between gradients of sums, of means, and of means over another number of items.

    >>> mean_of_4, mean_of_2 = torch.tensor([1.0]), torch.tensor([4.0])
    >>> scaled = [
    ...     GradientScaling.scale_by_batch_size(mean_of_4, 4, 8),
    ...     GradientScaling.scale_by_batch_size(mean_of_2, 2, 8),
    ... ]
    >>> GradientScaling.average_accumulated(sum(scaled), 6, 8)
    tensor([2.])
    """

    @staticmethod
    def scale_by_batch_size(gradient: Tensor, batch_size: Number, reference_size: Number) -> Tensor:
        """A mean over `batch_size` items, as it counts in a mean over `reference_size` items: times
        their ratio.

        Args:
            gradient: a mean over `batch_size` items.
            batch_size: its number of items.
            reference_size: the number of items that count as 1.
        """
        size, reference = (
            read_weight(batch_size, "batch_size"),
            _positive(reference_size, "reference_size"),
        )
        return read_gradient(gradient, "gradient") * (size / reference)

    @staticmethod
    def average_accumulated(
        accumulated: Tensor, total_batch_size: Number, reference_size: Number
    ) -> Tensor:
        """The mean over all items, from a sum of gradients made with `scale_by_batch_size`.

        Args:
            accumulated: a sum of gradients, each scaled with the same `reference_size`.
            total_batch_size: items in all of them together.
            reference_size: the one they were scaled with.
        """
        reference, total = (
            _positive(reference_size, "reference_size"),
            _positive(total_batch_size, "total_batch_size"),
        )
        return read_gradient(accumulated, "accumulated") * (reference / total)

    @staticmethod
    def normalize_batch_gradient(gradient: Tensor, batch_size: Number) -> Tensor:
        """The mean over `batch_size` items, from the gradient of their sum.

        Args:
            gradient: the gradient of a sum over `batch_size` items.
            batch_size: its number of items.
        """
        return read_gradient(gradient, "gradient") / _positive(batch_size, "batch_size")


def _positive(value: Number, name: str) -> Number:
    """A mean over no items is not defined."""
    return read_number(value, name, above=0, like=1)


def gradient_norm(gradients: list[Tensor]) -> float:
    """The norm of all gradients together; NaN or infinite only if one of them is.

    This is also the check that they are finite: one pass over them, at the memory's speed.
    """
    norm = _norm(gradients)
    if math.isfinite(norm):
        return norm
    values = [values_of(one) for one in gradients]
    if not all(map(_is_finite, values)):
        return norm
    # only the squares have overflowed
    largest = max(float(one.abs().max()) for one in values if one.numel())
    wide = [one.to(torch.promote_types(one.dtype, torch.float64)) / largest for one in values]
    return largest * total_norm(wide).item()


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _norm(gradients: list[Tensor]) -> float:
    """The norm of all gradients, one by one where reading a number waits for nothing."""
    native = core()
    numbers = None if native is None else native.norms(gradients)
    if numbers is not None:
        return math.hypot(*numbers)
    if not (set(map(type, gradients)) <= {Tensor} and set(map(_kind_of, gradients)) <= _USUAL):
        return total_norm(gradients).item()  # waits for the device once
    norms = _torch.norms_of(gradients, 2.0, None) if gradients else []
    return math.hypot(*[one.item() for one in norms])


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that there are."""
    return [one for tensor in tensors if (one := tensor.grad) is not None]


def scale_gradients(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply the tensors' `.grad` in place; nothing is read or written for a factor of 1."""
    if factor == 1.0:
        return
    gradients = gradients_of(tensors)
    with torch.no_grad():
        _torch.multiply_all([one for one in gradients if not one.is_sparse], factor)
        for one in gradients:
            if one.is_sparse:
                one.mul_(factor)


def nonfinite_gradient(tensors: Sequence[Any], what: str, remedy: str) -> NonFiniteGradient:
    """An error that says which gradients hold a NaN or an infinity."""
    bad = [
        f"{position} (shape {tuple(tensor.shape)})"
        for position, tensor in enumerate(tensors)
        if tensor.grad is not None and not _is_finite(values_of(tensor.grad))
    ]
    where = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return NonFiniteGradient(
        f"The gradient of {what} is not finite in {len(bad)} of {len(tensors)} parameters: {where}."
        f" Nothing was updated; {remedy}"
    )


def back_off(scaler: Any) -> None:
    """Lower a dynamic loss scale, if there is one, after an overflow amid a window."""
    if scaler is not None and scaler.is_enabled() and getattr(scaler, "dynamic", True):
        scaler.update(scaler.get_scale() * _backoff_factor(scaler))


def _backoff_factor(scaler: Any) -> float:
    """By a method of torch's scaler, or an attribute of ours."""
    by_method = hasattr(scaler, "get_backoff_factor")
    return scaler.get_backoff_factor() if by_method else scaler.backoff_factor  # type: ignore[no-any-return]
