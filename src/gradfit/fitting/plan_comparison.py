"""Which of a few plans for the same batches is the fastest, found in real steps.

A step is exact by whichever of them it is run, so they take turns, and nothing is run for the
clock's sake alone. What is clearly behind is left out (`race.py`), and the fastest stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gradfit.fitting.race import Race
from gradfit.fitting.tested_plan import TestedPlan


class PlanComparison:
    """Whose turn it is, and how long steps took.

    Args:
        plans: what is compared; the one that is predicted to be the fastest first. One that is
            alone is timed for its own sake.
    """

    def __init__(self, plans: Sequence[TestedPlan]) -> None:
        self.plans = list(plans)
        self._race = Race([1.0] * len(self.plans))
        self._waiting = [*self._race.running]
        self._timed: set[int] = set()

    @property
    def tested(self) -> TestedPlan:
        """The plan whose turn it is."""
        return self.plans[self._waiting[0]]

    @property
    def is_between_plans(self) -> bool:
        """Whether several plans still take turns."""
        return len(self._race.running) > 1

    def replace(self, old: TestedPlan, new: TestedPlan) -> None:
        """Remember what a step has taught about one of the plans."""
        self.plans = [new if one is old else one for one in self.plans]

    def took(self, seconds: float) -> bool:
        """A whole step by the plan whose turn it is has taken so long; whether all is known now."""
        place = self._waiting.pop(0)
        self._race.add(place, seconds)
        self._timed.add(place)
        if self._waiting:
            return False
        self._race.drop_slow()
        self._waiting = [*self._race.running]
        return self._race.is_over

    @property
    def fastest(self) -> TestedPlan:
        """As far as is known: by the clock, with its seconds, once all were timed."""
        running = self._race.running
        if not self._timed.issuperset(running):
            return self.plans[running[0]]
        place = min(running, key=self._race.step_seconds)
        tested = self.plans[place]
        timed = tested.plan.with_step_seconds(self._race.step_seconds(place))
        return dataclasses.replace(tested, plan=timed)
