"""`gf.checkpoint` in the place of `torch.utils.checkpoint.checkpoint`: BatchNorm is updated
once.
"""

import torch
import torch.utils.checkpoint
from torch import nn

import gradfit as gf

x = torch.randn(32, 16, requires_grad=True)
for name, checkpoint in (
    ("torch", lambda f, t: torch.utils.checkpoint.checkpoint(f, t, use_reentrant=False)),
    ("gradfit", gf.checkpoint),
):
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh()
    )
    checkpoint(block, x).sum().backward()
    print(
        f"{name:8} BatchNorm has seen {block[1].num_batches_tracked.item()} batch(es) after one"
        " step"
    )
