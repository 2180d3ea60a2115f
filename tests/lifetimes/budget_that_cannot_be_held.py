"""A budget that cannot be held, caught, and tried again: tracebacks with tensors in them are
garbage in cycles.
"""

from __future__ import annotations

import torch

import gradfit as gf


def forward() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with gf.CheckpointManager(
        max_memory_mb=200 / 2**20, auto_checkpoint=True, memory_threshold=1.0
    ):
        b = torch.zeros(4, 4)
        b[1:3].copy_(x[1:3] * 2)
        (b * x).sin()


def metered() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with gf.meter(), gf.CheckpointScope("inside"):
        b = torch.zeros(4, 4)
        b[1:3].copy_(x[1:3] * 2)
        (b * x).sin()
        raise gf.BudgetInfeasible("as above", min_bytes=0, breakdown={})


refused = 0
for function in (forward, metered):
    for _ in range(50):
        try:
            function()
        except gf.BudgetInfeasible:
            refused += 1
print(refused)
