"""What happens between two micro-batches of a step, a save for example, is not the step's memory;
and trials between an accumulator's micro-batches are none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf


def test_what_a_save_copies_does_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(64, 8)
    step = gf.fit(model, optimizer, lambda m, b: m(b).square().mean(), batch, memory=14_000)
    assert step.plan.steps > 1
    copies: list[torch.Tensor] = []
    result = step(batch, after_micro_batch=lambda _: copies.append(torch.zeros(100_000)))
    assert len(copies) == step.plan.steps - 1
    assert result.peak_bytes <= 14_000


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tries() -> dict[str, Callable[..., Any]]:
    return {
        "fit": lambda model, optimizer, x: gf.fit(model, optimizer, square, x, memory="1 MiB"),
        "profile": lambda model, optimizer, x: gf.profile(model, square, x, optimizer),
        "audit": lambda model, optimizer, x: gf.audit(model, square, x),
    }


@pytest.mark.parametrize("name", tries())
def test_trials_are_nobodys_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model, x).backward()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    optimizer.zero_grad()
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    tries()[name](model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    before = model.weight.detach().clone()
    for part in x.split(6):
        square(model, part).backward()
        stepped = accumulator.step()
    assert stepped.micro_batches == 2
    torch.testing.assert_close((before - model.weight.detach()) / 0.1, expected)
    accumulator.close()


def test_a_window_that_is_half_full_is_not_lost_to_fit() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    square(model, x[:6]).backward()
    gf.profile(model, square, x)
    with pytest.raises(
        gf.MisuseError, match=r"another accumulator's window.*flush\(\) or reset\(\)"
    ):
        gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), square, x, memory="1 MiB")
    square(model, x[6:]).backward()
    assert accumulator.step().stepped
    accumulator.close()
