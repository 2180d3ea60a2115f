"""One real step, measured at a few micro-batch sizes, as a `Profile`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import storage_key
from gradfit._torch_compile import is_compiled
from gradfit._torch_fsdp import drop_gradients
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity import MOST_ROWS_IF_READ, measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.first_rows import FirstRows
from gradfit.batches.passes import FewRowsPasses
from gradfit.batches.runner import LossFunction
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.devices import counted_device
from gradfit.profiling.assemble import Sample, assemble, same_structure, tensors_there
from gradfit.profiling.meter import meter, tensors_in
from gradfit.profiling.optimizer_bytes import OptimizerCost, optimizer_cost
from gradfit.profiling.profile import Profile
from gradfit.profiling.resident_bytes import gradient_bytes, storage_bytes
from gradfit.profiling.room_for_rows import RoomForRows, WatchedPasses
from gradfit.profiling.sampled_sizes import Cut, MeasuredStep, MeasuringLimits, SizeSampler
from gradfit.profiling.tile_choices import TileChoices, tile_choices
from gradfit.tree import leaves


def measure_sizes(
    step: MeasuredStep, limits: MeasuringLimits, additivity: Additivity | None
) -> list[Profile]:
    """The profile; and that of fewer rows alone, where these were seen to do something else."""
    model, batch = step.model, step.batch
    first = step.first_rows or FirstRows(batch, step.split)
    step, total = step._replace(first_rows=first), first.total
    measuring_bytes = 0
    has_room = False
    watched: WatchedPasses | None = None
    few_are_enough, is_first = _may_share_passes(step, limits, total), additivity is None
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
                if few_are_enough:
                    watched = WatchedPasses(model, room, room_bytes / 6)
                additivity = additivity_within(
                    model, step.loss_fn, batch, step.split, room, before.rewind, watched, first
                )
            measuring_bytes = live.peak_bytes
            has_room = (
                additivity.adds_up
                and room.gradient_rows > 1  # then both passes of several were run
                and _had_room(measuring_bytes, limits.memory_bytes)
            )
        sampler = SizeSampler(step, total, room_bytes, limits.meter, has_room=has_room)
        # of a step's later plans as of its first one
        sampler.takes_few = few_are_enough and not is_first
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


def _cost_of(step: MeasuredStep, memory_bytes: int | None) -> OptimizerCost:
    if step.optimizer is None:
        return OptimizerCost(0, 0, 0.0)
    if memory_bytes is None:
        return optimizer_cost(step.optimizer)
    there = meter(step.model, step.optimizer, step.batch, device=counted_device(step.model))
    return optimizer_cost(step.optimizer, room_bytes=memory_bytes - there.current_bytes)


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


def _static_storages(model: torch.nn.Module, batch: Any) -> set[int]:
    """The addresses of parameters, buffers and the batch."""
    static = [*model.parameters(), *model.buffers(), *leaves(batch)]
    return {storage_key(tensor) for tensor in tensors_in(static)}


def _unlike_the_last(samples: list[Sample]) -> list[list[Sample]]:
    """The one before the last, where it ran other operations."""
    if len(samples) < 2 or same_structure(samples[-2].trace, samples[-1].trace):
        return []
    return [[samples[-2]]]


def additivity_within(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    split: Cut | None,
    room: RoomForRows,
    rewind: Callable[[], None],
    passes: FewRowsPasses | None = None,
    first: FirstRows | None = None,
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
        first=first,
    )


def choose_tiles(
    model: torch.nn.Module, loss_fn: LossFunction, first: FirstRows, rows: int = 1
) -> TileChoices:
    """Which tiles are worth measuring, by running so many rows without gradients; nothing stays
    changed.
    """
    if is_compiled(model, loss_fn):  # tiles are other forwards, which would be compiled anew
        return TileChoices()
    part = first.of(rows)
    with trials_end(), untouched(model), eager_functions():
        return tile_choices(model, loss_fn, part)
