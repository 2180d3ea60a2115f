"""How many rows a batch has, its shape, and its parts.

Where only `split=` knows, rows are counted by cutting the batch into single ones, which may take as
long as a tenth of a step. So it is not asked before somebody must know: if a cut at the size of a
plan gives no more parts than the plan has, then the batch has at most the plan's rows, and the step
is those parts.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gradfit.batches.runner import MicroBatchRunner, Part
from gradfit.fitting.batch_shapes import Shape, shape_of
from gradfit.planning.plan import Plan


class BatchRows:
    """Of one batch, for the time of a step.

    Args:
        runner: cuts it.
        batch: any batch.
    """

    def __init__(self, runner: MicroBatchRunner, batch: Any) -> None:
        self._runner, self.batch = runner, batch
        self._exact: int | None = None if runner.split is not None else runner.rows(batch)
        self._cut: tuple[int, list[Any]] | None = None  # a size, and the parts that it gave

    @cached_property
    def shape(self) -> Shape:
        """By which its plans are found. A step asks for it several times, and a batch may hold
        hundreds of tensors.
        """
        return _shape(self._runner, self.batch)

    @property
    def is_counted(self) -> bool:
        """Whether the rows themselves are known, and not only that they are few enough."""
        return self._exact is not None

    @property
    def exact(self) -> int:
        """How many there are, counted if need be."""
        if self._exact is None:
            self._exact = self._runner.rows(self.batch)
        return self._exact

    def at_most(self, plan: Plan | None) -> int:
        """How many there are; or what a plan is for, if a cut by it gives no more parts."""
        if self._exact is None and plan is not None:
            parts = list(self._runner.cut(self.batch, plan.micro_batch))
            if 0 < len(parts) <= plan.steps:
                self._cut = plan.micro_batch, parts
                return min(len(parts) * plan.micro_batch, plan.batch_size)
        return self.exact

    def parts(self, size: int) -> list[Part]:
        """The batch in parts of so many rows; of one that was not counted, each is said to have
        all of them.
        """
        if self._exact is None and self._cut is not None and self._cut[0] == size:
            return [Part(place, size, part) for place, part in enumerate(self._cut[1])]
        return self._runner.parts(self.batch, size, self.exact)

    def of_part(self, position: int) -> int:
        """How many rows a part has that was said to have all."""
        assert self._cut is not None, "the parts are those of a cut"
        size, parts = self._cut
        return self._runner.rows_of_parts(parts, size, self.exact)[position]


class RowCounter:
    """Counts the rows of batches and finds their shapes, those of the batch of a running step once.

    Args:
        runner: cuts them.
    """

    def __init__(self, runner: MicroBatchRunner) -> None:
        self._runner = runner
        self.of_step: BatchRows | None = None
        """Of the batch of the step that runs now."""

    def begin_step(self, batch: Any) -> BatchRows:
        """The rows of a step's batch, which are counted once, or not at all where that need not
        be; until `end_step`.
        """
        self.of_step = BatchRows(self._runner, batch)
        return self.of_step

    def end_step(self) -> None:
        """The step is over: its batch is let go."""
        self.of_step = None

    def count(self, batch: Any) -> int:
        """How many rows a batch has."""
        if self.of_step is not None and self.of_step.batch is batch:
            return self.of_step.exact
        return self._runner.rows(batch)

    def shape(self, batch: Any) -> Shape:
        """By which a batch's plans are found."""
        if self.of_step is not None and self.of_step.batch is batch:
            return self.of_step.shape
        return _shape(self._runner, batch)


def _shape(runner: MicroBatchRunner, batch: Any) -> Shape:
    return shape_of(batch, rows=runner.split is not None)
