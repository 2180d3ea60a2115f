"""Where everything is kept nothing is recorded; what then does more than was measured is
noticed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.fitting import plan_state, tested_plan
from gradfit.recompute import follow_plan
from gradfit.recompute.follow_plan import Diverged, LooksAtData, Unrecorded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.deep = False
        self.looks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.1)
            if self.looks and x.detach().sum().item() == 0.123:
                x = x + 1
        if self.deep:
            for _ in range(12):
                x = torch.tanh(x * 1.5)
        return x


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def rows(count: int = 64) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(1))


def test_no_tape_and_not_a_bit_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), rows()
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    step = gf.fit(model, optimizer, loss_fn, x, memory="64 MiB")
    assert step.plan.keeps_everything
    assert step.plan.micro_batch == 64

    def recorded(*_: Any) -> None:
        raise AssertionError("something was recorded")

    monkeypatch.setattr(follow_plan, "PlannedForward", recorded)
    for _ in range(3):
        torch.manual_seed(4)
        assert step(x).stepped
        torch.manual_seed(4)
        other.zero_grad()
        loss_fn(plain, x).backward()
        other.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("looks", [False, True])
def test_what_saves_more_than_was_measured_is_run_online(looks: bool) -> None:
    model, x = Net(), rows()
    model.looks = looks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gf.meter(model, optimizer, x) as live:
        loss_fn(model, x).backward()
    model.zero_grad()
    budget = live.peak_bytes + 40_000
    step = gf.fit(model, optimizer, loss_fn, x, memory=budget)
    assert step.plan.keeps_everything
    step._planner.time.training_seconds = 1e9  # else there is no time to find out
    model.deep = True  # a dozen more tensors than there is room for
    plain = copy.deepcopy(model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(4)
    with gf.meter(model, optimizer, x) as live:
        result = step(x)
    assert result.attempts == 2
    assert live.peak_bytes <= budget
    torch.manual_seed(4)
    loss_fn(plain, x).backward()
    other.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def watched_forwards(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []

    class Noted(Unrecorded):
        def __init__(self, limit_bytes: float) -> None:
            super().__init__(limit_bytes)
            made.append(limit_bytes)

    monkeypatch.setattr(tested_plan, "Unrecorded", Noted)
    return made


@pytest.mark.parametrize("looks", [False, True])
def test_every_step_is_watched_however_much_room_there_is(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model that grows by itself could pass the budget before anybody knows."""
    model, x = Net(), rows()
    model.looks = looks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, loss_fn, x, memory="64 MiB")
    for _ in range(8):
        step(x)
    seen = watched_forwards(monkeypatch)
    for _ in range(9):
        assert step(x).attempts == 1
    assert len(seen) == 9


def test_the_limit_is_of_what_autograd_saves() -> None:
    model, x = Net(), rows()
    with Unrecorded() as free:
        loss_fn(model, x).backward()
    assert free.rest.saved_bytes > 4 * x.nbytes
    with Unrecorded(free.rest.saved_bytes):
        loss_fn(model, x).backward()
    with pytest.raises(Diverged, match="were measured"), Unrecorded(free.rest.saved_bytes - 1):
        loss_fn(model, x)


def test_what_is_no_plain_tensor_counts_as_much() -> None:
    """The native core leaves a subclass to Python: both add to one sum, with one limit."""

    class Kind(torch.Tensor):
        pass

    def run(given: torch.Tensor) -> None:
        (torch.ones(8, requires_grad=True) * given).exp().exp().sum()

    with Unrecorded() as plain:
        run(torch.ones(8))
    with Unrecorded() as mixed:
        run(torch.ones(8).as_subclass(Kind))
    assert mixed.rest.saved_bytes == plain.rest.saved_bytes > 64
    with pytest.raises(Diverged), Unrecorded(mixed.rest.saved_bytes - 1):
        run(torch.ones(8).as_subclass(Kind))


def test_writes_over_what_was_saved_are_noticed_as_without_it() -> None:
    w = torch.ones(3, requires_grad=True)
    with Unrecorded():
        y = w.exp()
        loss = y.sum()
    y.detach().mul_(2)
    with pytest.raises(gf.ActivationOverwritten):
        loss.backward()


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda x: x + 1, False),
        (lambda x: x.sum().item(), True),
        (lambda x: bool((x > 0).any()), True),
        (lambda x: x[x > 0], True),
        (lambda x: x.nonzero(), True),
        (lambda x: F.dropout(x, 0.5), False),
        (lambda x: x[torch.tensor([0, 1])], False),
    ],
)
def test_who_looks_at_the_data(look: Any, expected: bool) -> None:
    with LooksAtData() as seen:
        look(rows(4))
    assert seen.reads_data is expected


def test_a_saved_plan_has_the_names_that_earlier_states_have() -> None:
    model, x = Net(), rows()
    step = gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, x, memory="64 MiB")
    (tested,), (saved,) = step.known, step.state_dict()["plans"]
    assert saved["looks"] is tested.reads_data is False
    saved["looks"] = True
    again = plan_state.read_plan(saved)
    assert again.reads_data
    assert plan_state.write_plan(again, lambda record: record.to_json()) == saved
