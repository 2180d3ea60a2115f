"""What `step` and `flush` say they did."""

from __future__ import annotations

from typing import NamedTuple


class StepResult(NamedTuple):
    """Whether the optimizer really stepped, why or why not, and what the window held; true if it
    stepped.

    >>> result = StepResult(False, "accumulating", None, 8, 2, 0)
    >>> bool(result), result.reason
    (False, 'accumulating')
    """

    stepped: bool
    """Whether the optimizer was stepped; `bool(result)` says the same."""
    reason: str
    """"stepped", "accumulating", "empty window", "no weight", "non-finite gradient", "no
    optimizer", or, of a wrapper whose `step()` did nothing, "left out by the optimizer".
    """
    grad_norm: float | None
    """The norm of the normalised gradient before clipping; None while the window is still
    filling.
    """
    weight: int | float
    """What the window's items weigh together: the first term's total if there are terms."""
    micro_batches: int
    """How many micro-batches contributed."""
    skipped: int
    """How many micro-batches were left out because their gradient was not finite."""

    def __bool__(self) -> bool:
        return self.stepped
