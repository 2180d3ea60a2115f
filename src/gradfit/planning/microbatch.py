"""The micro-batch and the plan together: the fastest whole step under the budget.

A large micro-batch pays Python's fixed cost once; a small one needs less recomputation. For each number of steps the
fast solver gives the best plan; since a step cannot be faster than its micro-batches with everything kept, sizes whose
plain time already exceeds the best step found are not tried.

Weakness: numbers of steps are tried on a grid (1, 2, 3, 4, 6, 8, 12, …) and then next to the best, not one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from gradfit.planning.fast import FastSolver, Solution
from gradfit.profiling.graph import Graph
from gradfit.profiling.record import Profile


@dataclass(frozen=True)
class Choice:
    """A micro-batch size, the plan for it, and the seconds of the whole step."""

    micro_batch: int
    steps: int
    solution: Solution
    step_seconds: float
    plain_seconds: float
    solver: FastSolver


class MicrobatchSearch:
    """All micro-batch sizes of one profile and one batch size; solvers are made once per size."""

    def __init__(self, profile: Profile, batch_size: int, *, split: bool) -> None:
        self.profile, self.batch_size = profile, batch_size
        smallest = max(1, min(profile.min_batch, batch_size))
        self.most_steps = batch_size // smallest if split and profile.splittable else 1
        self._solvers: dict[int, FastSolver] = {}

    def best(self, budget_bytes: int, *, polish: bool = True) -> Choice | None:
        """The fastest step found, or None if nothing fits."""
        best: Choice | None = None
        grid = _grid(self.most_steps)
        for steps in grid:
            if best is not None and self._plain_step_seconds(steps) >= best.step_seconds:
                break
            found = self._at(steps, budget_bytes, polish=False)
            best = found if best is None else _faster(best, found)
        if best is None:
            return None
        position = grid.index(best.steps) if best.steps in grid else 0
        around = grid[max(0, position - 1) : position + 2]
        between = {(a + b) // 2 for a, b in pairwise(around)} - set(grid)
        for steps in sorted(between):
            if self._plain_step_seconds(steps) < best.step_seconds:
                best = _faster(best, self._at(steps, budget_bytes, polish=False))
        return _faster(best, self._at(best.steps, budget_bytes, polish=True)) if polish else best

    def at_size(self, micro_batch: int, budget_bytes: int) -> Choice | None:
        """The best plan for this very micro-batch."""
        return self._at(-(-self.batch_size // micro_batch), budget_bytes, polish=True)

    def smallest(self) -> Choice:
        """The plan of the smallest peak, at the smallest micro-batch."""
        steps = self.most_steps
        return self._choice(steps, self.solver(steps).smallest())

    def solver(self, steps: int) -> FastSolver:
        if steps not in self._solvers:
            self._solvers[steps] = FastSolver(self._graph(steps))
        return self._solvers[steps]

    def micro_batch(self, steps: int) -> int:
        return -(-self.batch_size // steps)

    def _graph(self, steps: int) -> Graph:
        return self.profile.at(self.micro_batch(steps), accumulates=steps > 1, rows=self.batch_size)

    def _plain_step_seconds(self, steps: int) -> float:
        profile, micro = self.profile, self.micro_batch(steps)
        full, rest = divmod(self.batch_size, micro)
        seconds = profile.optimizer_seconds
        for size, times in ((micro, full), (rest, 1 if rest else 0)):
            if times:
                seconds += times * (
                    profile.forward_seconds(size) + profile.backward_seconds(size) + profile.overhead_seconds
                )
        return seconds

    def _at(self, steps: int, budget_bytes: int, *, polish: bool) -> Choice | None:
        solution = self.solver(steps).solve(budget_bytes, polish=polish)
        return None if solution is None else self._choice(steps, solution)

    def _choice(self, steps: int, solution: Solution) -> Choice:
        micro = self.micro_batch(steps)
        plain = self._plain_step_seconds(steps)
        # The last micro-batch may be smaller; its recomputation is in proportion.
        extra = solution.extra_seconds * self.batch_size / micro
        return Choice(micro, -(-self.batch_size // micro), solution, plain + extra, plain, self.solver(steps))


def _faster(first: Choice, second: Choice | None) -> Choice:
    return second if second is not None and second.step_seconds < first.step_seconds else first


def _grid(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to `most`."""
    steps = [1]
    while steps[-1] < most:
        power = 1 << (steps[-1].bit_length() - 1)
        steps.append(steps[-1] + max(1, power // 2))
    return sorted({min(step, most) for step in steps})
