"""The gradient of something that every tile reads, added up over the tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


class GradientSum:
    """Adds in place; in float32 for narrower tensors, and rounds once, at the end.

    Args:
        of: the tensor whose gradient it is.
    """

    def __init__(self, of: Tensor) -> None:
        self._dtype = of.dtype
        self._sum_dtype = torch.float32 if of.dtype in _NARROW else of.dtype
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        """Add what one tile gives; None if it gives nothing."""
        if gradient is None:
            return
        if self._sum is None:
            # A copy: it is added to in place, and autograd may have given it to others, too.
            self._sum = gradient.to(self._sum_dtype, copy=True)
        else:
            self._sum.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add `left @ right` without making it."""
        left, right = left.to(self._sum_dtype), right.to(self._sum_dtype)
        if self._sum is None:
            self._sum = left @ right
        else:
            self._sum.addmm_(left, right)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum of these rows."""
        self.add(rows.sum(0, dtype=self._sum_dtype))

    def result(self) -> Tensor | None:
        """The sum, as wide as what it is the gradient of; nothing is left here."""
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._dtype)


def in_places(
    gradients: Iterable[Tensor | None], needed: Iterable[bool]
) -> Iterator[Tensor | None]:
    """One for each argument of a backward pass: the next gradient where it is needed, else None."""
    remaining = iter(gradients)
    for is_needed in needed:
        yield next(remaining) if is_needed else None
