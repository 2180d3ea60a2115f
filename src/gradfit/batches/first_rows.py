"""The first rows of a batch, so many of them, cut once for all that run them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from gradfit.batches.runner import count_rows
from gradfit.tree import Copies, split_batch

_Cut = Callable[[Any, int], Iterable[Any]]
_asks_for_gradient = operator.attrgetter("requires_grad")


class FirstRows:
    """Hands out the first rows of a batch, in containers that `loss_fn` may change.

    Views are cut once for each number of rows, since a batch may hold thousands of tensors, and
    again if gradients were asked of them.

    Args:
        batch: what is cut.
        split: as for `fit`, which may make copies, and is asked each time; None cuts along dim 0.
        total: the rows of the batch, if they were counted.

    >>> import torch
    >>> first = FirstRows({"x": torch.arange(4)})
    >>> first.total, first.of(2), first.of(2)["x"] is first.of(2)["x"]
    (4, {'x': tensor([0, 1])}, True)
    """

    def __init__(self, batch: Any, split: _Cut | None = None, total: int | None = None) -> None:
        self.batch, self.split = batch, split
        self._parts: dict[int, Copies] = {}
        if total is not None:
            self.total = total

    @cached_property
    def total(self) -> int:
        """The rows of the batch."""
        return count_rows(self.batch, self.split, "sample_batch")

    def of(self, rows: int) -> Any:
        """So many rows, or as many as there are."""
        if self.split is not None:
            return next(iter(self.split(self.batch, rows)))
        rows = min(rows, self.total)
        copies = self._parts.get(rows)
        if copies is None or any(map(_asks_for_gradient, copies.tensors)):
            part = next(split_batch(self.batch, rows, self.total))
            copies = self._parts[rows] = Copies(part)
        return copies.another()
