"""Runs micro-batches: the one place where `loss_fn` is called in a step, a trial, an audit and for
other trainers.

The runner knows how a batch is cut and how a loss is read. It knows no plans: how one micro-batch
is run (plainly, by a plan, below a limit) is a *mode*, which whoever knows of plans hands in.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from gradfit._torch import counted_writes_of
from gradfit._torch_listen import eager_functions
from gradfit.arguments import invalid
from gradfit.batches.loss import PartLoss, read_loss
from gradfit.errors import MisuseError
from gradfit.tree import leaves, size_of_batch, split_batch, unmarked, unmarked_with_leaves

LossFunction = Callable[[torch.nn.Module, Any], Any]
Cut = Callable[[Any, int], Iterable[Any]]
_NOTHING = contextlib.nullcontext()
_is_meta = operator.attrgetter("is_meta")


class Part(NamedTuple):
    """One micro-batch."""

    position: int
    """Its number within the batch."""
    rows: int
    content: Any


class Mode:
    """How one micro-batch is run; this one runs it plainly. An object serves one run."""

    def wrap(self, loss_fn: LossFunction) -> LossFunction:
        """The loss function in the form in which it is called."""
        return loss_fn

    def around_forward(self) -> contextlib.AbstractContextManager[object]:
        """What the forward pass runs in."""
        return _NOTHING

    def around_both(self) -> contextlib.AbstractContextManager[object]:
        """What both passes run in."""
        return _NOTHING


PLAIN = Mode()


class MicroBatchRunner:
    """Cuts batches and runs their parts.

    Args:
        model: in the mode in which it is trained.
        loss_fn: as for `fit`.
        split: as for `fit`; None cuts along dim 0.

    >>> runner = MicroBatchRunner(torch.nn.Linear(2, 1), lambda model, x: model(x).sum())
    >>> [part.rows for part in runner.parts(torch.ones(5, 2), 2)]
    [2, 2, 1]
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: LossFunction, split: Cut | None = None
    ) -> None:
        self.model, self.loss_fn, self.split = model, loss_fn, split

    def rows(self, batch: Any, name: str = "batch") -> int:
        """How many rows the batch has; `name` is what an error calls it."""
        return count_rows(batch, self.split, name)

    def cut(self, batch: Any, size: int) -> Iterable[Any]:
        """The batch in parts of so many rows."""
        return (self.split or split_batch)(batch, size)

    def parts(self, batch: Any, size: int, rows: int | None = None) -> list[Part]:
        """The same, with the rows of each. Where `split` cuts, only its own count tells how many
        those are.

        Args:
            batch: what to cut.
            size: rows of a part; the last may have fewer.
            rows: of the batch, if they have been counted.
        """
        rows = self.rows(batch) if rows is None else rows
        contents = list(self.split(batch, size) if self.split else split_batch(batch, size, rows))
        counts = self.rows_of_parts(contents, size, rows)
        return [*map(Part, itertools.count(), counts, contents)]

    def rows_of_parts(self, contents: list[Any], size: int, rows: int) -> list[int]:
        """How many rows each part has of a batch that was cut at this size."""
        if len(contents) == -(-rows // size):
            return [min(size, rows - start) for start in range(0, rows, size)]
        return [*map(self.rows, contents)]  # of a `split` that makes parts of other sizes

    def run(self, part: Part, mode: Mode, backward: Callable[[PartLoss], object]) -> None:
        """Both passes of one part; `backward` gets its loss."""
        with mode.around_both():
            part_loss = self.forward(part, mode)
            backward(part_loss)
            del part_loss  # before the contexts are left: its graph holds what they gave

    def forward(self, part: Part, mode: Mode = PLAIN) -> PartLoss:
        """The loss of one part."""
        with mode.around_forward():
            return run_part(mode.wrap(self.loss_fn), self.model, part.content, part.rows)


def as_written(loss_fn: LossFunction) -> LossFunction:
    """The same, where functions compiled by torch.compile run as they were written."""

    @functools.wraps(loss_fn)
    def run(model: torch.nn.Module, batch: Any) -> Any:
        with eager_functions():
            return loss_fn(model, batch)

    return run


def run_part(
    loss_fn: LossFunction,
    model: torch.nn.Module,
    batch: Any,
    rows: int = 0,
    *,
    is_checked: bool = False,
) -> PartLoss:
    """Call `loss_fn` with a batch of so many rows, and read what it returns.

    A `loss_fn` that changes the batch would see another one in the next micro-batch or after an
    out-of-memory. `is_checked`: it was seen, on the same rows, to leave them as they are.
    """
    if is_checked:
        return read_loss(loss_fn(model, unmarked(batch)), rows)
    batch, tensors = unmarked_with_leaves(batch)
    writes = counted_writes_of(tensors)
    result = loss_fn(model, batch)
    if _was_changed(batch, tensors, writes):
        raise MisuseError(
            "loss_fn changed the batch it was given. Work on a copy: batch = dict(batch), x ="
            " x.clone()."
        )
    return read_loss(result, rows)


def _was_changed(batch: Any, tensors: list[torch.Tensor], writes: list[int]) -> bool:
    """Whether there are other tensors than those, or some were written to since."""
    _, after = unmarked_with_leaves(batch)
    return (
        len(after) != len(tensors)
        or any(map(operator.is_not, after, tensors))
        or counted_writes_of(after) != writes
    )


def count_rows(batch: Any, split: Cut | None, name: str = "batch", *, fake: bool = False) -> int:
    """How many rows the batch has: the size of dim 0, or the number of parts of one row that
    `split` makes.
    """
    tensors = list(leaves(batch))
    if not fake and any(map(_is_meta, tensors)):
        raise invalid(
            name,
            batch,
            "is on the meta device, where tensors have no values",
            "a batch with values",
        )
    if split is not None:
        return _count_parts(batch, split)
    if not tensors:
        raise invalid(
            name,
            batch,
            "holds no tensor",
            "a tensor, or a list, tuple, dict or dataclass of tensors",
        )
    return _count_along_dim_0(batch, name)


def _count_along_dim_0(batch: Any, name: str) -> int:
    rows = size_of_batch(batch, name)
    if not rows:
        raise invalid(name, batch, "has 0 rows", "at least one row")
    return rows


def _count_parts(batch: Any, split: Cut) -> int:
    given: Any = split(batch, 1)
    if not isinstance(given, Iterable):
        raise MisuseError(
            f"split(batch, 1) gave a {type(given).__name__}, not the parts. Let it yield them one"
            " by one, or return a list of them."
        )
    parts = sum(1 for _ in given)
    if not parts:
        raise MisuseError(
            "split(batch, 1) gave no part, so there is nothing to train on. Pass a batch with rows."
        )
    return parts
