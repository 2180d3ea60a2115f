"""A window's numbers that are still on their accelerator: its update is launched with them, and
they are read when it is on its way.

Whoever reads before the update makes the device wait while the host launches the optimizer. Whether
the update should have happened is known only afterwards; so this is for those that can take it
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradfit import _torch


@dataclass(frozen=True)
class UnreadNumbers:
    """What an update needs to know of a window on one accelerator."""

    factor: float | Tensor
    """What makes its sums a mean."""
    norm: Tensor | None
    """Of the sums; None if nobody clips by it."""
    read: Callable[[], float]
    """Settles the window's numbers, and gives the norm of the sums. Raises if the update must be
    taken back.
    """

    def make_mean(self, gradients: Sequence[Tensor], max_norm: float | None) -> None:
        """Multiply the sums, in place, so that they are a mean of at most this norm.

        The arithmetic is that of numbers that were read, in double precision: so are the bits.
        """
        factor = self.factor if max_norm is None else self._clipped(max_norm)
        with torch.no_grad():
            if isinstance(factor, Tensor):
                _torch.multiply_all_on_device([*gradients], factor)
            elif factor != 1.0:
                _torch.multiply_all([*gradients], factor)

    def _clipped(self, max_norm: float) -> Tensor:
        assert self.norm is not None
        norm = self.norm.to(torch.float64) * self.factor
        return torch.where(norm > max_norm, max_norm / norm, 1.0) * self.factor
