"""Nested tensors without a shape under limits that can and cannot be held, all in turn: prints how
many ran as without a limit.
"""

from __future__ import annotations

import warnings

import torch
from torch.nn import functional as F

import gradfit as gf

warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
torch.manual_seed(0)
linear = torch.nn.Linear(16, 16)
a, b = (torch.randn(rows, 16, requires_grad=True) for rows in (3, 5))


def padded() -> torch.Tensor:
    nested = linear(torch.nested.as_nested_tensor([a.sin(), b.cos()]))
    return torch.nested.to_padded_tensor(F.gelu(nested) * nested, 0.0)


def gradients(result: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(result.sum(), [a, b, linear.weight])


plain = gradients(padded())
equal = 0
for limit in [*range(1000, 1800, 24), *range(1800, 8000, 100), 2**26]:
    try:
        with gf.CheckpointManager(limit / 2**20, auto_checkpoint=True, memory_threshold=1.0):
            result = padded()
        equal += all(map(torch.equal, gradients(result), plain))
    except gf.BudgetInfeasible:
        assert limit < 7000
print(equal)
