"""Few large micro-batches with recomputation, or many small ones without: the clock decides,
whichever was planned.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.fitting import timed_plans
from gradfit.planning.api import plain_plan, recomputing_plan
from gradfit.profiling.profile import Linear, Profile


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
    )


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def found() -> Profile:
    return gf.profile(network(), square, torch.randn(64, 32))


def budget_for(found: Profile, rows: int) -> int:
    """What so many rows need without recomputation."""
    return gf.plan(found, memory="1 GiB", batch_size=64, micro_batch=rows).peak_bytes


def test_the_best_of_the_larger_ones(found: Profile) -> None:
    budget = budget_for(found, 8)
    plain = plain_plan(found, memory=budget, batch_size=64)
    assert plain is not None
    assert (plain.micro_batch, plain.keeps_everything) == (8, True)
    other = recomputing_plan(found, memory=budget, batch_size=64, above=8, most_seconds=math.inf)
    assert other is not None
    assert other.micro_batch > 8
    assert not other.keeps_everything
    assert other.peak_bytes <= budget
    assert (
        recomputing_plan(
            found, memory=budget_for(found, 1) // 4, batch_size=64, above=1, most_seconds=math.inf
        )
        is None
    )
    assert recomputing_plan(found, memory=budget, batch_size=64, above=8, most_seconds=0.0) is None


@pytest.mark.parametrize("recomputation_is_slow", [False, True])
def test_the_clock_decides(
    recomputation_is_slow: bool, monkeypatch: pytest.MonkeyPatch, found: Profile
) -> None:
    asked: set[bool] = set()

    def seconds(step: Any, made: Any, part: Any) -> float:
        asked.add(made.plan.keeps_everything)
        return len(part) * (1.0 if made.plan.keeps_everything is recomputation_is_slow else 2.0)

    monkeypatch.setattr(timed_plans, "_pass_seconds", seconds)
    model, batch = network(), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = gf.fit(
        model, optimizer, square, batch, memory=budget_for(found, 16) + 8192, plan_ahead=True
    )
    assert asked == {False, True}
    assert step.plan.keeps_everything is recomputation_is_slow
    assert step.plan.step_seconds == pytest.approx(64.0, rel=0.01)
    assert step(batch).stepped


def test_plans_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch, found: Profile) -> None:
    """On a machine that becomes ten times as slow while they are: so it does for both."""
    order: list[bool] = []

    def seconds(step: Any, made: Any, part: Any) -> float:
        order.append(made.plan.keeps_everything)
        pace = 1.0 if len(order) <= 2 else 10.0
        return 1e-3 * pace * len(part) * (1.0 if made.plan.keeps_everything else 1.1)

    monkeypatch.setattr(timed_plans, "_pass_seconds", seconds)
    model, batch = network(), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = gf.fit(
        model, optimizer, square, batch, memory=budget_for(found, 16) + 8192, plan_ahead=True
    )
    assert set(order) == {False, True}
    assert all(one is not other for one, other in pairwise(order))
    assert step.plan.keeps_everything
    assert step.plan.step_seconds == pytest.approx(0.64, rel=0.01)  # the pace that most passes had


class Experts(nn.Module):
    """Each row goes to one of four, so that a few rows are seen by few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(32, 4)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            share = self.route(x).softmax(-1)
            chosen, out = share.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero()[:, 0]
                if len(rows):
                    part = torch.tanh(expert(x[rows])) * share[rows, number : number + 1]
                    out = out.index_add(0, rows, part)
            x = x + out
        return x


