"""How many rows a batch has, and its parts.

Where only `split=` knows, rows are counted by cutting the batch into single ones, which may take as
long as a tenth of a step. So it is not asked before somebody must know: if a cut at the size of a
plan gives one part, then the batch has at most so many rows, and the step is that part.
"""

from __future__ import annotations

from typing import Any

from gradfit.batches.runner import MicroBatchRunner, Part


class BatchRows:
    """Of one batch, for the time of a step.

    Args:
        runner: cuts it.
        batch: any batch.
    """

    def __init__(self, runner: MicroBatchRunner, batch: Any) -> None:
        self._runner, self.batch = runner, batch
        self._exact: int | None = None if runner.split is not None else runner.rows(batch)
        self._whole: tuple[int, Any] | None = None  # a size, and the one part that a cut gave

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

    def at_most(self, size: int | None) -> int:
        """How many there are, or `size` if a cut into parts of that size gives one."""
        if self._exact is None and size is not None:
            parts = list(self._runner.cut(self.batch, size))
            if len(parts) == 1:
                self._whole = size, parts[0]
                return size
        return self.exact

    def parts(self, size: int) -> list[Part]:
        """The batch in parts of so many rows; of one that was not counted, `rows` is the size."""
        if self._exact is None and self._whole is not None and self._whole[0] == size:
            return [Part(0, size, self._whole[1])]
        return self._runner.parts(self.batch, size, self.exact)


class RowCounter:
    """Counts the rows of batches, those of the batch of a running step once.

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
