"""Whether a loss adds up over the rows of a batch, as a record: what a plan must know before it
cuts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Additivity:
    """How the losses of a batch's parts make the loss of the whole, as measured on a few rows.

    `over` says what a part is weighted by: "rows"; "items", the count that `loss_fn` returns;
    "divisor", what the mean says in its graph that it was divided by; "terms", each term of the
    loss by its own such number; "sum", nothing, the losses are simply added. None: the parts do not
    make the whole, so the batch is not to be cut.
    """

    over: str | None
    error: float = 0.0
    """The largest relative difference between the whole and its parts that was measured; 1 where
    nothing could be.
    """
    modules: tuple[str, ...] = ()
    """Modules that take statistics over the rows they are given: BatchNorm in training mode."""
    read: str = ""
    """What the loss said it was divided by."""
    roles: tuple[str, ...] = ()
    """Of each term that was read: "adds" if its divisor grows with the rows, "constant" if it
    stays, "same" if all of it stays, as a penalty on the parameters does.
    """
    reason: str = ""
    """Why it does not add up, and the call that would be right."""
    by_hand: bool = False
    """A term was divided by a number of the loss function's own, which may be clamped where a part
    has no items.
    """
    floor: float = 0.0
    """Where such a number, of weights that are no whole numbers, was seen to be clamped."""
    runs_parts: bool = True
    """False: fewer rows than the batch's cannot be run at all."""

    summed_logs: tuple[str, ...] = ()
    """Names of logs of which the parts' sum is the whole's, as counts, and not their mean."""
    uncompared: tuple[str, ...] = ()
    """What may change gradients, where values alone were compared since the budget has no room for
    the gradients of two rows.
    """

    def __post_init__(self) -> None:
        if not math.isfinite(self.error):
            object.__setattr__(self, "error", 1.0)

    @property
    def unread(self) -> tuple[str, ...]:
        """The terms of the loss, by autograd's names, of which nobody knows what they were divided
        by; they are weighted as the others are.
        """
        names = (term.split(" × ")[-1] for term in self.read.split(" + "))
        return tuple(name for name in names if _is_node(name))

    @property
    def is_told_by_values(self) -> bool:
        """Whether of some term only its values say that it adds up: one of which nobody knows what
        it was divided by, or that is divided by a constant and is a mean all the same, as a balance
        of experts is of rows that go to one expert.
        """
        return bool(self.over == "rows" or self.unread) or (
            self.over == "divisor" and "constant" in self.roles
        )

    @property
    def adds_up(self) -> bool:
        """Whether a batch may be cut."""
        return self.over is not None


def _is_node(term: str) -> bool:
    """Whether this is the name of an operation in autograd, and not what a rule has said of it."""
    return re.fullmatch(r"\w+Backward\d*", term) is not None


def go_together(roles: Sequence[str], first: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the divisors that stay are the same, and those that grow have grown by the same
    factor.
    """
    divisors = list(zip(roles, first, now, strict=True))
    staying = [(a, b) for role, a, b in divisors if role != "adds"]
    growing = [(a, b) for role, a, b in divisors if role == "adds"]
    return all(is_close(a, b) for a, b in staying) and _grow_alike(growing)


def _grow_alike(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether the numbers of all pairs have one ratio."""
    # a/b = c/d, written so that a term without any items on one side is compared, too.
    return all(is_close(a * pairs[0][1], b * pairs[0][0]) for a, b in pairs[1:])


def is_close(first: float, second: float) -> bool:
    """Equal but for the rounding of a few float32 operations."""
    return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-12)