def test_a_profile_of_a_few_rows_does_not_decide_how_often_a_batch_is_cut() -> None:
    """By it what passes grows with each row, though it is gradients on their way."""
    torch.manual_seed(0)
    model, batch = Experts(), torch.randn(256, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gf.meter(model, optimizer, batch) as live:
        square(model, batch).backward()
    optimizer.zero_grad()
    step = gf.fit(model, optimizer, square, batch, memory=2 * live.peak_bytes)
    assert step.plan.keeps_everything
    assert step.plan.steps == 1
    assert sum(step.plan.breakdown.values()) == pytest.approx(step.plan.peak_bytes, rel=0.01)
    assert step(batch).peak_bytes <= 2 * live.peak_bytes


def test_plain_seconds_lie_between_those_measured(found: Profile) -> None:
    points = ((2, 3.0), (4, 4.0), (8, 10.0))
    made = Profile(found.values, found.operations, found.nodes, plain_points=points)
    assert [made.plain_seconds(n) for n in (2, 3, 4, 6, 8)] == [3.0, 3.5, 4.0, 7.0, 10.0]
    line = Linear.through((2, 3.0), (8, 10.0))
    assert made.plain_seconds(16) == pytest.approx(line.at(16))
    assert made.plain_seconds(1) == pytest.approx(line.at(1))
    again = Profile.from_json(made.to_json())
    assert again.plain_points == points
    shrinking = Profile(
        found.values, found.operations, found.nodes, plain_points=((2, 5.0), (4, 4.0))
    )
    assert shrinking.plain_seconds(8) == 8.0  # in proportion, as no line through noise
    assert shrinking.plain_seconds(1) == 2.5


def test_a_large_batch_is_measured_at_small_sizes_too() -> None:
    sizes = [size for size, _ in gf.profile(network(), square, torch.randn(64, 32)).plain_points]
    assert sizes == [1, 8, 32, 64]
    assert [size for size, _ in gf.profile(network(), square, torch.randn(2, 32)).plain_points] == [
        1,
        2,
    ]


def test_what_refuses_a_single_row_is_never_split_so_far() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32))
    for rows in (2, 8):
        found = gf.profile(model, square, torch.randn(rows, 32))
        assert found.min_batch == 2
        assert (
            gf.plan(
                found,
                memory=gf.frontier(found, points=2, batch_size=8)[-1].peak_bytes,
                batch_size=8,
            ).micro_batch
            > 1
        )


class Pairs(nn.Module):
    """Compares each other row with the one after it: it runs an even number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x).unflatten(0, (-1, 2)).unbind(1)
        return first - second


def test_a_few_rows_may_fail_in_any_way() -> None:
    for memory, sizes in (None, [12, 24]), (2**24, [2, 4, 8, 16, 24]):
        found = gf.profile(Pairs(), square, torch.randn(24, 32), memory_bytes=memory)
        assert found.min_batch == 2
        assert [size for size, _ in found.plain_points] == sizes


@pytest.mark.parametrize("memory", [None, 2**24])
def test_what_fails_at_every_size_is_said_as_it_is(memory: int | None) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gf.profile(network(), square, torch.randn(8, 31), memory_bytes=memory)


def test_memory_that_runs_out_while_plans_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(16, 8)
    step = gf.fit(
        model,
        optimizer,
        lambda m, x: m(x).square().mean(),
        batch,
        memory="1 MiB",
        plan_ahead=True,  # else nothing is timed
    )
    failed: list[object] = []

    def fail(*given: object) -> float:
        failed.append(given)
        raise torch.OutOfMemoryError("Tried to allocate 20 MiB.")

    monkeypatch.setattr(timed_plans, "_pass_seconds", fail)
    tested = step.known[0]
    assert timed_plans.fastest(step._planner._tools, [tested, tested], batch) is tested
    assert len(failed) == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_rank_without_rows_counts_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(
        model, optimizer, lambda m, x: m(x).square().mean(), torch.randn(16, 8), memory="1 MiB"
    )
    nothing = gf.StepResult(False, "empty window", None, 0, 0, 0)
    # which asks the other ranks
    monkeypatch.setattr(step, "_close_window", lambda totals: (nothing, 0.0, {}))
    before = step.idle().peak_bytes
    planner = step._planner  # with buckets for communication
    planner.step = dataclasses.replace(planner.step, reserved_bytes=1000)
    assert step.idle().peak_bytes == before + 1000
