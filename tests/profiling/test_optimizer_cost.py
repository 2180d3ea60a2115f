"""What an optimizer takes is seen whatever kind it is: all at once, with state of its own, with
attributes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.profiling.optimizer_bytes import optimizer_cost


class AllFirst(torch.optim.Optimizer):
    """Makes every update before it applies the first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            updates = [(p, p.grad * group["lr"]) for p in group["params"]]
            for parameter, update in updates:
                parameter.sub_(update)


class Flat(AllFirst):
    """One momentum for all parameters, under no parameter's name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            flat = torch.cat([p.grad.flatten() for p in group["params"]])
            momentum = self.state["all"].setdefault("momentum", torch.zeros_like(flat))
            momentum.mul_(0.9).add_(flat)


class Holding(AllFirst):
    """Holds buffers as an attribute, outside of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.buffers: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                held = self.buffers.setdefault(number, torch.zeros_like(parameter))
                parameter.sub_(held.add_(parameter.grad), alpha=group["lr"])


@pytest.mark.parametrize("kind", [AllFirst, Flat, Holding])
def test_kinds_that_torch_does_not_have(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20), nn.Linear(20, 40))
    optimizer = kind(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    cost = optimizer_cost(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert not getattr(optimizer, "buffers", None)
    model(torch.ones(2, 40)).sum().backward()
    with gf.meter(model, optimizer) as live:
        start = live.current_bytes
        optimizer.step()
        held = live.current_bytes - start
        live.reset_peak()
        optimizer.step()
    assert cost.state_bytes == held
    assert live.peak_bytes - start - held <= cost.burst_bytes


def test_large_values_of_one_size_in_the_smallest_budget() -> None:
    layers = [
        m
        for _ in range(3)
        for m in (nn.Conv2d(3, 3, 3, padding=1), nn.SELU(), nn.AlphaDropout(0.3))
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(243, 2))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(13, 3, 9, 9)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, optimizer, loss_fn, x, memory=1000)
    with gf.meter(model, optimizer, x) as live:
        step = gf.fit(model, optimizer, loss_fn, x, memory=refused.value.min_bytes)
        step(x)
    assert live.peak_bytes <= refused.value.min_bytes


def test_where_a_state_is_there_already_no_second_one_is_room_for_measuring() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    with gf.meter(model, optimizer) as live:
        before = live.current_bytes
        optimizer_cost(optimizer, room_bytes=0)
    assert live.peak_bytes - before <= gradients + 64 * 64 * 4


class Timed(AllFirst):
    """Takes one second for a call and a tenth for a parameter, and a hundred more where something
    listens.
    """

    now = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        listening = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        Timed.now += 100.0 * listening + sum(
            1.0 + 0.1 * len(group["params"]) for group in self.param_groups
        )


@pytest.mark.parametrize("count", [1, 4, 25])
def test_a_call_is_counted_once_and_timed_while_nothing_listens(count: int) -> None:
    optimizer = Timed([nn.Parameter(torch.zeros(size + 1)) for size in range(count)])
    cost = optimizer_cost(optimizer, clock=lambda: Timed.now)
    assert cost.seconds == pytest.approx(1.0 + 0.1 * count)
