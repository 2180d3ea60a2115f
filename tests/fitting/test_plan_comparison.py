"""Plans that may be faster are looked for while training runs, and compared in real steps."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.fitting import train_step
from gradfit.fitting.fixed_cost import with_computed_seconds
from gradfit.fitting.plan_comparison import PlanComparison
from gradfit.fitting.plan_improvement import PlanImprovement
from gradfit.fitting.recovery import Recovery
from gradfit.fitting.rival_plans import rivals_of
from gradfit.planning.api import plain_plan
from gradfit.profiling.profile import Linear

ROWS = 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
    return nn.Sequential(*blocks).double()


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(ROWS, 32, generator=generator, dtype=torch.float64)


def budget() -> int:
    """What a quarter of the batch needs with everything kept, and a little more."""
    found = gf.profile(network(), square, next(batches()))
    return gf.plan(found, memory="1 GiB", batch_size=ROWS, micro_batch=16).peak_bytes + 8192


class Clock:
    """A step takes 2 seconds, and 1 if it is fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, keeping_is_fast: bool) -> None:
        self.now = 0.0
        self.used: list[tuple[int, bool]] = []
        repeat = Recovery.repeat

        def timed(recovery: Recovery, tested: Any, *args: Any) -> Any:
            keeps = tested.plan.keeps_everything
            self.used.append((tested.plan.micro_batch, keeps))
            self.now += 1.0 if keeps is keeping_is_fast else 2.0
            return repeat(recovery, tested, *args)

        monkeypatch.setattr(Recovery, "repeat", timed)
        monkeypatch.setattr(train_step, "seconds_now", lambda: self.now)


def fitted(**options: Any) -> gf.TrainStep:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return gf.fit(model, optimizer, square, next(batches()), budget(), **options)


def train_for_long(step: gf.TrainStep) -> None:
    """As if so much time had been spent on steps that there is some for plans."""
    step._planner.time.training_seconds = 1e9


def train_until_compared(step: gf.TrainStep, source: Iterator[torch.Tensor]) -> None:
    for _ in range(20):
        if step.plan.comparing:
            return
        step(next(source))
    pytest.fail("no other plan was found")


