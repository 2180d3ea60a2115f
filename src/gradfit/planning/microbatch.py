"""The micro-batch and the plan together: the fastest whole step under the budget.

A large micro-batch pays Python's fixed cost once; a small one needs less recomputation. The largest
micro-batch that fits with everything kept is the one to beat; from there the search goes up, where
recomputation buys fewer and larger micro-batches, for as long as that pays. A step cannot be faster
than its micro-batches with everything kept, so sizes for which even that is too slow are not
planned at all.

Recording takes time from the forward's beginning to the last operation that is not kept. Where that
is much of a step, plans are looked for that rebuild nothing after some earlier operation.

Weakness: sizes are tried on a grid (the batch by 1, 2, 3, 4, 6, 8, 12, …) and then next to the
best, not one by one; the search stops after two sizes that do not pay, though a third might.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gradfit.planning.recording_extent import in_effect, operations_recorded
from gradfit.planning.simulate import KEEP, Segments
from gradfit.planning.solver import Book, Effort, FastSolver, Solution
from gradfit.profiling.profile import Profile

_MUCH_RECORDING = 0.02  # of a step: then it may be worth rebuilding other values, made earlier


@dataclass(frozen=True)
class SizedPlan:
    """A micro-batch size, the plan for it, and the seconds of the whole step."""

    micro_batch: int
    steps: int
    solution: Solution
    step_seconds: float
    plain_seconds: float
    solver: FastSolver


class MicrobatchSearch:
    """All micro-batch sizes of one profile and one batch size; solvers are made once per size."""

    def __init__(
        self, profile: Profile, batch_size: int, *, split: bool, micro_batch: int | None = None
    ) -> None:
        self.profile, self.batch_size = profile, batch_size
        self.least = self.largest = batch_size if micro_batch is None else micro_batch
        if micro_batch is None and split and profile.splittable:
            self.least = max(1, min(profile.min_batch, batch_size))
        self._solvers: dict[int, FastSolver] = {}
        self._book: Book = {}
        self._smallest: SizedPlan | None = None

    def quick(self, budget_bytes: int) -> SizedPlan | None:
        """About the fastest step, some per cent slower and in a fraction of the time; or what
        `best` finds.
        """
        quick = self._best_on_grid(self._sizes(), budget_bytes, effort="price")
        if quick is None:
            return self.best(budget_bytes)
        return self._recorded_shorter(quick, budget_bytes)

    def best(self, budget_bytes: int, *, effort: Effort = "anneal") -> SizedPlan | None:
        """The fastest step found, or None if nothing fits."""
        found = self._best(budget_bytes, effort)
        if found is None and self.smallest().solution.peak_bytes <= budget_bytes:
            return self.smallest()
        return found

    def _best(self, budget_bytes: int, effort: Effort) -> SizedPlan | None:
        sizes = self._sizes()
        best = self._best_on_grid(sizes, budget_bytes)
        if best is None and self._has_a_choice:
            # In one piece there are no gradients to hold during the forward, so it can fit where
            # two pieces do not.
            best = self.at_size(self.largest, budget_bytes, effort="chain")
        if best is None:
            return None
        best = self._best_next_to(best, sizes, budget_bytes)
        best = _faster(best, self.at_size(best.micro_batch, budget_bytes, effort=effort))
        return self._recorded_shorter(best, budget_bytes) if effort == "anneal" else best

    def _recorded_shorter(self, best: SizedPlan, budget_bytes: int) -> SizedPlan:
        """The faster of this plan and those of which less is recorded: nothing is rebuilt after a
        quarter of what is recorded now, a half or three quarters, or about an eighth from there.
        """
        size, solution = best.micro_batch, best.solution
        seconds = self._recording_seconds(size, solution)
        if not solution.extra_seconds or seconds < _MUCH_RECORDING * best.step_seconds:
            return best
        recorded = self._recorded(size, solution)

        def ending_at(eighths: int) -> SizedPlan | None:
            return self._rebuilding_before(recorded * eighths // 8, size, budget_bytes)

        quarters = [(one, at) for at in (2, 4, 6) if (one := ending_at(at)) is not None]
        if not quarters:
            return best
        shorter, around = min(quarters, key=lambda found: found[0].step_seconds)
        for choice in (shorter, ending_at(around - 1), ending_at(around + 1)):
            best = _faster(best, choice)
        return best

    def _rebuilding_before(
        self, operation: int, micro_batch: int, budget_bytes: int
    ) -> SizedPlan | None:
        """A plan that keeps all that this operation and those after it make, as far as it can be
        kept.
        """
        graph = self.solver(micro_batch).graph
        after = (value for value, made in enumerate(graph.producer) if made >= operation)
        kept = {value: KEEP for value in after if graph.keepable[value]}
        solver = FastSolver(replace(graph, fixed={**kept, **graph.fixed}), self._book)
        solution = solver.solve(budget_bytes, effort="price")
        return None if solution is None else self._choice(micro_batch, solution)

    @property
    def _has_a_choice(self) -> bool:
        return self.least < self.largest

    def _sizes(self) -> list[int]:
        return _grid(self.batch_size, self.least) if self._has_a_choice else [self.least]

    def _best_on_grid(
        self, sizes: list[int], budget_bytes: int, *, effort: Effort = "chain"
    ) -> SizedPlan | None:
        """From the largest size that needs no recomputation upwards, for as long as that pays."""
        larger = iter(sizes[self._largest_plain(sizes, budget_bytes) :: -1])
        best = self._first_that_fits(larger, budget_bytes, effort)
        if best is None:
            return None
        idle = 0  # sizes in a row that were not faster
        for size in larger:
            if idle == 2 or not self._may_be_faster(size, best):
                break
            choice = self.at_size(size, budget_bytes, effort=effort)
            if choice is None:
                break  # larger ones need more
            idle = idle + 1 if choice.step_seconds >= best.step_seconds else 0
            best = _faster(best, choice)
        return best

    def _first_that_fits(
        self, sizes: Iterator[int], budget_bytes: int, effort: Effort
    ) -> SizedPlan | None:
        """The plan of the first size that has one; goes through the sizes so far."""
        choices = (self.at_size(size, budget_bytes, effort=effort) for size in sizes)
        return next((choice for choice in choices if choice is not None), None)

    def _best_next_to(self, best: SizedPlan, sizes: list[int], budget_bytes: int) -> SizedPlan:
        """The faster of this plan and those of the sizes between it and its neighbours."""
        for size in self._between(sizes, best.micro_batch):
            if self._may_be_faster(size, best):
                best = _faster(best, self.at_size(size, budget_bytes, effort="chain"))
        return best

    def _may_be_faster(self, size: int, best: SizedPlan) -> bool:
        """Recomputation comes on top: what is too slow with everything kept need not be planned."""
        return self._plain_step_seconds(size) < best.step_seconds

    def at_size(
        self, micro_batch: int, budget_bytes: int, *, effort: Effort = "anneal"
    ) -> SizedPlan | None:
        """The best plan for this very micro-batch."""
        solution = self.solver(micro_batch).solve(budget_bytes, effort=effort)
        return None if solution is None else self._choice(micro_batch, solution)

    def plain(self, budget_bytes: int) -> SizedPlan | None:
        """The largest micro-batch that needs no recomputation."""
        size = self._largest_plain_size(budget_bytes)
        if size < self.least:
            return None
        if self._has_a_choice:
            size = even(self.batch_size, size)
        return self._choice(size, self.solver(size).plain)

    def _largest_plain_size(self, budget_bytes: int) -> int:
        """By bisection; less than the least size if even that needs recomputation."""
        low, high = self.least - 1, self.largest
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_plain(middle, budget_bytes):
                low = middle
            else:
                high = middle - 1
        return low

    def recomputing(self, above: int, budget_bytes: int, most_seconds: float) -> SizedPlan | None:
        """The fastest step of micro-batches larger than this one, all of which need recomputation;
        None if too slow.
        """
        best = self._best_above(above, budget_bytes)
        if best is None or best.step_seconds > most_seconds:
            return None
        return _faster(best, self.at_size(best.micro_batch, budget_bytes))

    def _best_above(self, above: int, budget_bytes: int) -> SizedPlan | None:
        """At a glance, the fastest of the grid's sizes above this one."""
        best: SizedPlan | None = None
        for size in reversed([size for size in _grid(self.batch_size, self.least) if size > above]):
            choice = self.at_size(size, budget_bytes, effort="glance")
            if choice is None:
                break  # larger ones need more
            best = choice if best is None else _faster(best, choice)
        return best

    def of_plan(self, micro_batch: int, actions: Sequence[int], segments: Segments) -> SizedPlan:
        """What this profile says of a plan that exists already, whatever was measured of it
        since.
        """
        solver = self.solver(micro_batch)
        if all(action == KEEP for action in actions):
            return self._choice(micro_batch, solver.plain)
        run = solver.simulator.run(actions, segments)
        return self._choice(micro_batch, Solution(tuple(actions), segments, run))

    def _is_plain(self, micro_batch: int, budget_bytes: int) -> bool:
        return self.solver(micro_batch).plain.peak_bytes <= budget_bytes

    def smallest(self) -> SizedPlan:
        """The plan of the smallest peak: at the smallest micro-batch, or in one piece.

        What is worth doing with a piece depends a little on which sizes were searched before. This
        search has a book of its own, so that a budget that was named holds when it is asked for.
        """
        if self._smallest is None:
            book: Book = {}
            choices = [
                self._choice(size, FastSolver(self.solver(size).graph, book).smallest())
                for size in sorted({self.least, self.largest})
            ]
            self._smallest = min(
                choices, key=lambda choice: (choice.solution.peak_bytes, choice.step_seconds)
            )
        return self._smallest

    def solver(self, micro_batch: int) -> FastSolver:
        if micro_batch not in self._solvers:
            accumulates = micro_batch < self.batch_size
            graph = self.profile.at(micro_batch, accumulates=accumulates, rows=self.batch_size)
            self._solvers[micro_batch] = FastSolver(graph, self._book)
        return self._solvers[micro_batch]

    def _largest_plain(self, sizes: list[int], budget_bytes: int) -> int:
        """The position of the largest size that needs no recomputation; the last if all do."""
        if self._is_plain(sizes[0], budget_bytes):
            return 0
        last = len(sizes) - 1
        smaller = bisect_left(
            sizes, True, 1, last, key=lambda size: self._is_plain(size, budget_bytes)
        )
        return min(smaller, last)

    def _between(self, sizes: list[int], size: int) -> list[int]:
        position = sizes.index(size)
        around = sizes[max(0, position - 1) : position + 2]
        return sorted(
            {even(self.batch_size, (a + b) // 2) for a, b in pairwise(around)} - set(sizes),
            reverse=True,
        )

    def _plain_step_seconds(self, micro_batch: int) -> float:
        profile = self.profile
        full, rest = divmod(self.batch_size, micro_batch)
        seconds = profile.optimizer_seconds
        if full:
            seconds += full * profile.plain_seconds(micro_batch)
        if rest:
            seconds += profile.plain_seconds(rest)
        return seconds

    def _recording_seconds(self, micro_batch: int, solution: Solution) -> float:
        """What writing down the forwards of the step takes."""
        recorded = self._recorded(micro_batch, solution)
        return -(-self.batch_size // micro_batch) * recorded * self.profile.record_overhead_seconds

    def _recorded(self, micro_batch: int, solution: Solution) -> int:
        """How many operations of a forward are recorded."""
        solver = self.solver(micro_batch)
        until = solver.simulator.alive_until(solution.actions)
        return operations_recorded(solver.graph, in_effect(solution.actions, until))

    def _choice(self, micro_batch: int, solution: Solution) -> SizedPlan:
        plain = self._plain_step_seconds(micro_batch)
        # The last micro-batch may be smaller; its recomputation is in proportion. What keeps all is
        # not recorded.
        extra = solution.extra_seconds * self.batch_size / micro_batch
        if solution.extra_seconds:
            extra += self._recording_seconds(micro_batch, solution)
        steps = -(-self.batch_size // micro_batch)
        return SizedPlan(
            micro_batch, steps, solution, plain + extra, plain, self.solver(micro_batch)
        )


def _faster(first: SizedPlan, second: SizedPlan | None) -> SizedPlan:
    if second is None:
        return first
    return second if second.step_seconds < first.step_seconds else first


def even(batch_size: int, micro_batch: int) -> int:
    """The smallest micro-batch that needs no more steps than this one: the last is then not much
    smaller than the rest.

    >>> even(16, 9)
    8
    """
    steps = -(-batch_size // micro_batch)
    return -(-batch_size // steps)


def _grid(batch_size: int, least: int) -> list[int]:
    """The batch in 1, 2, 3, 4, 6, 8, 12, … pieces, from the whole batch down to the least size.

    >>> _grid(64, 8)
    [64, 32, 22, 16, 11, 8]
    """
    steps, sizes = 1, [batch_size]
    while sizes[-1] > least:
        power = 1 << (steps.bit_length() - 1)
        steps += max(1, power // 2)
        sizes.append(max(least, -(-batch_size // steps)))
    return list(dict.fromkeys(sizes))
