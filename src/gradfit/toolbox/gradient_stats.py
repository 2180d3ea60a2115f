"""What one gradient looks like in numbers, and the norm of many, in a precision that can hold
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradfit._torch import norms_of
from gradfit.errors import MisuseError


@dataclass(frozen=True)
class GradientStats:
    """One gradient in numbers; mean, deviation, extremes and norm are over its finite elements.

    >>> GradientStats.of(torch.tensor([3.0, -4.0, 0.0, float("nan")])).norm
    5.0
    """

    elements: int
    norm: float
    mean: float
    std: float
    min: float
    max: float
    zero_count: int
    nan_count: int
    inf_count: int

    @classmethod
    def of(cls, gradient: Tensor) -> GradientStats:
        """Measure a gradient of any layout and precision."""
        values = values_of(gradient.detach())
        values = (values.abs() if values.is_complex() else values).to(torch.float64).flatten()
        finite = values[values.isfinite()]
        some = finite.numel() > 0
        return cls(
            elements=gradient.numel(),
            norm=vector_norm(finite).item(),
            mean=finite.sum().item() / max(1, finite.numel() + gradient.numel() - values.numel()),
            std=finite.std(correction=0).item() if some else 0.0,
            min=finite.min().item() if some else 0.0,
            max=finite.max().item() if some else 0.0,
            zero_count=int((finite == 0).sum().item()) + gradient.numel() - values.numel(),
            nan_count=int(values.isnan().sum().item()),
            inf_count=int(values.isinf().sum().item()),
        )

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in it."""
        return self.nan_count == 0 and self.inf_count == 0


def values_of(gradient: Tensor) -> Tensor:
    """The numbers a gradient holds: all of a dense one, the stored ones of a sparse one, the local
    ones of a shard.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def total_norm(gradients: Iterable[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of all gradients taken as one vector.

    float16 and bfloat16 are summed in float32: 65504² is beyond float16, and a norm that overflows
    clips everything to zero.
    """
    if math.isnan(p) or p <= 0:
        raise MisuseError(f"p={p!r} is not the order of a norm. Pass 2, 1 or float('inf').")
    gradients = list(gradients)
    if _in_one_call(gradients):
        norms = norms_of(gradients, p, _wide(gradients[0]))
    else:
        norms = []
        for gradient in gradients:
            one = vector_norm(values_of(gradient), p, dtype=_wide(gradient))
            # a DTensor's norm is over all ranks
            norms.append(one.full_tensor() if hasattr(one, "full_tensor") else one)
    if not norms:
        return torch.zeros((), device="cpu")
    widest = norms[0].dtype
    for one in norms[1:]:
        widest = torch.promote_types(widest, one.dtype)
    together = torch.stack([one.to(norms[0].device, widest) for one in norms])
    norm: Tensor = vector_norm(together, p)
    return norm


def _wide(gradient: Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None


def _in_one_call(gradients: list[Tensor]) -> bool:
    """Dense ones of one kind on an accelerator, where each call is a kernel to launch."""
    kinds = {(one.device, one.dtype) for one in gradients}
    return (
        len(kinds) == 1
        and not gradients[0].is_cpu
        and all(type(one) is Tensor and one.layout is torch.strided for one in gradients)
    )
