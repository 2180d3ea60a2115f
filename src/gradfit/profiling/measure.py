"""`profile`: one real step, measured at two micro-batch sizes, as a `Profile`."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory, raised_by_functorch, storage_key
from gradfit._torch_compile import is_compiled
from gradfit._torch_fsdp import drop_gradients
from gradfit._torch_listen import eager_functions
from gradfit.arguments import (
    check_arguments,
    check_optimizer,
    invalid,
    read_count,
    read_flag,
    read_instance,
    read_number,
)
from gradfit.batches.additivity import MOST_ROWS_IF_READ, measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.passes import FewRowsPasses
from gradfit.batches.runner import LossFunction, count_rows, run_part
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.devices import counted_device, devices_of, wait_for
from gradfit.errors import MisuseError, UnsupportedOp
from gradfit.profiling.assemble import Sample, assemble, same_structure, tensors_there
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import Meter, meter, tensors_in
from gradfit.profiling.optimizer_bytes import OptimizerCost, optimizer_cost
from gradfit.profiling.profile import Hardware, Profile
from gradfit.profiling.resident_bytes import gradient_bytes, storage_bytes
from gradfit.profiling.room_for_rows import RoomForRows, WatchedPasses
from gradfit.profiling.tile_choices import TileChoices, tile_choices
from gradfit.profiling.trace import Trace, TracedNode, TracedOp, watching
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles
from gradfit.tree import Copies, leaves, split_batch

_Cut = Callable[[Any, int], Iterable[Any]]
_asks_for_gradient = operator.attrgetter("requires_grad")
_Timed = TracedOp | TracedNode
# Least of several measurements, for a machine is never alone; but what takes long, or has many
# operations, of which those alike measure each other, is measured fewer times.
_MOST_ROUNDS, _ENOUGH_SECONDS, _ENOUGH_OPERATIONS = 5, 0.03, 1000
_ENOUGH_ALIKE = 8  # operations that do the same on the same sizes, on average
_LONG_SECONDS = 0.015  # two sizes that did the same are enough if a forward took so long
_PLENTY_SECONDS = 1.0  # and any two if it took so long


def profile(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    sample_batch: Any,
    optimizer: Any = None,
    *,
    memory_bytes: int | None = None,
    rows: int | None = None,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
    fake: bool = False,
    hardware: Hardware | None = None,
    host_bandwidth: float = 0.0,
    additivity: Additivity | None = None,
    tile: bool = True,
) -> Profile:
    """Measure what one step does: each operation's seconds and bytes, what autograd saves, where it
    comes from.

    The batch and parts of it are run, so that what grows with its size is measured and not assumed.
    Nothing stays changed: gradients, buffers and random generators are put back. With
    `memory_bytes` only as much of the batch is run as fits, by estimate, into that many bytes; with
    `rows`, just that many rows. With a `host_bandwidth`, in bytes per second out of the device's
    memory, plans may offload. `fake=True` measures nothing: it predicts for `hardware`. Whether the
    loss adds up over parts of the batch is measured, too (`additivity`, unless it is given): a plan
    from this profile does not cut a batch whose parts' losses do not make that of the whole.

    Args:
        model: in training mode.
        loss_fn: `loss_fn(model, batch)`, as `fit` takes it.
        sample_batch: a batch like those to come; nothing is trained on it.
        optimizer: counted with the state that its steps make; None: no optimizer.
        memory_bytes: bytes that measuring may take; None does not limit it.
        rows: how many rows of the sample to run; None: as many as there are, or as fit.
        split: `split(batch, size)` gives the parts; without it lists and tensors are cut along dim
            0.
        fake: predict on tensors that have a shape and no memory.
        hardware: the machine to predict for; None: this one.
        host_bandwidth: bytes per second out of the device's memory; 0 offers no offloading.
        additivity: whether parts add up, if it was measured before; None measures.
        tile: also measure the step in tiles (`Profile.tiled`), if the model has a projection to a
            vocabulary.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    >>> measured = profile(model, lambda m, x: m(x).square().mean(), torch.ones(4, 8))
    >>> [operation.name for operation in measured.operations][:2]
    ['aten.addmm.default', 'aten.gelu.default']
    """
    check_arguments(model, loss_fn, split=split, fake=fake)
    _check_records(optimizer, hardware, additivity)
    if fake or hardware is not None:
        from gradfit.profiling.predict import predict

        return predict(
            model,
            loss_fn,
            sample_batch,
            optimizer,
            hardware=hardware,
            split=split,
            tile=read_flag(tile, "tile"),
        )
    total = count_rows(sample_batch, split, "sample_batch")
    _check_numbers(total, memory_bytes, rows, host_bandwidth)
    check_model(model)
    limits = MeasuringLimits(memory_bytes, rows, host_bandwidth)
    step = MeasuredStep(model, loss_fn, sample_batch, optimizer, split)
    whole = measure_step(step, limits, additivity)
    if not read_flag(tile, "tile"):
        return whole
    choices = choose_tiles(model, loss_fn, sample_batch, split, whole.min_batch)
    tiled = [_measure_in_tiles(step, limits, whole.additivity, one) for one in choices.tiles]
    return dataclasses.replace(whole, tiled=tuple(tiled))


def _check_records(
    optimizer: Any, hardware: Hardware | None, additivity: Additivity | None
) -> None:
    if optimizer is not None:
        check_optimizer(optimizer)
    if hardware is not None:
        read_instance(hardware, "hardware", Hardware, "Hardware(memory='80 GiB')")
    if additivity is not None:
        read_instance(
            additivity,
            "additivity",
            Additivity,
            "what another profile measured, profile.additivity",
        )


def _check_numbers(
    total: int, memory_bytes: int | None, rows: int | None, host_bandwidth: float
) -> None:
    if memory_bytes is not None:
        read_count(memory_bytes, "memory_bytes")
    if rows is not None and read_count(rows, "rows") > total:
        raise invalid(
            "rows",
            rows,
            f"cannot be cut from a batch of {total} rows",
            f"1 to {total}, or leave it out",
        )
    read_number(host_bandwidth, "host_bandwidth", minimum=0, like=25e9)


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
    split: _Cut | None


def choose_tiles(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, split: _Cut | None, rows: int = 1
) -> TileChoices:
    """Which tiles are worth measuring, by running so many rows without gradients; nothing stays
    changed.
    """
    if is_compiled(model, loss_fn):  # tiles are other forwards, which would be compiled anew
        return TileChoices()
    part = next(iter((split or split_batch)(batch, rows)))
    with trials_end(), untouched(model), eager_functions():
        return tile_choices(model, loss_fn, part)


def _measure_in_tiles(
    step: MeasuredStep, limits: MeasuringLimits, additivity: Additivity | None, tiles: Tiles
) -> Profile:
    step = step._replace(loss_fn=with_tiles(step.loss_fn, tiles))
    return dataclasses.replace(measure_step(step, limits, additivity), tiles=tiles)


def measure_step(
    step: MeasuredStep, limits: MeasuringLimits, additivity: Additivity | None
) -> Profile:
    """As `profile`, where the arguments were checked before."""
    return measure_sizes(step, limits, additivity)[0]


def measure_sizes(
    step: MeasuredStep, limits: MeasuringLimits, additivity: Additivity | None
) -> list[Profile]:
    """The profile; and that of fewer rows alone, where these were seen to do something else."""
    model, batch = step.model, step.batch
    total = count_rows(batch, step.split, "sample_batch")
    measuring_bytes = 0
    has_room = False
    watched: WatchedPasses | None = None
    # the optimizer's probe too: Ctrl-C could leave its `no_grad` on
    with trials_end(), untouched(model) as before:
        cost = _cost_of(step, limits.memory_bytes)
        room_bytes = _room(model, batch, limits.memory_bytes, cost)
        if additivity is None:
            there = (model, step.optimizer, batch)
            with limits.meter(*there, device=counted_device(model)) as live:
                room = RoomForRows(
                    model,
                    step.loss_fn,
                    batch,
                    step.split,
                    limits.memory_bytes,
                    optimizer=step.optimizer,
                )
                if _may_share_passes(step, limits, total):
                    watched = WatchedPasses(model, room, room_bytes / 6)
                additivity = additivity_within(
                    model, step.loss_fn, batch, step.split, room, before.rewind, watched
                )
            measuring_bytes = live.peak_bytes
            has_room = (
                additivity.adds_up
                and room.gradient_rows > 1  # then both passes of several were run
                and _had_room(measuring_bytes, limits.memory_bytes)
            )
        sampler = _Sampler(step, total, room_bytes, limits.meter, has_room=has_room)
        sampler.least_rows = limits.least_rows or (1 if additivity.adds_up else total)
        if watched is not None and additivity.adds_up:
            sampler.known, sampler.has_run_plain = watched.traces, watched.ran_plain
        samples = sampler.samples(limits, additivity)
    if distributed.is_running():
        # ranks measure together, whatever each one's budget is: it is held by the steps alone
        measuring_bytes = 0
    else:
        measuring_bytes = max(measuring_bytes, *(one.peak_bytes for one in samples))
    assembled = [
        assemble(
            model,
            batch,
            total,
            of_size,
            cost,
            host_bandwidth=limits.host_bandwidth,
            static=_static_storages(model, batch),
            min_batch=2 if samples[-1].refused_one else 1,
        )
        for of_size in (samples, *_unlike_the_last(samples))
    ]
    return [
        dataclasses.replace(
            one,
            additivity=additivity,
            splittable=additivity.adds_up,
            measuring_bytes=measuring_bytes,
            runs_plain=one.runs_plain or sampler.has_run_plain,
        )
        for one in assembled
    ]


def _unlike_the_last(samples: list[Sample]) -> list[list[Sample]]:
    """The one before the last, where it ran other operations."""
    if len(samples) < 2 or same_structure(samples[-2].trace, samples[-1].trace):
        return []
    return [[samples[-2]]]


def _may_share_passes(step: MeasuredStep, limits: MeasuringLimits, total: int) -> bool:
    """Whether what is run to compare gradients can be what a profile is made of: it is run here, as
    it was written, and has no more rows than there are.
    """
    return (
        limits.shares_passes
        and limits.rows is None
        and total >= MOST_ROWS_IF_READ
        and not distributed.is_running()
        and not is_compiled(step.model, step.loss_fn)
    )


def _had_room(peak_bytes: int, memory_bytes: int | None) -> bool:
    """Whether what was run stayed well below the budget."""
    if memory_bytes is None or distributed.is_running():
        return False
    return peak_bytes <= 0.75 * memory_bytes


def _cost_of(step: MeasuredStep, memory_bytes: int | None) -> OptimizerCost:
    if step.optimizer is None:
        return OptimizerCost(0, 0, 0.0)
    if memory_bytes is None:
        return optimizer_cost(step.optimizer)
    there = meter(step.model, step.optimizer, step.batch, device=counted_device(step.model))
    return optimizer_cost(step.optimizer, room_bytes=memory_bytes - there.current_bytes)


def _static_storages(model: torch.nn.Module, batch: Any) -> set[int]:
    """The addresses of parameters, buffers and the batch."""
    static = [*model.parameters(), *model.buffers(), *leaves(batch)]
    return {storage_key(tensor) for tensor in tensors_in(static)}


def additivity_within(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    split: _Cut | None,
    room: RoomForRows,
    rewind: Callable[[], None],
    passes: FewRowsPasses | None = None,
) -> Additivity:
    """Whether the loss adds up, measured on as many rows as there is room for; the caller puts
    buffers and generators back, and `rewind` does so in between. Both passes run in `passes`, else
    as there is room for.
    """

    def backward(loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        drop_gradients(model)

    # FSDP2 lets go of its parameters in the backward pass: a forward alone would hold them.
    finish = backward if distributed.is_running() else None
    return measure_additivity(
        model,
        loss_fn,
        batch,
        split=split,
        rows=room.rows,
        rewind=rewind,
        finish=finish,
        gradient_rows=room.gradient_rows,
        passes=room if passes is None else passes,
    )


def check_model(model: torch.nn.Module) -> None:
    """Refuse a model that cannot be trained as it stands."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MisuseError(
            "No parameter of the model requires a gradient. Call model.requires_grad_() on what to"
            " train."
        )
    if not model.training:
        raise MisuseError(
            "The model is in evaluation mode, so dropout and BatchNorm would not train. Call"
            " model.train() first."
        )