@pytest.mark.parametrize("keeping_is_fast", [False, True])
def test_the_fastest_in_real_steps_stays(
    keeping_is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fitted()
    oracle = copy.deepcopy(step.model)
    by_hand = torch.optim.SGD(oracle.parameters(), lr=0.05)
    clock = Clock(monkeypatch, keeping_is_fast=keeping_is_fast)
    train_for_long(step)
    compared = False
    for _, batch in zip(range(25), batches(), strict=False):
        result = step(batch)
        assert result.stepped
        assert result.peak_bytes <= step.budget_bytes
        by_hand.zero_grad()
        square(oracle, batch).backward()
        by_hand.step()
        compared |= bool(step.plan.comparing)
        assert ("still compared" in str(step.plan)) is bool(step.plan.comparing)
    assert compared
    assert {keeps for _, keeps in clock.used} == {False, True}
    assert len(set(clock.used[-5:])) == 1
    assert step.plan.keeps_everything is keeping_is_fast
    assert step.plan.step_seconds == pytest.approx(1.0)
    assert step.plan.seconds_measured
    assert not step.plan.comparing
    for ours, theirs in zip(step.model.parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("measured_seconds", [1e-6, 1e3])
def test_another_way_is_judged_by_the_same_profile(measured_seconds: float) -> None:
    """Where steps are faster than a profile of a few rows says, so is the other way: it was never
    tried, since its prediction was compared with what the clock had said of the plan.
    """
    step, batch = fitted(plan_ahead=True), next(batches())  # then it is the other way alone
    tools, tested = step._planner._tools, step.known[0]
    profile = with_computed_seconds(tested.profile)
    plan = plain_plan(profile, memory=step.budget_bytes, batch_size=ROWS)
    assert plan is not None
    plain = dataclasses.replace(
        tested, profile=profile, plan=plan.with_step_seconds(measured_seconds)
    )
    found = rivals_of(tools, plain, batch, step.budget_bytes)
    assert any(not one.plan.keeps_everything for one in found)
    assert all(one.plan.micro_batch > plan.micro_batch for one in found)


def test_larger_micro_batches_are_tried_where_a_profile_says_too_much() -> None:
    """What smaller ones have taken says that they hold: only recomputation was tried."""
    step, batch = fitted(plan_ahead=True), next(batches())
    tools, tested, limit = step._planner._tools, step.known[0], step._planner.step.limit_bytes
    eighth = plain_plan(tested.profile, memory=limit, batch_size=ROWS, micro_batch=8)
    assert eighth is not None
    trial = tools.trials.within_limit(dataclasses.replace(tested, plan=eighth), batch)
    assert trial is not None
    nodes = [
        dataclasses.replace(node, peak_bytes=Linear(node.peak_bytes.fixed, limit))
        for node in tested.profile.nodes
    ]
    wrong = dataclasses.replace(trial.profile, nodes=tuple(nodes))
    found = rivals_of(tools, dataclasses.replace(trial, profile=wrong), batch, limit)
    sizes = [one.plan.micro_batch for one in found if one.plan.keeps_everything]
    assert len(sizes) == 1
    assert sizes[0] > 8
    assert all(one.peak_bytes <= limit for one in found)


def test_nothing_is_looked_for_before_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(PlanImprovement, "look_for_faster", lambda *args: looked.append(args))
    step = fitted(planning_share=0.0)
    clock = Clock(monkeypatch, keeping_is_fast=True)
    for _, batch in zip(range(15), batches(), strict=False):
        step(batch)
    assert not looked
    assert len(set(clock.used)) == 1
    assert step.plan.seconds_measured  # by these steps


def test_all_is_compared_before_the_first_step_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fitted(plan_ahead=True)
    clock = Clock(monkeypatch, keeping_is_fast=not step.plan.keeps_everything)
    assert step.plan.seconds_measured
    train_for_long(step)
    for _, batch in zip(range(12), batches(), strict=False):
        step(batch)
    assert len(set(clock.used)) == 1


def test_a_state_is_of_plans_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on from it adds in the same order as who goes on without."""
    step = fitted()
    clock = Clock(monkeypatch, keeping_is_fast=True)
    train_for_long(step)
    source = batches()
    train_until_compared(step, source)
    state = step.state_dict()
    assert not step.plan.comparing
    clock.used.clear()
    for _ in range(8):
        step(next(source))
    assert {size for size, _ in clock.used} == {step.plan.micro_batch}
    again = fitted()
    again.load_state_dict(state)
    again(next(source))
    assert again.plan.micro_batch == step.plan.micro_batch


def test_a_step_that_is_left_in_the_middle_goes_on_by_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = fitted()
    clock = Clock(monkeypatch, keeping_is_fast=True)
    train_for_long(step)
    source = batches()
    train_until_compared(step, source)
    clock.used.clear()
    for _ in range(8):
        step(next(source), after_micro_batch=lambda progress: None)
    assert len(set(clock.used)) == 1
    assert not step.plan.comparing


def test_batches_of_other_sizes_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fitted()
    Clock(monkeypatch, keeping_is_fast=True)
    train_for_long(step)
    for _, batch in zip(range(15), batches(), strict=False):
        step(batch[: ROWS // 2])
    assert not step.plan.seconds_measured
    assert not step.plan.comparing


def test_one_plan_of_several_is_dropped_when_it_is_behind() -> None:
    (tested,) = fitted(micro_batch=8).known
    first, second = tested, copy.copy(tested)
    comparison = PlanComparison([first, second])
    assert comparison.fastest is first
    turns = []
    for _ in range(4):
        turns.append(comparison.tested)
        over = comparison.took(1.0 if comparison.tested is second else 3.0)
    assert [one is first for one in turns] == [True, False, True, False]
    assert over
    assert not comparison.is_between_plans
    assert comparison.fastest.plan.step_seconds == pytest.approx(1.0)
