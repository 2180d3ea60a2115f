"""`fit`: from a model and a budget in bytes to a step that stays below it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gradfit._torch_fsdp import drop_gradients
from gradfit.accumulate.accumulator import BareAccumulator
from gradfit.accumulate.marks import claim, disown
from gradfit.arguments import (
    check_arguments,
    check_model,
    check_optimizer,
    read_callable,
    read_count,
    read_flag,
    read_instance,
    read_list,
    read_number,
)
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, MicroBatchRunner, count_rows
from gradfit.batches.snapshot import trials_end
from gradfit.distributed.same_model import require_same_model, require_same_update
from gradfit.distributed.shared_window import AllRanks
from gradfit.errors import MisuseError, RankFailed
from gradfit.fitting.budget import read_budget
from gradfit.fitting.cut_warning import warn_about_cutting
from gradfit.fitting.forward_writes import refuse_forward_writes
from gradfit.fitting.planner import Planner
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.fitting.train_step import TrainStep
from gradfit.fitting.trained_optimizer import check_members, unwrap_optimizer
from gradfit.planning.named_choices import Named, read_named
from gradfit.profiling.profile import Profile


def fit(
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    sample_batch: Any,
    memory: int | float | str | None,
    batch_size: int | None = None,
    *,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
    clip: Any = None,
    scaler: Any = None,
    dtype: torch.dtype | None = None,
    on_nonfinite: str = "raise",
    offload: bool | Iterable[str] = False,
    known: Iterable[TestedPlan] = (),
    reproducible: bool = False,
    micro_batch: int | str | None = None,
    exact: bool = True,
    tile: bool = True,
    planning_share: float = 0.05,
    plan_ahead: bool = False,
    on_progress: Callable[[str, float], object] | None = None,
    keep: Iterable[str] = (),
    rebuild: Iterable[str] = (),
) -> TrainStep:
    """Profile the model, plan for the budget, try the plan, and return the step that follows it.

    The first plan that holds is the one to begin with. Others that may be faster are looked for
    while training runs, and take turns with it in real steps, each of which is exact whichever plan
    it goes by; the fastest stays (`step.plan` says so while several are compared).

    The budget covers all tensors of the step: parameters, gradients, optimizer state, the batch,
    activations, recomputation and temporaries. Under DDP and FSDP2 it is that of each rank,
    communication included, and all ranks call `fit`, with the same arguments but for the budget and
    the sample, which are each rank's own.

    The step is one update with the gradient of the whole batch, however it is cut. So before
    anything is cut the loss is measured on a few rows and on parts of them, and what a mean was
    divided by is read from its graph for every micro-batch: padding, class weights and masks are
    right as they stand. A loss that does not add up (a contrastive one, BatchNorm in training mode)
    is left whole, and recomputation alone holds the budget.

    Args:
        model: in training mode; it may be wrapped in DDP or sharded by FSDP2.
        optimizer: torch's or any with its `param_groups`; wrappers of other libraries are
            unwrapped.
        loss_fn: `loss_fn(model, batch)` returns a mean loss, `(loss_sum, count)`, `(loss, logs)` or
            a `Loss`.
        sample_batch: a batch like those to come; nothing is trained on it.
        memory: the budget, as bytes or text ("1.5 GiB"); "80%" of what the device (or the process's
            limit) has; "auto" for nine tenths of what is free; None for no budget: as fast as it
            goes, and repeated in less memory if it runs out.
        batch_size: rows of the batches to come, if not the sample's.
        split: `split(batch, size)` gives the parts; without it lists and tensors are cut along dim
            0.
        clip: the largest norm of the gradient, or a `GradientClipper`.
        scaler: a `torch.amp.GradScaler` or a `LossScaler`.
        dtype: in which gradients add up, if not in the parameters' own.
        on_nonfinite: "raise", or "skip" to leave the update out.
        offload: whether values may be moved out of the device's memory; or names (`gf.name`) of
            values that are, and no others.
        known: the plans of an earlier step (`step.known`): a run that is resumed must add in the
            same order as before.
        reproducible: choose the micro-batch by arithmetic, not by the clock, so that two runs add
            in the same order.
        micro_batch: a size to use, or "whole" never to cut; None chooses.
        exact: False cuts a loss that does not add up all the same, with a warning that says the
            measured error.
        tile: where memory is short, plans may cut along tokens, too, as `gf.tile` does: where one
            row does not fit, nothing else can help. False leaves that out.
        planning_share: of the time trained so far, how much may be spent on plans that are not
            necessary: where a plan for larger batches would do, but may be slower, or another one
            may be faster. 0 makes only those without which a batch cannot be run.
        plan_ahead: True compares all plans by the clock before the first step, which takes several
            times as long; the micro-batch of a shape then stays. So it is also where
            `reproducible` is set, and over several ranks.
        on_progress: `on_progress(doing, seconds)` is called when something begins (measuring,
            planning, a trial), with the seconds so far, here and whenever the step makes a plan;
            what it raises ends that. None shows it on a terminal, after two seconds.
        keep: names (`gf.name`) of values that every plan keeps. Micro-batches that run online have
            no plan, and go by what each value costs, whatever its name.
        rebuild: names of values that every plan rebuilds.

    Raises:
        MisuseError: an argument cannot be right; nothing was changed.
        BudgetInfeasible: no plan holds the budget; it says the smallest that can be held, and what
            takes it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = torch.ones(32, 8)
    >>> step = fit(model, optimizer, lambda m, x: m(x).square().mean(), batch, memory="1 MiB")
    >>> step(torch.ones(32, 8)).stepped
    True
    """
    check_arguments(model, loss_fn, split=split, reproducible=reproducible, exact=exact)
    offloaded = () if isinstance(offload, bool) else offload
    named = read_named(keep=keep, rebuild=rebuild, offload=offloaded)
    read_flag(tile, "tile")
    check_optimizer(optimizer)
    read_flag(plan_ahead, "plan_ahead")
    read_number(planning_share, "planning_share", minimum=0, like=0.05)
    if on_progress is not None:
        read_callable(on_progress, "on_progress", "a function of a text and seconds", arguments=2)
    known = _read_known(known, named)
    given, optimizer = optimizer, unwrap_optimizer(optimizer)
    budget = read_budget(memory, model, optimizer)
    rows = count_rows(sample_batch, split, "sample_batch")
    batch_size = read_count(rows if batch_size is None else batch_size, "batch_size")
    size = None if micro_batch in (None, "whole") else read_count(micro_batch, "micro_batch")
    check_model(model)
    check_members(model, optimizer)
    runner = MicroBatchRunner(model, loss_fn, split)
    refuse_forward_writes(runner, optimizer, sample_batch, budget)
    accumulator = BareAccumulator(
        optimizer,
        clip=clip,
        scaler=scaler,
        dtype=dtype,
        on_nonfinite=on_nonfinite,
    )
    step = StepToPlan(
        runner,
        optimizer,
        budget,
        offload=offload is True or "offload" in named.values(),
        named=named,
        reproducible=reproducible,
        reserved_bytes=accumulator.ranks.reserved_bytes,
        reduce_bytes=accumulator.ranks.reduce_bytes,
        wide=dtype,
        scaler=scaler,
        is_ours=True,
        micro_batch=size,
        whole=micro_batch == "whole",
        exact=exact,
        tile=tile,
        plan_ahead=plan_ahead,
    )
    planner = Planner(step, known=known, planning_share=planning_share, on_progress=on_progress)
    ranks = accumulator.ranks
    # refused in the middle of another's window, whose sums would be lost
    claim(accumulator.window, accumulator.window.tensors)
    disown(accumulator.window)
    drop_gradients(model)  # what earlier passes left is no part of any step, and would take room
    try:
        if isinstance(ranks, AllRanks):
            options = {
                "clip": clip,
                "scaler": scaler,
                "dtype": dtype,
                "on_nonfinite": on_nonfinite,
                "exact": exact,
            }
            with _agreeing(ranks, planner):
                require_same_model(model, ranks.group.exchange)
                require_same_update(optimizer, options, ranks.group.exchange)
                ranks.warm_up()
                tested = _first_plan(accumulator, planner, sample_batch, batch_size)
        else:
            tested = _first_plan(accumulator, planner, sample_batch, batch_size)
    except BaseException:
        accumulator.disable_accumulation()  # the model is as it was
        raise
    warn_about_cutting(tested, planner.loss.additivity, exact=exact)
    accumulator.enabled = False  # but inside of its steps
    return TrainStep(model, optimizer, loss_fn, accumulator, planner, tested, given=given)


def _read_known(known: Any, named: Named) -> list[TestedPlan]:
    plans = [
        read_instance(one, "known", TestedPlan, "step.known")
        for one in read_list(known, "known", "step.known")
    ]
    if any(one.profile.fixed != _of_names_in(one.profile, named) for one in plans):
        raise MisuseError(
            "known= holds plans in which other names are kept, rebuilt or moved out than in keep=,"
            " rebuild= and offload=. Pass the names that they were made with, or leave known= out."
        )
    return plans


def _of_names_in(profile: Profile, named: Named) -> Named:
    return {name: action for name, action in named.items() if name in profile.names}


def _first_plan(
    accumulator: BareAccumulator, planner: Planner, sample_batch: Any, batch_size: int
) -> TestedPlan:
    with trials_end(), accumulator.trial():
        return planner.tested_plan(sample_batch, batch_size)


@contextlib.contextmanager
def _agreeing(ranks: AllRanks, planner: Planner) -> Iterator[None]:
    """All ranks get through what is inside, or none."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RankFailed):
            ranks.agree(error)
        raise
    ranks.agree(None)
    _check_same_weights(ranks, planner.loss.additivity)


def _check_same_weights(ranks: AllRanks, additivity: Additivity | None) -> None:
    """Ranks that weigh by different things cannot be added up."""
    over = "" if additivity is None else str(additivity.over)
    ways = [one["over"] for one in ranks.group.exchange({"kind": "fit's weights", "over": over})]
    if len(set(ways)) > 1:
        raise MisuseError(
            f"The ranks measured different losses, which add up by {', '.join(ways)}. Pass each"
            " rank a sample of the same kind, or return gf.Loss(sum=…, count=…)."
        )
