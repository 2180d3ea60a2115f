"""The plans of a step that were made so far, and which of them serve a batch.

They are remembered within bounds: what was not used for longest goes first (`families.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from gradfit.fitting.batch_shapes import Shape, covers
from gradfit.fitting.families import (
    MOST_PLANS,
    covering,
    fewest_passes,
    grown,
    in_smaller_parts,
    kept_where_smaller,
    smaller_shape,
    with_slack,
    within_memory,
)
from gradfit.fitting.measured_loss import MeasuredLoss
from gradfit.fitting.step_to_plan import PlanRequest, StepToPlan
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.profiling.update_groups import may_be_cut


class KnownPlans:
    """Plans by the shapes of batches.

    Args:
        step: what they are plans for.
        loss: whether a batch may be cut.
    """

    def __init__(self, step: StepToPlan, loss: MeasuredLoss) -> None:
        self._step, self._loss = step, loss
        self.all: list[TestedPlan] = []
        """In the order in which they are tried for a batch; a new list whenever one comes or goes.
        """
        self._used: dict[int, int] = {}  # by a plan's address: when it was last used
        self._clock = 0
        # for which it was looked whether everything can be kept where a larger one's plan rebuilds
        self._smaller: set[Shape] = set()

    def take_up(self, plans: Iterable[TestedPlan]) -> None:
        """Go by these plans from now on, and by what was measured of the loss when they were
        made.
        """
        # of another optimizer, perhaps, which may be updated in groups where this one may not
        plans = [one for one in plans if may_be_cut(self._step.optimizer, one.plan.update_groups)]
        self.all = [with_slack(plan, self._step.limit_bytes) for plan in plans]
        self._loss.additivity = self.all[0].profile.additivity if self.all else None

    # -- which one serves a batch -----------------------------------------------------------------

    def for_larger(self, request: PlanRequest) -> TestedPlan | None:
        """The plan that holds, for batches at least as large as this one."""
        larger = covering(self._holding(), request.shape, request.batch_size)
        return fewest_passes(larger, request.batch_size)

    def for_any_rows(self, shape: Shape) -> TestedPlan | None:
        """The plan for batches of this shape whose rows were not counted."""
        larger = covering(self._holding(), shape, 0)
        return fewest_passes(larger, max((one.plan.batch_size for one in larger), default=0))

    def grown(self, request: PlanRequest) -> TestedPlan | None:
        """What arithmetic makes of a plan for smaller batches, if that surely holds."""
        limit_bytes = self._step.limit_bytes
        return grown(self._holding(), request.shape, request.batch_size, limit_bytes)

    def in_parts(self, request: PlanRequest, below: int | None = None) -> TestedPlan | None:
        """Micro-batches so small that they hold by arithmetic, until there is time for a plan of
        their own; or, where one of so many rows has not, of fewer.
        """
        if self._step.compares_ahead or self._step.micro_batch is not None:
            return None
        return in_smaller_parts(
            self._holding(), request.shape, request.batch_size, self._step.limit_bytes, below
        )

    def may_be_kept(self, larger: TestedPlan, request: PlanRequest) -> bool:
        """Whether `kept_where_smaller` has not looked yet at batches like this one, for which there
        is a plan for larger ones.
        """
        return self._unlike_larger(larger, request) is not None

    def kept_where_smaller(self, larger: TestedPlan, request: PlanRequest) -> TestedPlan | None:
        """Everything kept for batches like this one, for which there is a plan for larger ones that
        rebuilds, if that holds by arithmetic; looked at once.
        """
        shape = self._unlike_larger(larger, request)
        if shape is None:
            return None
        if len(self._smaller) >= MOST_PLANS:
            self._smaller.clear()
        self._smaller.add(shape)
        return kept_where_smaller(larger, shape, request.batch_size, self._step.limit_bytes)

    def is_kept_where_smaller(self, tested: TestedPlan) -> bool:
        """Whether a plan is one that `kept_where_smaller` has found."""
        return tested.by_size and tested.plan.keeps_everything and tested.shape in self._smaller

    def _unlike_larger(self, larger: TestedPlan, request: PlanRequest) -> Shape | None:
        """The shape for which `kept_where_smaller` is to be asked; None: nothing need be."""
        step = self._step
        if larger.plan.keeps_everything or not larger.steady or larger.by_size:
            return None
        if step.compares_ahead or step.reproducible or step.micro_batch is not None:
            return None
        if step.runner.split is not None and request.batch_size != larger.plan.batch_size:
            return None  # rows are in the shape
        shape = smaller_shape(larger, request.shape)
        return None if shape in self._smaller else shape

    def held_in_parts(self, request: PlanRequest, below: int) -> TestedPlan | None:
        """Of such plans for micro-batches of fewer rows than this, the one with the largest that a
        step has gone by.
        """
        plans = covering(self._holding(), request.shape, request.batch_size)
        held = (
            one
            for one in plans
            if one.by_size and one.seen and one.plan.keeps_everything
            if one.plan.micro_batch < below
        )
        return max(held, key=lambda one: one.plan.micro_batch, default=None)

    def _holding(self) -> list[TestedPlan]:
        return [tested for tested in self.all if self._holds(tested)]

    def _holds(self, tested: TestedPlan) -> bool:
        """Whether a plan is one for this budget: it may come from a step with a larger one, or from
        another loss.
        """
        return self._within_budget(tested) and (
            tested.plan.steps == 1 or self._loss.may_be_in_parts
        )

    def _within_budget(self, tested: TestedPlan) -> bool:
        """Whether its measured peak is within the budget. A real step's has in it what a trial does
        not hold.
        """
        step, has_stepped = self._step, tested.seen_bytes > 0
        return tested.peak_bytes <= (
            step.budget_bytes - step.reserved_bytes if has_stepped else step.limit_bytes
        )

    # -- remembering them -------------------------------------------------------------------------

    def mark_used(self, tested: TestedPlan) -> TestedPlan:
        """It serves a batch now."""
        self._used[id(tested)] = self._clock = self._clock + 1
        return tested

    def remember(self, tested: TestedPlan) -> TestedPlan:
        """Take in a plan, in the place of one for the same shape and the same operations."""
        others = [other for other in self.all if not _takes_the_place_of(tested, other)]
        kept = within_memory(others, self._used)
        self.all = sorted([*kept, tested], key=lambda one: one.plan.peak_bytes)
        self._used = {id(one): self._used.get(id(one), 0) for one in self.all}
        return tested

    def exchange(self, old: TestedPlan, new: TestedPlan) -> TestedPlan:
        """Go by another plan for the same batches."""
        self._used[id(new)] = self._used.pop(id(old), 0)
        self.all = [new if one is old else one for one in self.all]
        return new

    def forget(self, tested: TestedPlan) -> None:
        """It does not hold."""
        self.all = [other for other in self.all if other is not tested]


def _takes_the_place_of(new: TestedPlan, old: TestedPlan) -> bool:
    """Whether both are for the same shape, and the same operations, if those are always the
    same; or one was only found by arithmetic.
    """
    if old.by_size and not new.by_size and covers(old.shape, new.shape):
        return True  # it was for the time until then
    if new.shape != old.shape or (new.by_size and not old.by_size):
        return False  # what arithmetic finds comes from what was measured
    return not old.steady or old.plan.operations == new.plan.operations
