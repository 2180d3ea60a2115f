"""How many rows can be run before anything is known but the budget, and what both passes of them
run in.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit import _torch_distributed as distributed
from gradfit._torch import storage_key
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity import MOST_ROWS, MOST_ROWS_IF_READ, batch_norms
from gradfit.batches.passes import BetweenPasses, FewRowsPasses
from gradfit.batches.runner import LossFunction
from gradfit.devices import counted_device
from gradfit.profiling.meter import meter, tensors_in
from gradfit.profiling.rebuilding import rebuilding
from gradfit.profiling.resident_bytes import storage_bytes
from gradfit.profiling.trace import Trace, watching
from gradfit.tree import leaves, split_batch, unmarked

_Cut = Callable[[Any, int], Iterable[Any]]


class RoomForRows(FewRowsPasses):
    """How many rows can be run below a budget, by what few take in a forward alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        split: _Cut | None,
        memory_bytes: int | None,
        *,
        optimizer: Any = None,
    ) -> None:
        self.rows = self.gradient_rows = MOST_ROWS
        self._quota_bytes = math.inf
        self._kept_rows = 0  # so many may be run with everything kept
        self.may_set_aside = False
        """Whether there may be a second set of gradients while the few rows are run that tell of a
        loss of which the graph says what it was divided by.
        """
        if memory_bytes is None:
            return
        few = 2 if batch_norms(model) else 1
        part = next(iter((split or split_batch)(batch, few)))
        saved = _SavedBytes(model)
        # FSDP2 lets go of its parameters in the backward pass: here, where there is none, it would
        # hold them.
        forward = torch.no_grad() if distributed.is_running() else saved.counted()
        try:
            # A compiled one as it was written: code for so few rows is needed nowhere else.
            with (
                meter(model, optimizer, batch, device=counted_device(model)) as live,
                forward,
                eager_functions(),
            ):
                before = live.current_bytes
                loss_fn(model, unmarked(part))
        # the user's code, which may need gradients or more rows: measured it will be said
        except Exception:
            self.rows = self.gradient_rows = 2
            return
        of_row = max(1, live.peak_bytes - before) / few
        room = 0.9 * (memory_bytes - before - storage_bytes(model.parameters()) / 16)
        self.rows = max(2, min(MOST_ROWS, int(room / of_row)))
        if distributed.is_running():
            return
        room -= _bytes_for_gradients(model)
        # Where all that autograd saves fits, and the gradients of it, nothing need be rebuilt.
        self._kept_rows = int(max(0.0, room) / (2 * of_row + saved.nbytes / few))
        # Beside what a row takes in a forward there are its gradients, and what is rebuilt.
        rebuilt_rows = int(room / (3 * of_row))
        self.may_set_aside = int((room - _trained_bytes(model)) / (3 * of_row)) >= min(
            rebuilt_rows, MOST_ROWS_IF_READ
        )
        if self._kept_rows < MOST_ROWS:
            self._quota_bytes = max(0.0, room) / 6
            self.gradient_rows = min(self.rows, rebuilt_rows)

    def of(
        self, content: Any, rows: int, *, is_as_trained: bool
    ) -> contextlib.AbstractContextManager[BetweenPasses]:
        """What both passes of so many rows run in: if these do not fit with everything kept,
        nothing is kept for the backward pass but what leads over from one segment to the next.
        """
        if self.keeps(rows):
            return super().of(content, rows, is_as_trained=is_as_trained)
        return rebuilding(self._quota_bytes)

    def keeps(self, rows: int) -> bool:
        """Whether so many fit with everything kept."""
        return math.isinf(self._quota_bytes) or rows <= self._kept_rows


class _SavedBytes:
    """How much autograd would save beside parameters; what is saved twice counts twice."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.nbytes = 0
        self._parameters = {storage_key(tensor) for tensor in tensors_in(model)}

    def counted(self) -> saved_tensors_hooks:
        """Inside, nothing is saved, but counted."""
        return saved_tensors_hooks(self._count, _nothing_saved)

    def _count(self, tensor: torch.Tensor) -> None:
        if storage_key(tensor) not in self._parameters:
            self.nbytes += tensor.nbytes


def _nothing_saved(_: None) -> torch.Tensor:
    raise RuntimeError("Nothing was saved in this forward.")


def _trained_bytes(model: torch.nn.Module) -> int:
    return storage_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)


def _bytes_for_gradients(model: torch.nn.Module) -> int:
    """With one that is about to be added and one that is made from it."""
    largest = max(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return _trained_bytes(model) + 2 * largest


class WatchedPasses(FewRowsPasses):
    """Passes in which gradients are compared, watched for a profile on the way: those of the first
    part, and those of the whole, if they run what training does. The whole's begin without
    gradients, too, if there may be a second set of these; else they are not watched.

    Args:
        model: that is run.
        room: what passes run in that are not watched.
        quota_bytes: what is rebuilt at once, about, where passes are watched.
    """

    def __init__(self, model: torch.nn.Module, room: RoomForRows, quota_bytes: float) -> None:
        self._model, self._room, self._quota_bytes = model, room, quota_bytes
        self.begins_anew = room.may_set_aside
        self._traces: dict[int, Trace] = {}
        self.ran_plain = False
        """Whether some were run with everything kept."""

    @property
    def traces(self) -> dict[int, Trace]:
        """By rows; each has both passes."""
        return {rows: trace for rows, trace in self._traces.items() if trace.nodes}

    def of(
        self, content: Any, rows: int, *, is_as_trained: bool
    ) -> contextlib.AbstractContextManager[BetweenPasses]:
        """Of rows that are more than any before, watched."""
        begins_anew = self.begins_anew or not self._traces
        if is_as_trained and begins_anew and rows > max(self._traces, default=0):
            return self._watched(content, rows)
        self.ran_plain |= self._room.keeps(rows)
        return self._room.of(content, rows, is_as_trained=is_as_trained)

    @contextlib.contextmanager
    def _watched(self, content: Any, rows: int) -> Iterator[BetweenPasses]:
        with watching(self._model, self._quota_bytes) as trace:
            trace.batch_keys.update(map(storage_key, tensors_in(list(leaves(content)))))
            yield BetweenPasses(trace.end_watched_forward, trace.begin_backward)
        trace.finish_backward()
        self._traces[rows] = trace
