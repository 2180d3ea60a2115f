"""By what the parts of a batch are to be weighted, if by anything: judged from runs of the whole
and of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradfit.batches.additivity_record import Additivity, go_together, is_close
from gradfit.batches.compared_runs import Comparison, Run
from gradfit.errors import MisuseError

_NEITHER = "neither"


def judge(comparisons: Sequence[Comparison], tolerance: float, read: str = "") -> Additivity:
    """By what the parts are to be weighted, if by anything."""
    evidence = _Evidence(comparisons)
    ways = evidence.ways()
    errors = {over: max(map(error, comparisons)) for over, error in ways.items()}
    # In the order of `ways`: what was read from the graph comes before what only fits the numbers.
    for over, error in errors.items():
        if error <= tolerance:
            return Additivity(over, error, read=read, roles=evidence.roles_over(over))
    if "items" in ways:
        _require_sum(evidence, tolerance, read)
    reason = _why(comparisons, read)
    least = _least_error(comparisons, list(ways.values()))
    return Additivity(None, least, read=read, roles=evidence.roles, reason=reason)


def _require_sum(evidence: _Evidence, tolerance: float, read: str) -> None:
    """Refuse a mean that was returned as a sum over a count."""
    if evidence.is_mean_over_count(tolerance):
        whole = evidence.comparisons[0].whole
        raise MisuseError(
            f"loss_fn returned (loss, {whole.count:g}), but the loss is {read}: a mean, not a sum"
            " over the count. Return loss * count with the count, or the mean alone."
        )


class _Evidence:
    """What the divisors of wholes and parts say of how parts could be put together."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self.comparisons = comparisons
        self.runs = _all_runs(comparisons)
        read = _read_roles(comparisons)
        # a term with a coefficient that all rows of a part make, as one loss's size does that
        # scales another: values may add up by rows all the same, and gradients do not
        self.depends_on_rows_together = _NEITHER in read
        self.roles = () if self.depends_on_rows_together else read
        self.roles_of_values = _roles_of_values(comparisons, self.roles)
        self.one_weight = _one_weight(self.runs, self.roles)
        if not self.one_weight and not self.roles_of_values:
            # What was read explains the runs in no way: the values alone have to tell.
            self.roles = ()
            self.one_weight = _one_weight(self.runs, ())

    def ways(self) -> dict[str, Callable[[Comparison], float]]:
        """How the parts could be put together, each with how far the whole is from it."""
        if all(run.count is not None for run in self.runs):
            return {"items": Comparison.items_error}
        ways = self._ways_of_one_weight()
        if len(self.roles_of_values) > 1 or "adds" in self.roles_of_values:
            ways["terms"] = self.terms_error
        if not self.depends_on_rows_together:
            ways["rows"] = _rows_error
        return ways

    def _ways_of_one_weight(self) -> dict[str, Callable[[Comparison], float]]:
        """Where one number for a part is right for all of its terms, which were read."""
        if not self.one_weight or not self.roles:
            return {}
        if "adds" in self.roles:
            return {"divisor": self.divisor_error}
        return {"sum": Comparison.sum_error}

    def roles_over(self, over: str) -> tuple[str, ...]:
        """What is told of the terms if the parts are put together in that way."""
        return () if over == "rows" else self.roles_of_values or self.roles

    def divisor_error(self, comparison: Comparison) -> float:
        place = self.roles.index("adds")
        return comparison.mean_error(lambda run: (run.divisors or ())[place])

    def terms_error(self, comparison: Comparison) -> float:
        return comparison.terms_error(self.roles_of_values)

    def is_mean_over_count(self, tolerance: float) -> bool:
        """Whether what was returned as a sum over a count is the mean over it."""
        return "adds" in self.roles and all(
            one.mean_error(Run.items) <= tolerance for one in self.comparisons
        )


def _rows_error(comparison: Comparison) -> float:
    return comparison.mean_error(lambda run: float(run.rows))


