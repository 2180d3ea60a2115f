"""`profile`: one real step, measured at two micro-batch sizes, as a `Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory, raised_by_functorch, storage_key
from gradfit._torch_fsdp import drop_gradients
from gradfit.arguments import (
    check_arguments,
    check_optimizer,
    invalid,
    read_count,
    read_flag,
    read_instance,
    read_number,
)
from gradfit.batches.additivity import MOST_ROWS, batch_norms, measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, count_rows, run_part
from gradfit.batches.snapshot import Generators, trials_end, untouched
from gradfit.devices import counted_device, devices_of, wait_for
from gradfit.errors import MisuseError, UnsupportedOp
from gradfit.profiling.assemble import Sample, assemble
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import meter, tensors_in
from gradfit.profiling.optimizer_bytes import OptimizerCost, optimizer_cost
from gradfit.profiling.profile import Hardware, Profile
from gradfit.profiling.resident_bytes import gradient_bytes, storage_bytes
from gradfit.profiling.tile_choices import TileChoices, tile_choices
from gradfit.profiling.trace import Trace, watching
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles
from gradfit.tree import leaves, split_batch, unmarked

_Cut = Callable[[Any, int], Iterable[Any]]
_ROUNDS, _MORE_ROUNDS = 2, 5  # the least of so many measurements: a machine is never alone
_SHORT_SECONDS = 0.1  # what takes less than this is measured more often
_LONG_SECONDS = 0.25  # passes that take so long are timed twice
_PLENTY_SECONDS = 2.0  # a forward that takes so long is watched once
# in all those measurements; where there are more, operations alike measure each other
_FEW_OPERATIONS = 1000


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
    >>> found = profile(model, lambda m, x: m(x).square().mean(), torch.ones(4, 8))
    >>> [operation.name for operation in found.operations][:2]
    ['aten.addmm.default', 'aten.gelu.default']
    """
    check_arguments(model, loss_fn, split=split, fake=fake)
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
    check_model(model)

    def measured(tiles: Tiles | None, known: Additivity | None) -> Profile:
        found = _measure(
            model,
            with_tiles(loss_fn, tiles),
            sample_batch,
            optimizer,
            memory_bytes,
            rows,
            split,
            host_bandwidth,
            known,
        )
        return dataclasses.replace(found, tiles=tiles)

    found = measured(None, additivity)
    if read_flag(tile, "tile"):
        choices = choose_tiles(model, loss_fn, sample_batch, split, found.min_batch)
        found = dataclasses.replace(
            found, tiled=tuple(measured(one, found.additivity) for one in choices.tiles)
        )
    return found


def choose_tiles(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, split: _Cut | None, rows: int = 1
) -> TileChoices:
    """Which tiles are worth measuring, by running so many rows without gradients; nothing stays
    changed.
    """
    part = next(iter((split or split_batch)(batch, rows)))
    with trials_end(), untouched(model):
        return tile_choices(model, loss_fn, part)


def _measure(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    sample_batch: Any,
    optimizer: Any,
    memory_bytes: int | None,
    rows: int | None,
    split: _Cut | None,
    host_bandwidth: float,
    additivity: Additivity | None,
) -> Profile:
    total = count_rows(sample_batch, split, "sample_batch")
    cut = split or split_batch
    # the optimizer's probe too: Ctrl-C could leave its `no_grad` on
    with trials_end(), untouched(model):
        cost = optimizer_cost(optimizer) if optimizer is not None else OptimizerCost(0, 0, 0.0)
        resident = (model, optimizer, sample_batch)
        measuring_bytes = 0
        if additivity is None:
            with meter(*resident) as live:
                additivity = additivity_within(model, loss_fn, sample_batch, split, memory_bytes)
            measuring_bytes = live.peak_bytes
        room = _room(model, sample_batch, memory_bytes, cost)
        if rows is not None:
            samples = _sample_of(model, loss_fn, sample_batch, rows, cut, room)
        else:
            try:
                samples = _samples(
                    model, loss_fn, sample_batch, total, cut, memory_bytes, cost, resident
                )
            except Exception as error:
                if (
                    additivity.runs_parts
                    or isinstance(error, MisuseError)
                    or is_out_of_memory(error)
                ):
                    raise
                # the whole batch or nothing
                samples = _sample_of(model, loss_fn, sample_batch, total, cut, room)
        least = 2 if samples[-1].refused_one else 1
        measuring_bytes = max(measuring_bytes, *(one.peak_bytes for one in samples))
        if distributed.is_running():
            # ranks measure together, whatever each one's budget is: it is held by the steps alone
            measuring_bytes = 0
    known = {
        storage_key(t)
        for t in tensors_in([*model.parameters(), *model.buffers(), *leaves(sample_batch)])
    }
    found = assemble(
        model,
        sample_batch,
        total,
        samples,
        cost,
        host_bandwidth=host_bandwidth,
        static=known,
        min_batch=least,
    )
    return dataclasses.replace(
        found, additivity=additivity, splittable=additivity.adds_up, measuring_bytes=measuring_bytes
    )


