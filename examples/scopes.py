"""Scopes around any code: nested, selective, marked, and what they save."""

import torch
from torch import nn

import gradfit as gf

torch.manual_seed(0)
blocks = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)])
x = torch.randn(8, 64, 64)


def gradients(scoped: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(1)  # the same dropout masks
    with gf.meter() as meter:
        h = x
        for number, block in enumerate(blocks):
            with gf.CheckpointScope(f"block {number}", enabled=scoped):
                h = block(h)
        found = torch.autograd.grad(h.square().mean(), list(blocks.parameters()))
    return torch.cat([g.flatten() for g in found]), meter.peak_bytes


plain, plain_peak = gradients(scoped=False)
ours, peak = gradients(scoped=True)
print(
    f"peak {plain_peak / 2**20:.1f} -> {peak / 2**20:.1f} MiB, gradients bit-identical:"
    f" {torch.equal(plain, ours)}"
)

with gf.CheckpointScope(
    "selective", keep=lambda op, output: op is torch.ops.aten.addmm.default
) as scope:
    h = gf.mark_checkpoint(blocks[0](x))
    loss = blocks[1](h).square().mean()
print(f"keeping matrix products: {scope.stats}")
loss.backward()