class _Sampler:
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
        self._parts: dict[int, Copies] = {}  # by rows, where cutting makes views
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
        """So many rows of the batch, in containers that `loss_fn` may change.

        Views are cut once, since a batch may hold thousands of tensors, and again if gradients were
        asked of them.
        """
        if self.step.split is not None:  # which may make copies
            return next(iter(self.step.split(self.step.batch, rows)))
        copies = self._parts.get(rows)
        if copies is None or any(map(_asks_for_gradient, copies.tensors)):
            part = next(split_batch(self.step.batch, rows, self.total))
            copies = self._parts[rows] = Copies(part)
        return copies.another()

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
        from gradfit.profiling.predict import extrapolated

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
            if size == self.total or self.is_enough(samples):
                break
            size = min(self.total, self._next_size(sample))
        return self.watched_again(samples)

    def _next_size(self, sample: Sample) -> int:
        """Twice as many rows, so that seconds can be told apart; one more where that takes long and
        only bytes matter.
        """
        is_long = _forward_seconds(sample.trace) > _LONG_SECONDS
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
        if _working_bytes(trace) * 2 > (free / 2 if enough else free * 5 / 6):
            return True
        # all ranks must run the same, and each has its own clock
        return enough and not distributed.is_running() and _takes_long(samples)

    def timed_in_turn(self, samples: list[Sample]) -> list[Sample]:
        """Plain passes, of all sizes in turn: what disturbed one must not make it look the slower
        size.
        """
        for turn in range(1, _MOST_ROUNDS):
            samples = [self.timed_again(one, turn) for one in samples]
        return samples

    def timed_again(self, sample: Sample, turn: int) -> Sample:
        seconds = sample.plain_seconds
        if seconds is None or turn >= _rounds(seconds, sample.trace):
            return sample
        part = self.step.batch if self.total == 1 else self.part(sample.size)
        least = min(seconds, self.time_plain(part))
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
                trace = self.watch(part)
            peak_bytes = live.peak_bytes
        else:
            trace = self.watch(part)
        plain = None
        if self.seconds_matter(size, trace, size) and _plain_bytes(trace) < 0.95 * self.room_bytes:
            plain = self.time_plain(part)
        return Sample(size, trace, plain, peak_bytes=peak_bytes)

    def seconds_matter(self, size: int, trace: Trace, traced: int) -> bool:
        """Whether plain passes of this size are timed, by the trace of another size: the first, in
        any case; others, if the whole batch may not fit with everything kept, which nothing could
        be faster than.
        """
        if not self.has_room or (size == self._first_size and not self.has_run_plain):
            return True
        return _plain_bytes(trace) * self.total / traced > self.room_bytes

    def watched_again(self, samples: list[Sample]) -> list[Sample]:
        """With the least seconds of several runs, for the two sizes whose operations a profile is
        made of.
        """
        for place in range(max(0, len(samples) - 2), len(samples)):
            trace = self.least_of_rounds(samples[place])
            _pool(trace)
            samples[place] = dataclasses.replace(samples[place], trace=trace)
        return samples

    def least_of_rounds(self, sample: Sample) -> Trace:
        trace = sample.trace
        try:
            for _ in range(
                min(_rounds(_forward_seconds(trace), trace), _rounds_of_alike(trace)) - 1
            ):
                trace = _least(trace, self.watch(self.part(sample.size)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise  # else one run must do
        return trace

    def watch(self, part: Any) -> Trace:
        model = self.step.model
        with watching(model, self.room_bytes / 6) as trace:
            loss = _loss_without_functorch(self.step, part)
            trace.finish_forward()
            torch.autograd.backward(loss)
            del loss
        trace.finish_backward()
        drop_gradients(model)
        return trace

    def time_plain(self, part: Any) -> float:
        model = self.step.model
        started = seconds_now()
        loss = run_part(self.step.loss_fn, model, part).loss
        torch.autograd.backward(loss)
        wait_for(devices_of(model.parameters()))
        seconds = seconds_now() - started
        drop_gradients(model)
        return seconds


def _takes_long(samples: list[Sample]) -> bool:
    before, last = (sample.trace for sample in samples[-2:])
    seconds = _forward_seconds(last)
    is_long = seconds > _LONG_SECONDS and same_structure(before, last)
    return is_long or seconds > _PLENTY_SECONDS


def _loss_without_functorch(step: MeasuredStep, part: Any) -> torch.Tensor:
    try:
        return run_part(step.loss_fn, step.model, part).loss
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


def _room(
    model: torch.nn.Module, batch: Any, memory_bytes: int | None, cost: OptimizerCost
) -> float:
    """What is left for activations beside everything that is always there."""
    if memory_bytes is None:
        return math.inf
    static = storage_bytes(model.parameters()) + gradient_bytes(model)
    there = tensors_there(model, batch)
    static += sum(tensor.untyped_storage().nbytes() for tensor in there) + cost.state_bytes
    return max(1.0, float(memory_bytes - static))


def _plain_bytes(trace: Trace) -> int:
    """The most that is live at once when everything is kept until the last node that asks for
    it.
    """
    forward = len(trace.operations) + 1
    change = [0] * (forward + len(trace.nodes) + 1)
    for first, end, size in _plain_lives(trace, forward):
        change[first] += size
        change[end + 1] -= size
    inside = [op.workspace_bytes for op in trace.operations]  # as a loss in tiles has it
    beside = [*inside, 0, *(node.peak_bytes for node in trace.nodes)]
    return max(live + other for live, other in zip(accumulate(change), beside, strict=False))


def _plain_lives(trace: Trace, forward: int) -> Iterable[tuple[int, int, int]]:
    """The first and the last step of each storage's life, and its bytes."""
    last = _last_needs(trace, forward)
    lives: dict[int, tuple[int, int, int]] = {}
    for number, value in enumerate(trace.values):
        if value.operation is not None:
            first, end, size = lives.get(value.storage, (value.operation, 0, 0))
            end = max(end, value.dies, last.get(number, 0))
            lives[value.storage] = (first, end, max(size, value.nbytes))
    return lives.values()


def _last_needs(trace: Trace, forward: int) -> dict[int, int]:
    """By value: the step, after so many of the forward, of the last node that needs it."""
    return {
        value: forward + index for index, node in enumerate(trace.nodes) for value in node.needs
    }


def _working_bytes(trace: Trace) -> int:
    """The most that was live at once when everything was dropped: forward working set, and
    gradients in flight.
    """
    in_flight = max((node.peak_bytes for node in trace.nodes), default=0)
    return _forward_working_bytes(trace) + max(0, in_flight - trace.gathered_peak_bytes)


def _forward_working_bytes(trace: Trace) -> int:
    change = [0] * (len(trace.operations) + 2)
    external = {value.storage for value in trace.values if value.operation is None}
    for value in trace.values:
        if value.operation is not None and value.storage not in external:
            change[value.operation] += value.nbytes
            change[value.dies + 1] -= value.nbytes
    return max(0, *accumulate(change))


def _forward_seconds(trace: Trace) -> float:
    return sum(op.seconds for op in trace.operations)


def _rounds(seconds: float, trace: Trace) -> int:
    """How often to measure what takes so many seconds each time."""
    by_operations = max(2, _ENOUGH_OPERATIONS // max(1, len(trace.operations)))
    if distributed.is_running():  # all ranks must run the same, and each has its own clock
        return min(_MOST_ROUNDS, by_operations)
    by_seconds = math.ceil(_ENOUGH_SECONDS / max(seconds, 1e-9))
    return min(_MOST_ROUNDS, by_seconds, by_operations)


def _rounds_of_alike(trace: Trace) -> int:
    """How often to measure operations that measure each other."""
    groups = sum(1 for _ in _alike(trace))
    items = len(trace.operations) + len(trace.nodes)
    return math.ceil(_ENOUGH_ALIKE * groups / max(1, items))


def _least(first: Trace, second: Trace) -> Trace:
    """The shorter of two measurements, operation by operation, where the two runs did the same."""
    _keep_shorter(first.operations, second.operations)
    _keep_shorter(first.nodes, second.nodes)
    return second


def _keep_shorter(first: Sequence[_Timed], second: Sequence[_Timed]) -> None:
    if _names(first) == _names(second):
        for old, new in zip(first, second, strict=True):
            new.seconds = min(new.seconds, old.seconds)


def _names(items: Sequence[_Timed]) -> list[str]:
    return [one.name for one in items]


def _pool(trace: Trace) -> None:
    """Give operations that do the same on the same sizes the same seconds: the blocks of a model
    measure each other.
    """
    for group in _alike(trace):
        # The lower quartile: what disturbs a measurement makes it longer, never shorter.
        usual = sorted(item.seconds for item in group)[(len(group) - 1) // 4]
        for item in group:
            item.seconds = usual


def _alike(trace: Trace) -> Iterable[list[_Timed]]:
    groups: dict[Any, list[_Timed]] = {}
    for op in trace.operations:
        key = (op.name, *_sizes(trace, (*op.inputs, *op.outputs)))
        groups.setdefault(key, []).append(op)
    for node in trace.nodes:
        taken = node.peak_bytes - node.before_bytes
        groups.setdefault((node.name, taken, *_sizes(trace, node.needs)), []).append(node)
    return groups.values()


def _sizes(trace: Trace, values: Sequence[int]) -> list[int]:
    return [trace.values[value].nbytes for value in values]
