"""A model that draws from Python's and NumPy's generators draws the same numbers, whatever was
tried out before.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from test_survive import FailAt
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.tree import split_batch


class Jittered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x) * random.uniform(0.5, 1.5)), 0.1) + float(
                np.random.rand()
            )
        return x


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@functools.cache
def least() -> int:
    model = Jittered()
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, memory=1000)
    return int(refused.value.min_bytes)


@pytest.mark.parametrize("fails_at", [(), (30,), (30, 200)])
def test_the_same_numbers_as_plain(fails_at: tuple[int, ...]) -> None:
    batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    ours, plain = Jittered(), Jittered()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    budget = least() + 6000
    seed()
    step = gf.fit(ours, optimizer, loss_fn, batch, memory=budget)
    with FailAt(*fails_at):
        result = step(batch)
    assert result.attempts == 1 + len(fails_at)
    after = drawn()

    seed()
    accumulator = gf.GradientAccumulator(
        torch.optim.SGD(plain.parameters(), lr=0.1), step.plan.steps
    )
    for part in split_batch(batch, step.plan.micro_batch):
        accumulator.backward(loss_fn(plain, part), weight=len(part))
    accumulator.flush()
    assert drawn() == after
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )
