"""Budgets of models whose embeddings have sparse gradients, which grow with each micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradfit as gf

TOKENS = torch.randint(0, 2000, (256, 16), generator=torch.Generator().manual_seed(0))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 32, sparse=True), nn.Linear(32, 32), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


@pytest.mark.parametrize("memory", ["1250 KiB", "1500 KiB"])
def test_steps_hold_a_budget_or_it_is_refused(memory: str) -> None:
    """What their sum takes, and a copy of it for its norm, beside the update and a copy to go back
    to.
    """
    model, optimizer = made()
    try:
        step = gf.fit(model, optimizer, loss_fn, TOKENS, memory)
    except gf.BudgetInfeasible as refused:
        model, optimizer = made()
        step = gf.fit(model, optimizer, loss_fn, TOKENS, refused.min_bytes)
    for _ in range(2):
        with gf.meter(model, optimizer, TOKENS) as live:
            result = step(TOKENS)
        assert max(result.peak_bytes, live.peak_bytes) <= step.budget_bytes
