"""`fit`: from a model and a budget in bytes to a step that stays below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit._torch_fsdp import drop_gradients
from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.arguments import read_count
from gradfit.distributed.sync import Together
from gradfit.errors import RankFailed
from gradfit.profiling.measure import LossFunction, check_batch, check_model
from gradfit.train.arguments import check_arguments, check_optimizer_given
from gradfit.train.batchnorm import warn_about_batch_norm
from gradfit.train.fitted import Fitted
from gradfit.train.planner import Planner
from gradfit.train.step import TrainStep
from gradfit.units import parse_bytes


def fit(
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    sample_batch: Any,
    memory: int | float | str,
    batch_size: int | None = None,
    *,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
    clip: Any = None,
    scaler: Any = None,
    dtype: torch.dtype | None = None,
    on_nonfinite: str = "raise",
    offload: bool = False,
    known: Iterable[Fitted] = (),
    reproducible: bool = False,
) -> TrainStep:
    """Profile the model, plan for the budget, try the plan, and return the step that follows it.

    `loss_fn(model, batch)` returns the mean loss over the batch's rows, or `(loss_sum, count)` where the items are not
    the rows (tokens). A batch is any nest of tensors, split along dim 0; `split(batch, size)` says otherwise. The
    budget covers all tensors of the step: parameters, gradients, optimizer state, the batch, activations, recomputation
    and temporaries. Under DDP and FSDP2 it is that of each rank, communication included, and all ranks call `fit`. If
    it cannot be held, `BudgetInfeasible` says before anything is trained what could. `known` are the plans of an
    earlier step (`step.known`): a run that is resumed must add in the same order as before.
    Gradients that earlier passes have left in `.grad` are cleared: they are no part of the first step.
    `reproducible` chooses the micro-batch by arithmetic, not by the clock, so that two runs add in the same order.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = fit(model, optimizer, lambda m, x: m(x).square().mean(), torch.ones(32, 8), memory="1 MiB")
    >>> step(torch.ones(32, 8)).stepped
    True
    """
    check_arguments(model, loss_fn, split=split, offload=offload, reproducible=reproducible)
    check_optimizer_given(optimizer)
    budget = parse_bytes(memory)
    rows = check_batch(sample_batch, split)
    if batch_size is None:
        batch_size = rows
    batch_size = read_count(batch_size, "batch_size")
    check_model(model)
    accumulator = GradientAccumulator(optimizer, clip=clip, scaler=scaler, dtype=dtype, on_nonfinite=on_nonfinite)
    drop_gradients(model)  # what earlier passes left is no part of any step, and would take room
    planner = Planner(
        model,
        optimizer,
        loss_fn,
        budget,
        split=split,
        offload=offload,
        known=known,
        reproducible=reproducible,
        reserved_bytes=accumulator.ranks.reserved_bytes,
        reduce_bytes=accumulator.ranks.reduce_bytes,
        wide=dtype,
        copies=True,
    )
    ranks = accumulator.ranks
    try:
        try:
            if isinstance(ranks, Together):
                ranks.warm_up()
            with accumulator.rehearsal():
                fitted = planner.fitted(sample_batch, batch_size)
        except Exception as error:
            if isinstance(ranks, Together) and not isinstance(error, RankFailed):
                ranks.agree(error)
            raise
        if isinstance(ranks, Together):
            ranks.agree(None)
    except BaseException:
        accumulator.disable_accumulation()  # the model is as it was
        raise
    warn_about_batch_norm(model, fitted.plan.micro_batch, batch_size)
    return TrainStep(model, optimizer, loss_fn, accumulator, planner, fitted)
