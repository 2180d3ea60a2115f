"""Runs a few sizes of a batch, watched and timed, of which a profile is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory, raised_by_functorch
from gradfit._torch_compile import is_compiled
from gradfit._torch_fsdp import drop_gradients
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.first_rows import FirstRows
from gradfit.batches.runner import LossFunction, run_part
from gradfit.devices import counted_device, devices_of, wait_for
from gradfit.errors import MisuseError, UnsupportedOp
from gradfit.profiling.assemble import Sample, same_structure
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.predict import extrapolated
from gradfit.profiling.trace import Trace, watching
from gradfit.profiling.traced_bytes import plain_bytes, working_bytes
from gradfit.profiling.traced_seconds import (
    MOST_ROUNDS,
    forward_seconds,
    least_seconds,
    pool_alike,
    rounds,
    rounds_of_alike,
)

Cut = Callable[[Any, int], Iterable[Any]]
_LONG_SECONDS = 0.015  # two sizes that did the same are enough if a forward took so long
_PLENTY_SECONDS = 1.0  # and any two if it took so long
_FEW_ROWS = 4  # tell what a row more takes


class MeasuringLimits(NamedTuple):
    """What measuring may take."""

    memory_bytes: int | None
    rows: int | None
    host_bandwidth: float
    # what the first rows are run in: it counts their bytes, and may refuse to let them pass a limit
    meter: Callable[..., Meter] = meter
    # so many rows are run at once in any case; None: all if the loss does not add up, else one
    least_rows: int | None = None
    # the passes in which gradients are compared are watched for the profile, too: it is measured
    # sooner, on sizes near each other, whose seconds tell less of other sizes
    shares_passes: bool = False


class MeasuredStep(NamedTuple):
    """What is measured."""

    model: torch.nn.Module
    loss_fn: LossFunction
    batch: Any
    optimizer: Any
    split: Cut | None
    first_rows: FirstRows | None = None  # where others run them, too


class SizeSampler:
    """Runs parts of the batch, watched and timed. A sixth of the room is for what a watched run
    rebuilds.
    """

    def __init__(
        self,
        step: MeasuredStep,
        total: int,
        room_bytes: float,
        meter: Callable[..., Meter],
        *,
        has_room: bool = False,
    ) -> None:
        self.step, self.total, self.room_bytes, self.meter = step, total, room_bytes, meter
        self.has_room = has_room  # one row can be run, and there is room for several
        self.least_rows = 1  # as in `MeasuringLimits`
        self._first = step.first_rows or FirstRows(step.batch, step.split, total)
        self._checked: set[int] = set()  # so many rows, a pass was seen to leave as they are
        self.takes_few = False  # rows are enough: trials and steps tell the rest
        self.known: dict[int, Trace] = {}  # by rows, what was watched before
        self.has_run_plain = False  # some rows, before

    def samples(self, limits: MeasuringLimits, additivity: Additivity) -> list[Sample]:
        """The parts that a profile is made of, the largest last."""
        if limits.rows is not None:
            return self.only(limits.rows)
        if len(self.known) > 1:
            return self.timed_in_turn(self.watched_again([*map(self.sample, sorted(self.known))]))
        try:
            return self.several_sizes(limits.memory_bytes)
        except Exception as error:
            if additivity.runs_parts or _is_certain(error):
                raise
            return self.only(self.total)  # the whole batch or nothing

    def only(self, rows: int) -> list[Sample]:
        return self.timed_in_turn(self.watched_again([self.sample(rows)]))

    def several_sizes(self, memory_bytes: int | None) -> list[Sample]:
        if self.total == 1:
            sample = self.sample(1, self.step.batch, metered=True)
            return self.timed_in_turn(self.watched_again([sample]))
        if memory_bytes is None:
            return self.timed_in_turn(self.large_and_small())
        return self.timed_in_turn(self.growing())

    def part(self, rows: int) -> Any:
        """So many rows of the batch, in containers that `loss_fn` may change."""
        return self._first.of(rows)

    def large_and_small(self) -> list[Sample]:
        """The batch and half of it; and little of it, for what a pass takes whatever its size,
        which those do not show.
        """
        samples: list[Sample] = []
        refused = False
        little = max(self._first_size, self.total // 8)
        for size in sorted({self._first_size, little, self.total // 2, self.total}):
            try:
                sample = self.sample(size)
            except Exception as error:
                if size > little or _is_certain(error):
                    raise
                refused |= size == 1
                continue
            samples.append(dataclasses.replace(sample, refused_one=refused))
        return self.watched_again(samples)

    def growing(self) -> list[Sample]:
        """Double the micro-batch while the next one surely fits, so that measuring stays below the
        budget too.
        """
        samples = self.doubling()
        if len(samples) == 1 and samples[0].size == 2 < self.total and self.has_room:
            samples = self.watched_again([self.sample(1), *samples])  # what a single row takes
        if len(samples) == 1 and samples[0].size < self.total and self._shapes_tell:
            return self.with_another(samples[0])
        return samples

    @property
    def _shapes_tell(self) -> bool:
        """Not of compiled functions, which run on shapes as they were written; nor where forwards
        wait for each other, and all ranks must run the same.
        """
        return not distributed.is_running() and not self._is_compiled

    @property
    def _is_compiled(self) -> bool:
        return is_compiled(self.step.model, self.step.loss_fn)

    def with_another(self, only: Sample) -> list[Sample]:
        """With what more rows do, by their shapes; where these do not tell, by running some, if a
        step has to have room for them anyway.
        """
        by_shapes = self.extrapolated(only)
        if by_shapes or only.size >= self.least_rows:
            return [*by_shapes, only]
        larger = self.sample(min(2 * only.size, self.least_rows), metered=True)
        larger = dataclasses.replace(larger, refused_one=only.refused_one)
        return self.watched_again([only, larger])

    def extrapolated(self, only: Sample) -> list[Sample]:
        """What the whole batch would do, by its shapes."""
        parts = [(rows, self.part(rows)) for rows in (only.size, self.total)]
        return extrapolated(self.step.model, self.step.loss_fn, parts, only)

    def doubling(self) -> list[Sample]:
        samples: list[Sample] = []
        size, refused = self._first_size, False
        is_one_left_out = size > 1
        while size <= self.total:
            try:
                sample = self.sample(size, metered=not samples)
            except Exception as error:
                if is_one_left_out and not samples and is_out_of_memory(error):
                    is_one_left_out, size = False, 1
                    continue
                if samples and is_out_of_memory(error):
                    break
                if size > 1 or _is_certain(error):
                    raise
                refused, size = True, 2
                continue
            samples.append(dataclasses.replace(sample, refused_one=refused))
            is_last = size == self.total or (self.takes_few and size >= _FEW_ROWS)
            if is_last or self.is_enough(samples):
                break
            size = min(self.total, self._next_size(sample))
        return self.watched_again(samples)

    def _next_size(self, sample: Sample) -> int:
        """Twice as many rows, so that seconds can be told apart; one more where that takes long and
        only bytes matter.
        """
        is_long = forward_seconds(sample.trace) > _LONG_SECONDS
        if is_long and not self.seconds_matter(self.total, sample.trace, sample.size):
            return sample.size + 1
        return sample.size * 2

    @property
    def _first_size(self) -> int:
        """One row, which may do less than several do (a copy of it may be a view); where it was
        run already, and several surely fit, two. For one row torch.compile makes code that is of no
        use for any other number.
        """
        if self.total <= 2:
            return 1
        return 2 if self.has_room or self._is_compiled else 1

    def is_enough(self, samples: list[Sample]) -> bool:
        """Whether to stop doubling: the next size may not fit, or takes long. Two sizes must be
        seen to tell what grows.
        """
        trace, enough = samples[-1].trace, len(samples) > 1
        free = self.room_bytes - trace.gathered_peak_bytes
        # Beside the working set there is a sixth for what is rebuilt.
        if working_bytes(trace) * 2 > (free / 2 if enough else free * 5 / 6):
            return True
        # all ranks must run the same, and each has its own clock
        return enough and not distributed.is_running() and _takes_long(samples)

    def timed_in_turn(self, samples: list[Sample]) -> list[Sample]:
        """Plain passes, of all sizes in turn: what disturbed one must not make it look the slower
        size.
        """
        for turn in range(1, MOST_ROUNDS):
            samples = [self.timed_again(one, turn) for one in samples]
        return samples

    def timed_again(self, sample: Sample, turn: int) -> Sample:
        seconds = sample.plain_seconds
        if seconds is None or turn >= rounds(seconds, sample.trace):
            return sample
        part = self.step.batch if self.total == 1 else self.part(sample.size)
        least = min(seconds, self.time_plain(part, sample.size))
        return dataclasses.replace(sample, plain_seconds=least)

    def sample(self, size: int, part: Any = None, *, metered: bool = False) -> Sample:
        """One micro-batch, watched and timed; `metered`: with the peak of it and all there is."""
        peak_bytes = 0
        if part is None:
            part = self.part(size)
        if size in self.known:
            trace = self.known.pop(size)
        elif metered:
            step, device = self.step, counted_device(self.step.model)
            with self.meter(step.model, step.optimizer, step.batch, device=device) as live:
                trace = self.watch(part, size)
            peak_bytes = live.peak_bytes
        else:
            trace = self.watch(part, size)
        plain = None
        if self.seconds_matter(size, trace, size) and plain_bytes(trace) < 0.95 * self.room_bytes:
            plain = self.time_plain(part, size)
        return Sample(size, trace, plain, peak_bytes=peak_bytes)

    def seconds_matter(self, size: int, trace: Trace, traced: int) -> bool:
        """Whether plain passes of this size are timed, by the trace of another size: the first, in
        any case; others, if the whole batch may not fit with everything kept, which nothing could
        be faster than.
        """
        if not self.has_room or (size == self._first_size and not self.has_run_plain):
            return True
        return plain_bytes(trace) * self.total / traced > self.room_bytes

    def watched_again(self, samples: list[Sample]) -> list[Sample]:
        """With the least seconds of several runs, for the two sizes whose operations a profile is
        made of.
        """
        for place in range(max(0, len(samples) - 2), len(samples)):
            trace = self.least_ofrounds(samples[place])
            pool_alike(trace)
            samples[place] = dataclasses.replace(samples[place], trace=trace)
        return samples

    def least_ofrounds(self, sample: Sample) -> Trace:
        trace = sample.trace
        try:
            for _ in range(min(rounds(forward_seconds(trace), trace), rounds_of_alike(trace)) - 1):
                trace = least_seconds(trace, self.watch(self.part(sample.size), sample.size))
        except Exception as error:
            if not is_out_of_memory(error):
                raise  # else one run must do
        return trace

    def watch(self, part: Any, rows: int = 0) -> Trace:
        """Both passes of a part that has so many of the first rows; 0: of any."""
        model = self.step.model
        with watching(model, self.room_bytes / 6) as trace:
            loss = _loss_without_functorch(self.step, part, is_checked=rows in self._checked)
            trace.finish_forward()
            torch.autograd.backward(loss)
            del loss
        trace.finish_backward()
        drop_gradients(model)
        self._note_checked(rows)
        return trace

    def _note_checked(self, rows: int) -> None:
        """One pass tells of all that do the same: a batch may hold thousands of tensors."""
        if rows:
            self._checked.add(rows)

    def time_plain(self, part: Any, rows: int = 0) -> float:
        model = self.step.model
        started = seconds_now()
        loss = run_part(self.step.loss_fn, model, part, is_checked=rows in self._checked).loss
        torch.autograd.backward(loss)
        wait_for(devices_of(model.parameters()))
        seconds = seconds_now() - started
        drop_gradients(model)
        self._note_checked(rows)
        return seconds


def _takes_long(samples: list[Sample]) -> bool:
    before, last = (sample.trace for sample in samples[-2:])
    seconds = forward_seconds(last)
    is_long = seconds > _LONG_SECONDS and same_structure(before, last)
    return is_long or seconds > _PLENTY_SECONDS


def _loss_without_functorch(step: MeasuredStep, part: Any, *, is_checked: bool) -> torch.Tensor:
    try:
        return run_part(step.loss_fn, step.model, part, is_checked=is_checked).loss
    except RuntimeError as error:
        if not raised_by_functorch(error.__traceback__):
            raise
        raise UnsupportedOp(
            "loss_fn uses torch.func, which does not let anybody see what autograd saves:"
            f" {error} Use torch.autograd.grad(..., create_graph=True) there."
        ) from error


def _is_certain(error: Exception) -> bool:
    """Whether more rows would meet the fault again. Others may be of too few rows, as BatchNorm
    says of one.
    """
    return isinstance(error, MisuseError) or is_out_of_memory(error)
