"""Memory that runs out while the optimizer steps: with room for a copy, without, and in steps of
other kinds.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from sampling import sampled
from test_survive import FailAt
from torch import nn

import gradfit as gf
from gradfit.fitting.plan_finisher import PlanFinisher
from gradfit.fitting.plan_state import read_plan, write_plan


class Counting(torch.optim.Optimizer):
    """Its rate depends on how often it has stepped, which it counts in its group and in itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] / (group["count"] + self.steps)))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "counting": Counting,
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
ONE_BY_ONE = ("adamw", "momentum", "adafactor", "counting")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 3),
    )


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


BATCH = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))


class Run:
    """Two steps (or one, with `steps=0`), the last of which may fail at some operations."""

    def __init__(
        self, optimizer: str, budget: int, known: Any = (), *, steps: int = 1, **options: Any
    ) -> None:
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = gf.fit(
            self.model,
            self.optimizer,
            loss_fn,
            BATCH,
            memory=budget,
            known=known,
            reproducible=True,
            **options,
        )
        torch.manual_seed(3)
        for _ in range(steps):
            self.step(BATCH)

    def second(self, *at: int) -> int:
        with FailAt(*at) as mode:
            self.step(BATCH)
        return mode.count

    def fail_in_update(self, *at: int) -> int:
        """The same, counting from the beginning of the optimizer's first step."""
        begun: list[int] = []
        with FailAt() as mode:

            def begin(*_: Any) -> None:
                if not begun:
                    begun.append(mode.count)
                    mode.at = tuple(mode.count + number for number in at)

            hook = self.optimizer.register_step_pre_hook(begin)
            self.step(BATCH)
            hook.remove()
            return mode.count - begun[0]

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


@functools.cache
def least(optimizer: str) -> int:
    with pytest.raises(gf.BudgetInfeasible) as refused:
        Run(optimizer, 1000)
    return refused.value.min_bytes


@pytest.mark.parametrize("every", sampled([7, 2], lambda every: every > 2))
@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_operations_of_the_update(name: str, roomy: bool, every: int) -> None:
    budget = 10**7 if roomy else least(name)
    expected = Run(name, budget)
    assert expected.step.known[0].copied == roomy
    total = expected.second()
    state = copy.deepcopy(expected.optimizer.state_dict())
    for at in range(total - 30, total + 1, every):
        run = Run(name, budget, expected.step.known)
        run.second(at)
        assert all(
            torch.equal(a, b) for a, b in zip(run.parameters, expected.parameters, strict=True)
        ), at
        assert repr(run.optimizer.state_dict()) == repr(state)


def test_wider_sums() -> None:
    expected = Run("adamw", 10**7, dtype=torch.float64)
    total = expected.second()
    for at in range(total - 60, total + 1, 4):
        run = Run("adamw", 10**7, expected.step.known, dtype=torch.float64)
        run.second(at)
        assert all(
            torch.equal(a, b) for a, b in zip(run.parameters, expected.parameters, strict=True)
        ), at
        assert {p.dtype for p in run.parameters} == {torch.float32}


def test_a_step_that_has_half_happened_is_not_repeated() -> None:
    budget = least("adamw")
    expected = Run("adamw", budget)
    total = expected.second()
    run = Run("adamw", budget, expected.step.known)
    with pytest.raises(gf.StateError, match="had changed some parameters"):
        run.second(total - 8, total - 7)  # and when it is tried once more


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_room_for_a_copy_a_step_is_whole_or_refused(name: str, first: bool) -> None:
    """Wherever memory runs out for good in the update: as if it had not, or an error; nothing is
    stepped twice.
    """
    budget, steps = least(name), 0 if first else 1
    expected = Run(name, budget, steps=steps)
    total = expected.fail_in_update()
    state = copy.deepcopy(expected.optimizer.state_dict())
    outcomes = set()
    for at in sorted({1, 2, 3, total // 3, total // 2, total - 1, total}):
        run = Run(name, budget, expected.step.known, steps=steps)
        try:
            run.fail_in_update(at, at + 1)  # and when it is tried once more
        except gf.StateError:
            outcomes.add("refused")
            continue
        outcomes.add("repeated")
        assert all(
            torch.equal(a, b) for a, b in zip(run.parameters, expected.parameters, strict=True)
        ), at
        assert repr(run.optimizer.state_dict()) == repr(state), at
    assert "refused" in outcomes
    assert "repeated" in outcomes or not first  # a later Adam begins with a write


def test_the_copy_is_in_the_predicted_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanFinisher, "_copy_seconds", lambda self: 1000.0)
    roomy, tight = Run("adamw", 10**7).step.plan, Run("adamw", least("adamw")).step.plan
    # There was no state yet: with Adam's two averages the copy takes three times as long, and its
    # counters' bytes.
    assert roomy.step_seconds == pytest.approx(3000.0, rel=0.01)
    assert roomy.extra_seconds < 1.0
    assert tight.step_seconds < 1.0


def test_a_plan_that_was_tightened_can_be_saved_and_read() -> None:
    run = Run("adamw", 10**7)
    # as after an out-of-memory
    tighter = dataclasses.replace(run.step.known[0], saved_bytes=None, asked=3)
    again = read_plan(json.loads(json.dumps(write_plan(tighter, lambda record: record.to_json()))))
    assert (again.saved_bytes, again.asked, again.copied) == (None, 3, True)
    assert again.plan == tighter.plan
