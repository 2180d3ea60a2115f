"""Better plans while training runs: when steps have paid for it, others are looked for, and those
that hold take turns with the one there is, in real steps (`plan_comparison.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass

from gradfit.batches.weights import UnreadableLoss
from gradfit.fitting.batch_shapes import Shape
from gradfit.fitting.families import PlanningTime
from gradfit.fitting.known_plans import KnownPlans
from gradfit.fitting.plan_comparison import PlanComparison
from gradfit.fitting.plan_finisher import PlanFinisher
from gradfit.fitting.plan_search import may_be_beaten, plans_in_tiles
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.rival_plans import rivals_of
from gradfit.fitting.step_to_plan import PlanRequest
from gradfit.fitting.tested_plan import TestedPlan, keeps_whole_batch

# Looking for rivals of a plan, and for plans in tiles, takes about so many of its steps.
_RIVALS_STEPS, _TILES_STEPS = 4.0, 10.0


@dataclass
class _StillToDo:
    """What is left to be done for a plan."""

    comparison: PlanComparison | None  # None: the plan stays until there are others
    looks_for_rivals: bool = True
    looks_for_tiles: bool = True

    def steps_of_next(self, tested: TestedPlan) -> float:
        """How many steps' time is taken by what would be looked for next; infinite if that is
        nothing.
        """
        if self.looks_for_rivals and not keeps_whole_batch(tested.plan):
            return _RIVALS_STEPS
        if self.looks_for_tiles and may_be_beaten(tested):
            return _TILES_STEPS
        return math.inf


class PlanImprovement:
    """What is left to be done for each plan.

    Args:
        tools: what plans are made with.
        known: where the fastest takes the place of the others.
        finisher: of plans that were tried out.
        time: how much of it may be spent.
    """

    def __init__(
        self, tools: PlanTools, known: KnownPlans, finisher: PlanFinisher, time: PlanningTime
    ) -> None:
        self._tools, self._known, self._finisher, self._time = tools, known, finisher, time
        # by shape; nothing of a plan for which all is done
        self._left: dict[Shape, _StillToDo] = {}

    # -- which plans are improved -----------------------------------------------------------------

    def begin(self, tested: TestedPlan) -> None:
        """A new plan: it is timed, and others are looked for, if that was not done before the first
        step.
        """
        if tested.steady and not self._tools.step.compares_ahead:
            self._left[tested.shape] = _StillToDo(
                PlanComparison([tested]),
                looks_for_tiles=self._tools.step.tile and tested.plan.tiles is None,
            )

    def forget_all_but(self, shapes: Collection[Shape]) -> None:
        """There are plans for these shapes alone."""
        self._left = {shape: one for shape, one in self._left.items() if shape in shapes}

    def is_done(self, tested: TestedPlan) -> bool:
        """Whether nothing is left to be done for batches of its shape."""
        return tested.shape not in self._left

    # -- whose turn it is -------------------------------------------------------------------------

    def in_turn(self, tested: TestedPlan, request: PlanRequest) -> TestedPlan:
        """The plan whose turn it is, of those that are compared."""
        left = self._left_for(tested, request)
        if left is None or left.comparison is None or left.comparison.tested is tested:
            return tested
        return self._known.exchange(tested, left.comparison.tested)

    def is_compared(self, tested: TestedPlan) -> bool:
        """Whether it matters how long a step by this plan takes."""
        comparison = self._comparison(tested)
        return comparison is not None and comparison.tested is tested

    def rivals_in_turn(self, tested: TestedPlan) -> list[TestedPlan]:
        """The other plans that take turns with it."""
        comparison = self._comparison(tested)
        if comparison is None or not comparison.is_between_plans:
            return []
        return [one for one in comparison.plans if one is not tested]

    def took(self, tested: TestedPlan, seconds: float) -> TestedPlan:
        """A whole step by the plan whose turn it is has taken so long; gives the plan that is gone
        by now.
        """
        left = self._left[tested.shape]
        if left.comparison is None or not left.comparison.took(seconds):
            return tested
        fastest, left.comparison = left.comparison.fastest, None
        if math.isinf(left.steps_of_next(fastest)):
            del self._left[tested.shape]
        return self._known.exchange(tested, fastest)

    def replaced(self, old: TestedPlan, new: TestedPlan) -> None:
        """A step has taught something about one of the plans."""
        comparison = self._comparison(old)
        if comparison is not None:
            comparison.replace(old, new)

    def settle(self, tested: TestedPlan | None = None) -> None:
        """Compare no more plans, or none of those that this one is compared with: the one that is
        the fastest, as far as is known, stays.
        """
        for shape in [*self._left] if tested is None else [tested.shape]:
            left = self._left.pop(shape, None)
            if left is not None and left.comparison is not None:
                known = self._known.all
                now = [one for one in left.comparison.plans if any(one is x for x in known)]
                for one in now:
                    self._known.exchange(one, left.comparison.fastest)

    # -- looking for others -----------------------------------------------------------------------

    def is_due(self, tested: TestedPlan, request: PlanRequest) -> bool:
        """Whether to look for faster plans now: those that there are were compared, and it takes no
        more than its share of the time.
        """
        left = self._left_for(tested, request)
        if left is None or left.comparison is not None:
            return False
        seconds = left.steps_of_next(tested) * tested.plan.step_seconds
        # a search may take as long as the last one did, however short the steps are
        return self._time.has_room_for(max(seconds, self._time.plan_seconds))

    def look_for_faster(self, tested: TestedPlan, request: PlanRequest) -> None:
        """Try out other plans for these batches; those that hold take turns with this one."""
        left, tools = self._left[tested.shape], self._tools
        found: list[TestedPlan] = []
        if left.looks_for_rivals:
            left.looks_for_rivals = False
            with contextlib.suppress(UnreadableLoss):  # then it is not cut for the clock's sake
                found = rivals_of(tools, tested, request.batch, tools.step.limit_bytes)
        else:
            left.looks_for_tiles = False
            found = plans_in_tiles(tools, request)
        if found:
            left.comparison = PlanComparison([tested, *map(self._finisher.finish, found)])
        elif math.isinf(left.steps_of_next(tested)):
            del self._left[tested.shape]

    def _left_for(self, tested: TestedPlan, request: PlanRequest) -> _StillToDo | None:
        """What is left to be done, if this batch is one that tells."""
        left = self._left.get(tested.shape)
        is_usual = (request.shape, request.batch_size) == (tested.shape, tested.plan.batch_size)
        return left if is_usual else None

    def _comparison(self, tested: TestedPlan) -> PlanComparison | None:
        left = self._left.get(tested.shape)
        return None if left is None else left.comparison
