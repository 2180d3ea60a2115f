"""What happens between two micro-batches of a step, a save for example, is not the step's
memory.
"""

from __future__ import annotations

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