def _least_error(
    comparisons: Sequence[Comparison], ways: Sequence[Callable[[Comparison], float]]
) -> float:
    """How far the whole is from its parts in the best way, for the message alone."""
    ways = ways or [Comparison.sum_error]
    least = [min(way(one) for way in ways) for one in comparisons]
    return max(filter(math.isfinite, least), default=math.inf)


def _why(comparisons: Sequence[Comparison], read: str) -> str:
    if all(run.value == 0 for run in _all_runs(comparisons)):
        return (
            "the loss is 0 on the rows it was measured on, so nothing can be told. Pass a sample"
            " with a loss"
        )
    if all(run.count == 0 for run in _all_runs(comparisons)):
        return (
            "the rows it was measured on have a count of 0, so nothing can be told. Pass a sample"
            " with items"
        )
    if not all(math.isfinite(one.whole.value) for one in comparisons):
        return (
            f"the loss of the rows it was measured on is {comparisons[0].whole.value}. Pass a"
            " sample with a finite loss"
        )
    if " + " in read:
        return (
            f"its terms are divided by different numbers ({read}). Return gf.Loss(sum=…, count=…)"
            " with one count, or divide all terms by the same items"
        )
    return (
        "the loss depends on rows together, or its items are not its rows. Return gf.Loss(sum=…,"
        " count=…) if it is a sum over items; use gf.chunked for the encoder of a contrastive loss"
    )


def _read_roles(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Whether each term's divisor adds up over the parts, stays what it is, or does neither; () if
    not all runs have the same terms.
    """
    counts = {_number_of_terms(run) for run in _all_runs(comparisons)}
    terms = counts.pop()
    if counts or terms is None:
        return ()
    return tuple(_role(_divisors_at(comparisons, term)) for term in range(terms))


def _number_of_terms(run: Run) -> int | None:
    """How many terms have a divisor that was read; None if that of none was."""
    return None if run.divisors is None else len(run.divisors)


def _all_runs(comparisons: Sequence[Comparison]) -> list[Run]:
    return [run for one in comparisons for run in one.runs]


def _divisors_at(comparisons: Sequence[Comparison], term: int) -> list[list[float]]:
    """In each comparison of the whole, then of each part."""
    return [[(run.divisors or ())[term] for run in one.runs] for one in comparisons]


def _role(numbers: Sequence[list[float]]) -> str:
    """Of a term, by its divisor in each whole and its parts."""
    if all(is_close(sum(parts), whole) for whole, *parts in numbers):
        return "adds"
    return "constant" if _stays(numbers) else _NEITHER


def _stays(numbers: Sequence[list[float]]) -> bool:
    """Whether a number is the same in each whole and all of its parts."""
    return all(is_close(part, whole) for whole, *parts in numbers for part in parts)


def _roles_of_values(comparisons: Sequence[Comparison], roles: Sequence[str]) -> tuple[str, ...]:
    """The roles, with "same" for a term that does not depend on the rows at all, as a penalty on
    the parameters does.

    () unless each term of each run is known with its value.
    """
    if any(run.terms is None for run in _all_runs(comparisons)):
        return ()
    return tuple(_role_of_value(comparisons, *term) for term in enumerate(roles))


def _role_of_value(comparisons: Sequence[Comparison], term: int, role: str) -> str:
    return "same" if role == "constant" and _stays(_values_at(comparisons, term)) else role


def _values_at(comparisons: Sequence[Comparison], term: int) -> list[list[float]]:
    return [[(run.terms or ())[term].value for run in one.runs] for one in comparisons]


def _one_weight(runs: Sequence[Run], roles: Sequence[str]) -> bool:
    """Whether one number for a part is right for all of its terms, and none of these was
    clamped.
    """
    if any(run.is_clamped for run in runs):
        return False
    first, *others = (run.divisors or () for run in runs)
    return not roles or all(go_together(roles, first, now) for now in others)
