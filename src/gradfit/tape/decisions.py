"""Who decides what becomes of results, and how they say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from gradfit.choices import Choice
from gradfit.tape.values import Segment


class Decision(NamedTuple):
    """What becomes of the results of one operation."""

    choices: tuple[Choice, ...] | None
    """One for each result; None: all are kept, and nothing is written down."""
    segment: Segment | None = None
    """The one that they are rebuilt with, from here on; None: the one before."""
    last: bool = False
    """Nothing that comes after it will be rebuilt."""


ALL_KEPT = Decision(None)


class Policy(Protocol):
    """Follows one forward, and decides for each of its operations."""

    def decide(
        self, func: Any, results: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Decision | None:
        """Asked once for each operation, after it ran as `func(*args, **kwargs)`; None: rebuild all
        its results.
        """


class OffloadingPolicy(Policy, Protocol):
    """One that also says OFFLOAD."""

    def offload(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Move a result out; returns the function that brings it back."""
