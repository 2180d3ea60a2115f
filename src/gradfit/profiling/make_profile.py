"""`profile`: what one step does, measured or predicted, as a `Profile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit.arguments import (
    check_arguments,
    check_model,
    check_optimizer,
    invalid,
    read_count,
    read_flag,
    read_instance,
    read_number,
)
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.first_rows import FirstRows
from gradfit.batches.runner import LossFunction
from gradfit.profiling.measure import choose_tiles, measure_sizes
from gradfit.profiling.predict import predict
from gradfit.profiling.profile import Hardware, Profile
from gradfit.profiling.sampled_sizes import MeasuredStep, MeasuringLimits
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles


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
        return predict(
            model,
            loss_fn,
            sample_batch,
            optimizer,
            hardware=hardware,
            split=split,
            tile=read_flag(tile, "tile"),
        )
    first = FirstRows(sample_batch, split)
    _check_numbers(first.total, memory_bytes, rows, host_bandwidth)
    check_model(model)
    limits = MeasuringLimits(memory_bytes, rows, host_bandwidth)
    step = MeasuredStep(model, loss_fn, sample_batch, optimizer, split, first)
    whole = measure_sizes(step, limits, additivity)[0]
    if not read_flag(tile, "tile"):
        return whole
    choices = choose_tiles(model, loss_fn, first, whole.min_batch)
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


def _measure_in_tiles(
    step: MeasuredStep, limits: MeasuringLimits, additivity: Additivity | None, tiles: Tiles
) -> Profile:
    step = step._replace(loss_fn=with_tiles(step.loss_fn, tiles))
    return dataclasses.replace(measure_sizes(step, limits, additivity)[0], tiles=tiles)
