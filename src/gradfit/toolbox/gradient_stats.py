"""What one gradient looks like in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradfit.errors import MisuseError
from gradfit.norms import values_of


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
        if gradient.is_meta:
            raise MisuseError("A gradient on the meta device has no values. Pass one that has.")
        values = values_of(gradient.detach())
        # In float64: squares of float16 numbers overflow, and sums of float32 ones lose the small.
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
