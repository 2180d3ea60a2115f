"""Micro-batches that are small for larger batches' sake alone become larger.

A batch of a shape that no plan was made for may be run in the micro-batches of a plan for larger
ones: the rows of a token budget, above all, are many where they are short. One step of such a batch
is measured, and from then on its shape goes by micro-batches as large as hold.
"""

from __future__ import annotations

from gradfit.fitting.batch_rows import RowCounter
from gradfit.fitting.batch_shapes import Shape
from gradfit.fitting.families import MOST_PLANS, in_larger_parts
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.fitting.tested_plan import TestedPlan

_ANY = 1 << 62  # rows


class LargerParts:
    """What was measured of shapes that have no plan of their own.

    Args:
        step: what plans are made for.
        rows: of the batch of the step that runs.
    """

    def __init__(self, step: StepToPlan, rows: RowCounter) -> None:
        self._step, self._rows = step, rows
        self._measured: set[Shape] = set()
        self._too_large: dict[Shape, int] = {}  # micro-batches that did not hold

    def are_to_be_measured(self, tested: TestedPlan) -> bool:
        """Whether a step by this plan tells of a shape what is not known yet."""
        return self._may_be_larger(tested) and self._shape() not in self._measured

    def after_step(self, tested: TestedPlan, passes_bytes: int) -> TestedPlan | None:
        """The plan in larger micro-batches for batches like this step's, whose passes have taken so
        much; None if there is none.
        """
        if not self._may_be_larger(tested) or self._rows.of_step is None:
            return None
        shape, rows = self._shape(), self._rows.of_step.exact
        self._measured.add(shape)
        below = self._too_large.get(shape, _ANY)
        return in_larger_parts(tested, shape, rows, passes_bytes, self._step.limit_bytes, below)

    def did_not_hold(self, shape: Shape, micro_batch: int) -> None:
        """Batches of this shape are run in smaller ones."""
        if len(self._too_large) < MOST_PLANS:
            self._too_large[shape] = micro_batch

    def _may_be_larger(self, tested: TestedPlan) -> bool:
        """Whether the micro-batches of this step may be too small. What `split=` cuts is of another
        shape each time.
        """
        rows, plan, step = self._rows.of_step, tested.plan, self._step
        if rows is None or not rows.is_counted or rows.exact <= plan.micro_batch:
            return False
        if step.compares_ahead or step.micro_batch is not None or not plan.keeps_everything:
            return False
        is_own = not tested.by_size and tested.shape == self._shape()
        return not is_own and len(self._measured) < MOST_PLANS

    def _shape(self) -> Shape:
        assert self._rows.of_step is not None, "a step has a batch"
        return self._rows.of_step.shape