def additivity_within(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    split: _Cut | None,
    memory_bytes: int | None,
) -> Additivity:
    """Whether the loss adds up, measured below a budget; the caller puts buffers and generators
    back.
    """

    def backward(loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        drop_gradients(model)

    # FSDP2 lets go of its parameters in the backward pass: a forward alone would hold them.
    finish = backward if distributed.is_running() else None
    rows = (
        MOST_ROWS
        if memory_bytes is None
        else _rows_within(model, loss_fn, batch, split, memory_bytes)
    )
    return measure_additivity(
        model, loss_fn, batch, split=split, rows=rows, rewind=Generators().restore, finish=finish
    )


def _rows_within(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, split: _Cut | None, memory_bytes: int
) -> int:
    """How many rows a forward alone can have below the budget: of a few, and at least two, by what
    few take.
    """
    few = 2 if batch_norms(model) else 1
    part = next(iter((split or split_batch)(batch, few)))
    try:
        with meter(model, batch, device=counted_device(model)) as live, torch.no_grad():
            before = live.current_bytes
            loss_fn(model, unmarked(part))
    except (
        Exception
    ):  # the user's code, which may need gradients or more rows: measured it will be said
        return 2
    taken = max(1, live.peak_bytes - before)
    room = 0.9 * (memory_bytes - before - storage_bytes(model.parameters()) / 16)
    return max(2, min(MOST_ROWS, int(room / taken * few)))


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


def _sample_of(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, rows: int, cut: _Cut, room: float
) -> list[Sample]:
    samples = [_sample(model, loss_fn, next(iter(cut(batch, rows))), rows, room / 6, room)]
    return _watched_again(model, loss_fn, batch, cut, samples, room / 6)


def _samples(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, total: int, cut: _Cut,
    memory_bytes: int | None, cost: OptimizerCost, resident: Any,
) -> list[Sample]:  # fmt: skip
    if total == 1:
        room = _room(model, batch, memory_bytes, cost)
        return _watched_again(
            model,
            loss_fn,
            batch,
            cut,
            [_sample(model, loss_fn, batch, 1, room / 6, room, resident)],
            room / 6,
        )
    if memory_bytes is None:
        samples = _several(model, loss_fn, batch, total, cut)
    else:
        samples = _growing(model, loss_fn, batch, total, cut, memory_bytes, cost, resident)
    return _timed_in_turn(model, loss_fn, batch, cut, samples)


def _timed_in_turn(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, cut: _Cut, samples: list[Sample]
) -> list[Sample]:
    """Plain passes once more, of all sizes in turn: what disturbed one must not make it look the
    slower size.
    """
    for turn in range(_ROUNDS):
        for place, one in enumerate(samples):
            if one.plain_seconds is not None and (turn == 0 or one.plain_seconds < _LONG_SECONDS):
                again = _time_plain(model, loss_fn, next(iter(cut(batch, one.size))))
                samples[place] = dataclasses.replace(
                    one, plain_seconds=min(one.plain_seconds, again)
                )
    return samples


def _several(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, total: int, cut: _Cut
) -> list[Sample]:
    """The batch and half of it; and little of it, for what a pass takes whatever its size, which
    those do not show.
    """
    samples: list[Sample] = []
    refused = False
    little = max(1, total // 8)
    for size in sorted({1, little, total // 2, total}):
        try:
            sample = _sample(model, loss_fn, next(iter(cut(batch, size))), size, math.inf)
        except Exception as error:
            if not _is_too_little(error, size, little):
                raise
            refused |= size == 1
            continue
        samples.append(dataclasses.replace(sample, refused_one=refused))
    return _watched_again(model, loss_fn, batch, cut, samples, math.inf)


def _is_too_little(error: Exception, size: int, little: int = 1) -> bool:
    """Whether so few rows may be all that is wrong, as BatchNorm says of one. Other faults are met
    again with more.
    """
    return size <= little and not isinstance(error, MisuseError) and not is_out_of_memory(error)


def _growing(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, total: int, cut: _Cut,
    memory_bytes: int, cost: OptimizerCost, resident: Any,
) -> list[Sample]:  # fmt: skip
    """Double the micro-batch while the next one surely fits, so that measuring stays below the
    budget too.
    """
    room = _room(model, batch, memory_bytes, cost)
    samples: list[Sample] = []
    size, refused = 1, False
    while size <= total:
        part = next(iter(cut(batch, size)))
        try:
            sample = _sample(
                model, loss_fn, part, size, room / 6, room, resident if not samples else None
            )
        except Exception as error:
            if samples and is_out_of_memory(error):
                break
            if not _is_too_little(error, size):
                raise
            refused, size = True, 2
            continue
        samples.append(dataclasses.replace(sample, refused_one=refused))
        trace = samples[-1].trace
        spent = sum(op.seconds for op in trace.operations)
        free = room - trace.gathered_peak_bytes
        # Beside the working set there is a sixth for what is rebuilt. Two sizes must be seen to
        # tell what grows.
        enough = len(samples) > 1
        if _working_bytes(trace) * 2 > (free / 2 if enough else free * 5 / 6):
            break
        if size == total or (enough and spent > 1.0):
            break
        size = min(total, size * 2)
    samples = _watched_again(model, loss_fn, batch, cut, samples, room / 6)
    # where forwards wait for each other
    if len(samples) == 1 and size < total and not distributed.is_running():
        from gradfit.profiling.predict import foreseen

        parts = [(rows, next(iter(cut(batch, rows)))) for rows in (samples[0].size, total)]
        samples = [*foreseen(model, loss_fn, parts, samples[0]), *samples]
    return samples


def _room(
    model: torch.nn.Module, batch: Any, memory_bytes: int | None, cost: OptimizerCost
) -> float:
    """What is left for activations beside everything that is always there."""
    if memory_bytes is None:
        return math.inf
    static = storage_bytes(model.parameters()) + gradient_bytes(model)
    device = counted_device(model)
    there = [
        tensor for tensor in leaves(batch) if device is None or tensor.device.type == device.type
    ]
    static += sum(tensor.untyped_storage().nbytes() for tensor in there) + cost.state_bytes
    return max(1.0, float(memory_bytes - static))


def _plain_bytes(trace: Trace) -> int:
    """The most that is live at once when everything is kept until the last node that asks for
    it.
    """
    forward = len(trace.operations) + 1
    last = {
        value: forward + index for index, node in enumerate(trace.nodes) for value in node.needs
    }
    lives: dict[int, tuple[int, int, int]] = {}  # storage → first and last step, bytes
    for number, value in enumerate(trace.values):
        if value.operation is not None:
            first, end, size = lives.get(value.storage, (value.operation, 0, 0))
            lives[value.storage] = (
                first,
                max(end, value.dies, last.get(number, 0)),
                max(size, value.nbytes),
            )
    change = [0] * (forward + len(trace.nodes) + 1)
    for first, end, size in lives.values():
        change[first] += size
        change[end + 1] -= size
    beside = [0] * forward + [node.peak_bytes for node in trace.nodes]
    return max(live + other for live, other in zip(accumulate(change), beside, strict=False))


def _working_bytes(trace: Trace) -> int:
    """The most that was live at once when everything was dropped: forward working set, and
    gradients in flight.
    """
    change = [0] * (len(trace.operations) + 2)
    external = {value.storage for value in trace.values if value.operation is None}
    for value in trace.values:
        if value.operation is not None and value.storage not in external:
            change[value.operation] += value.nbytes
            change[value.dies + 1] -= value.nbytes
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return peak + max(
        0, max((node.peak_bytes for node in trace.nodes), default=0) - trace.gathered_peak_bytes
    )


def _sample(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, size: int,
    quota_bytes: float, room_bytes: float = math.inf, resident: Any = None,
) -> Sample:  # fmt: skip
    """One micro-batch, watched and timed; `resident` is what there is beside it, to measure the
    peak of both.
    """
    with meter(*resident) if resident is not None else contextlib.nullcontext() as live:
        trace = _watch(model, loss_fn, batch, quota_bytes)
    peak = 0 if live is None else live.peak_bytes
    plain = None
    if _plain_bytes(trace) < 0.95 * room_bytes:
        # What is long is timed once more in turn with the other sizes, and that is enough.
        plain = _time_plain(model, loss_fn, batch)
        for _ in range(_rounds(trace) - 1 if plain < _LONG_SECONDS else 0):
            plain = min(plain, _time_plain(model, loss_fn, batch))
    return Sample(size, trace, plain, peak_bytes=peak)


def _watched_again(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    cut: _Cut,
    samples: list[Sample],
    quota_bytes: float,
) -> list[Sample]:
    """With the least seconds of several runs, for the two sizes whose operations a profile is made
    of.
    """
    for place in range(max(0, len(samples) - 2), len(samples)):
        one = samples[place]
        trace = one.trace
        try:
            for _ in range(_rounds(trace) - 1):
                trace = _least(
                    trace, _watch(model, loss_fn, next(iter(cut(batch, one.size))), quota_bytes)
                )
        except Exception as error:
            if not is_out_of_memory(error):
                raise  # else one run must do
        _pool(trace)
        samples[place] = dataclasses.replace(one, trace=trace)
    return samples


def _rounds(trace: Trace) -> int:
    spent = sum(op.seconds for op in trace.operations)
    if spent >= _SHORT_SECONDS:
        return _ROUNDS if spent < _PLENTY_SECONDS else 1
    return max(_ROUNDS, min(_MORE_ROUNDS, _FEW_OPERATIONS // max(1, len(trace.operations))))


def _watch(model: torch.nn.Module, loss_fn: LossFunction, batch: Any, quota_bytes: float) -> Trace:
    with watching(model, quota_bytes) as trace:
        try:
            loss = run_part(loss_fn, model, batch).loss
        except RuntimeError as error:
            if not raised_by_functorch(error.__traceback__):
                raise
            raise UnsupportedOp(
                "loss_fn uses torch.func, which does not let anybody see what autograd saves:"
                f" {error} Use torch.autograd.grad(..., create_graph=True) there."
            ) from error
        trace.finish_forward()
        torch.autograd.backward(loss)
    trace.finish_backward()
    drop_gradients(model)
    return trace


def _time_plain(model: torch.nn.Module, loss_fn: LossFunction, batch: Any) -> float:
    started = seconds_now()
    loss = run_part(loss_fn, model, batch).loss
    torch.autograd.backward(loss)
    wait_for(devices_of(model.parameters()))
    seconds = seconds_now() - started
    drop_gradients(model)
    return seconds


def _least(first: Trace, second: Trace) -> Trace:
    """The shorter of two measurements, operation by operation, where the two runs did the same."""
    if [op.name for op in first.operations] == [op.name for op in second.operations]:
        for a, b in zip(second.operations, first.operations, strict=True):
            a.seconds = min(a.seconds, b.seconds)
    if [node.name for node in first.nodes] == [node.name for node in second.nodes]:
        for c, d in zip(second.nodes, first.nodes, strict=True):
            c.seconds = min(c.seconds, d.seconds)
    return second


def _pool(trace: Trace) -> None:
    """Give operations that do the same on the same sizes the same seconds: the blocks of a model
    measure each other.
    """
    sizes = [value.nbytes for value in trace.values]
    alike: dict[Any, list[Any]] = {}
    for op in trace.operations:
        alike.setdefault((op.name, *(sizes[v] for v in (*op.inputs, *op.outputs))), []).append(op)
    for node in trace.nodes:
        taken = node.peak_bytes - node.before_bytes
        alike.setdefault((node.name, taken, *(sizes[v] for v in node.needs)), []).append(node)
    for group in alike.values():
        # The lower quartile: what disturbs a measurement makes it longer, never shorter.
        usual = sorted(item.seconds for item in group)[(len(group) - 1) // 4]
        for item in group:
            item.seconds = usual
