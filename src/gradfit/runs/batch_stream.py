"""A job's data as an endless row of batches that knows where it is, so that a run can go on from
there.

Two kinds. *Rows* (tensors, a map-style dataset) are shuffled by seed and epoch alone: any place is
found at once. *Batches* (a `DataLoader`, any iterable) have an order of their own, usually drawn
from a random generator when the iteration begins: a place is found again by putting the generators
back to what they were at the epoch's start and counting. An iterable that draws its order from the
global generators while it runs cannot be found again that way; let it draw from a generator of its
own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from gradfit.errors import MisuseError, StateError
from gradfit.runs.random_state import random_state, restore_random
from gradfit.tree import join_chunks, leaves, map_tensors, size_of_batch, split_batch


class Batches:
    """Batches of `batch_size` rows, epoch after epoch; the last of an epoch holds what is left.

    >>> batches = Batches(torch.arange(5), batch_size=2, seed=0)
    >>> [len(batches.next()) for _ in range(3)], batches.epoch
    ([2, 2, 1], 0)
    """

    def __init__(
        self, data: Any, *, batch_size: int, seed: int = 0, as_they_come: bool = False
    ) -> None:
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.as_they_come = as_they_come  # batches only a function of the user's can cut
        self.epoch = 0
        self.rows = number_of_rows(data)
        self._order: torch.Tensor | None = None
        self._position = 0  # rows, or batches of the source, taken in this epoch
        self._iterator: Iterator[Any] | None = None
        self._pending: Any = None  # the source's batch that was taken in part
        self._offset = 0
        self._at_start: dict[str, Any] | None = None
        self._before_pending: dict[str, Any] | None = None
        if self.rows is None and not _can_be_read_again(data):
            raise MisuseError(
                f"data is a {type(data).__name__}, which cannot be read a second time. Pass"
                " tensors, a Dataset, a DataLoader, a list of batches, or a function that returns"
                " an iterator."
            )
        if self.rows == 0:
            raise MisuseError("data has no rows. Pass at least one.")

    @property
    def per_epoch(self) -> int | None:
        """Batches in an epoch, where that can be known without reading them."""
        return None if self.rows is None else -(-self.rows // self.batch_size)

    def next(self) -> Any:
        """The next batch; begins a new epoch when the last is used up."""
        for _ in range(2):
            batch = self._take() if self.rows is None else self._take_rows()
            if batch is not None:
                return batch
            self.epoch += 1
            self._position, self._order, self._iterator, self._pending = 0, None, None, None
        raise MisuseError(
            "data gave no batch. Pass an iterable that begins anew each time it is iterated."
        )

    # ----------------------------------------------------------------------------------------- rows

    def _take_rows(self) -> Any:
        if self._order is None:
            self._order = self._draw_order()
        index = self._order[self._position : self._position + self.batch_size]
        self._position += len(index)
        if not len(index):
            return None
        if _is_nest(self.data):
            return map_tensors(self.data, lambda tensor: tensor[index.to(tensor.device)])
        return default_collate([self.data[i] for i in index.tolist()])

    def _draw_order(self) -> torch.Tensor:
        draw = random.Random(f"{self.seed}:{self.epoch}").getrandbits(63)
        generator = torch.Generator("cpu").manual_seed(draw)
        return torch.randperm(self.rows or 0, generator=generator, device="cpu")

    # -------------------------------------------------------------------------------------- batches

    def _take(self) -> Any:
        if self._iterator is None:
            self._at_start = random_state(self._generators())
            self._iterator = self._begin_data()
        if self.as_they_come:
            return self._fetch()
        parts = list(self._parts_of_batch())
        if len(parts) < 2:
            return parts[0] if parts else None
        self._check_alike(parts)
        return join_chunks(parts, sum(map(size_of_batch, parts)))

    def _begin_data(self) -> Iterator[Any]:
        return iter(self.data() if callable(self.data) else self.data)

    def _parts_of_batch(self) -> Iterator[Any]:
        """Of one or more batches of the data, as many rows as a batch has, or are left."""
        missing = self.batch_size
        while missing and self._has_pending():
            part, rows = self._take_pending(missing)
            yield part
            missing -= rows

    def _has_pending(self) -> bool:
        """Whether there are rows left of a batch of the data, or of another one."""
        if self._pending is None:
            self._before_pending = random_state(self._generators())
            self._pending, self._offset = self._fetch(), 0
        return self._pending is not None

    def _take_pending(self, most: int) -> tuple[Any, int]:
        """At most so many rows of the batch of the data that is being used up, and their number."""
        size = size_of_batch(self._pending)
        rows = min(most, size - self._offset)
        part = self._pending if rows == size else _cut(self._pending, self._offset, rows)
        self._offset += rows
        if self._offset == size:
            self._pending, self._before_pending = None, None
        return part, rows

    def _check_alike(self, parts: list[Any]) -> None:
        """Batches can be joined along their rows only if those are of one shape."""
        first = _row_shapes(parts[0])
        for part in parts[1:]:
            shapes = _row_shapes(part)
            if shapes != first:
                one, other = next((a, b) for a, b in zip_longest(first, shapes) if a != b)
                raise MisuseError(
                    f"Batches of the data cannot be joined into one of {self.batch_size} rows: rows"
                    f" of one have shape {one}, of the next {other}. Pad all to one length; or pass"
                    f" --batch-size {size_of_batch(part)}, the size they come in, or a job with"
                    " split=, so that each is an update of its own."
                )

    def _fetch(self) -> Any:
        # Not `self._iterator or ()`: that asks a loader over an IterableDataset for its length,
        # which it has not.
        if self._iterator is None:
            return None
        for batch in self._iterator:
            self._position += 1
            return batch
        return None

    def _generators(self) -> list[torch.Generator]:
        """Generators that a loader or its samplers hold, each once."""
        samplers = (getattr(self.data, name, None) for name in ("sampler", "batch_sampler"))
        held = [getattr(holder, "generator", None) for holder in (self.data, *samplers)]
        return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())

    # ---------------------------------------------------------------------------------------- state

    @property
    def _kind(self) -> str:
        return "batches" if self.rows is None else "rows"

    def state(self) -> dict[str, Any]:
        """Where this is, as a nest of tensors and plain numbers."""
        return {
            "kind": self._kind,
            "rows": self.rows,
            "epoch": self.epoch,
            "position": self._position,
            "offset": self._offset if self._pending is not None else 0,
            "at_start": self._at_start,
            "before_pending": self._before_pending,
            "own": [generator.get_state() for generator in self._generators()],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raise a `StateError` unless these data have such a place."""
        if (state["kind"], state["rows"]) != (self._kind, self.rows):
            raise StateError(
                f"The state's data are {state['rows'] or ''} {state['kind']}, the job's"
                f" {self.rows or ''} {self._kind}. Resume with the data the run began with."
            )
        generators = self._generators()
        if len(state["own"]) != len(generators):
            raise StateError(
                f"The state has {len(state['own'])} generators of the data, the job"
                f" {len(generators)}. Resume with the data the run began with."
            )

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken. Draws from the global generators: put those back
        afterwards.
        """
        self.check(state)
        self.epoch, self._order, self._iterator, self._pending = state["epoch"], None, None, None
        self._position = state["position"]
        self._at_start, self._before_pending = state["at_start"], state["before_pending"]
        generators = self._generators()
        if self.rows is None and state["at_start"] is not None:
            self._find_again(state, generators)
        for generator, content in zip(generators, state["own"], strict=True):
            generator.set_state(content)

    def _find_again(self, state: dict[str, Any], generators: list[torch.Generator]) -> None:
        """Begin the epoch as it was begun, and count up to where it was left."""
        restore_random(state["at_start"], generators)
        self._iterator = self._begin_data()
        partly = state["offset"] > 0
        self._position = 0
        for _ in range(state["position"] - partly):
            if self._fetch() is None:
                raise StateError(
                    f"The data end after {self._position} batches, the state is at"
                    f" {state['position']}. Resume with the data the run began with."
                )
        if partly:
            restore_random(state["before_pending"], generators)
            self._find_pending(state["offset"])

    def _find_pending(self, offset: int) -> None:
        """The batch of the data that so many rows were taken of."""
        self._pending, self._offset = self._fetch(), offset
        if self._pending is None or self._offset >= size_of_batch(self._pending):
            raise StateError(
                f"The state is at row {self._offset} of a batch that the data do not have."
                " Resume with the data the run began with."
            )


def _row_shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in leaves(batch)]


def number_of_rows(data: Any) -> int | None:
    """How many rows the data have; None if they come as batches."""
    if _is_nest(data):
        return size_of_batch(data)
    return len(data) if _is_map_style(data) else None


def _is_map_style(data: Any) -> bool:
    """Whether it has rows by number, as torch's map-style datasets do."""
    if isinstance(data, list | tuple | Mapping | IterableDataset | torch.utils.data.DataLoader):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _can_be_read_again(data: Any) -> bool:
    is_used_up_once = isinstance(data, Iterator) or not isinstance(data, Iterable)
    return callable(data) or not is_used_up_once


def _is_nest(data: Any) -> bool:
    """Tensors, or a tuple or dict of them: rows along dim 0. A list is a list of batches."""
    return (
        isinstance(data, torch.Tensor | tuple | Mapping)
        and next(iter(leaves(data)), None) is not None
    )


def _cut(batch: Any, start: int, size: int) -> Any:
    rest = map_tensors(batch, lambda tensor: tensor[start:] if tensor.dim() else tensor)
    return next(iter(split_batch(rest, size)))
