"""Runs of a loss on some rows as a whole and in parts, and how far the one is from the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse

from gradfit.batches.shares import TermCount, share_terms


@dataclass(frozen=True, slots=True)
class Run:
    """The loss of some rows: its value, its returned count, what it was divided by."""

    value: float
    rows: int
    count: float | None = None
    divisors: tuple[float, ...] | None = None
    """Of each term; not clamped."""
    terms: tuple[TermCount, ...] | None = None
    """If each can be told apart, with its value."""
    logs: Mapping[str, float] = field(default_factory=dict)
    whole_logs: frozenset[str] = frozenset()
    """The logs that are of a type for whole numbers."""

    def items(self) -> float:
        """The returned count, 0 if there is none."""
        return self.count or 0.0

    @property
    def is_clamped(self) -> bool:
        return any(term.floor for term in self.terms or ())

    @property
    def has_lost_term(self) -> bool:
        return any(term.is_lost for term in self.terms or ())

    def is_lost_at(self, weight: float) -> bool:
        """Whether it was divided by no items, and is not nothing: what was divided is lost."""
        return not weight and self.value != 0 and not math.isnan(self.value)

    def weighted(self, weight: float) -> float:
        """The value times a weight; of no weight it is nothing, NaN or not."""
        return weight * self.value if weight else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same rows as a whole and in parts."""

    whole: Run
    parts: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The whole, then the parts."""
        return (self.whole, *self.parts)

    def mean_error(self, weight: Callable[[Run], float]) -> float:
        """How far the whole is from the parts' weighted mean, and its weight from the sum of
        theirs; relative.
        """
        weights = [*map(weight, self.parts)]
        total, of_whole = math.fsum(weights), weight(self.whole)
        # A part that was divided by no items, and is not nothing, cannot be weighted back.
        if not (total > 0 and of_whole > 0) or any(map(Run.is_lost_at, self.parts, weights)):
            return math.inf
        mixed = math.fsum(map(Run.weighted, self.parts, weights)) / total
        return max(self._relative(mixed), abs(total / of_whole - 1))

    def items_error(self) -> float:
        """How far the whole is from the sum of its parts, or its count from the sum of theirs;
        relative.
        """
        whole, total = self.whole.items(), math.fsum(map(Run.items, self.parts))
        if not whole and not total:
            return math.inf  # from no items nothing can be told
        return max(self.sum_error(), abs(total - whole) / max(whole, total, 1.0))

    def terms_error(self, roles: Sequence[str]) -> float:
        """How far the whole is from its parts, each term by its own total; relative."""
        if any(part.has_lost_term for part in self.parts):
            return math.inf
        shares = share_terms([part.terms or () for part in self.parts], roles)
        return self._relative(math.fsum(share.value for share in shares))

    def sum_error(self) -> float:
        """How far the whole is from the sum of its parts; relative."""
        return self._relative(math.fsum(part.value for part in self.parts))

    def _relative(self, mixed: float) -> float:
        difference = abs(mixed - self.whole.value)
        largest = max(filterfalse(math.isnan, (abs(run.value) for run in self.runs)), default=0.0)
        # From zeros alone nothing can be told, nor from what is not finite.
        return difference / largest if largest > 0 and math.isfinite(difference) else math.inf
