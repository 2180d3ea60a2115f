"""Measuring how a loss adds up holds the budget, with the optimizer's state there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.profiling.rebuilding import rebuilding


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(12)))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("quota", [2**17, 2**18, 2**19, 2**20, 2**21])
def test_passes_that_rebuild_all_take_little_whatever_the_quota(quota: int) -> None:
    """Once the forward is known whole, it is cut where little leads over."""
    model, x = network(), torch.rand(2, 128, 64)
    with gf.meter(model, x) as live:
        before = live.current_bytes
        square(model, x).backward()
    kept = live.peak_bytes - before
    model.zero_grad()
    with gf.meter(model, x) as live, rebuilding(quota) as passes:
        loss = square(model, x)
        passes.end_forward()
        loss.backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert live.peak_bytes - before - gradients < (kept - gradients) / 4


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_it_counts_the_optimizers_state(share: float) -> None:
    model, x = network(), torch.rand(8, 128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    square(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    with gf.meter(model, optimizer, x) as live:
        square(model, x).backward()
    optimizer.zero_grad()
    budget = int(live.current_bytes + share * (live.peak_bytes - live.current_bytes))
    measured = gf.profile(model, square, x, optimizer, memory_bytes=budget, tile=False)
    assert measured.additivity is not None
    assert measured.additivity.adds_up
    assert measured.measuring_bytes <= budget
