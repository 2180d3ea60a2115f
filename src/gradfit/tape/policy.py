"""What becomes of a result: the choices, and who makes them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

# Rebuild it; let autograd have it; let autograd have it until it is evicted; move it out and back.
DROP, KEEP, HOLD, OFFLOAD = 0, 1, 2, 3
KEPT = [KEEP]  # for `decide`: all results are kept, however many they are


class Policy(Protocol):
    """Decides, for every result of every recorded operation, whether it is kept."""

    def choose(self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any) -> list[int] | None:
        """One of DROP, KEEP, HOLD and OFFLOAD for each result of `func(*args, **kwargs)`; None drops all."""


class OffloadingPolicy(Policy, Protocol):
    """One that also says OFFLOAD."""

    def offload(self, tensor: torch.Tensor) -> Any:
        """Move a result out; returns the function that brings it back."""
