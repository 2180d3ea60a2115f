"""How would a model of 8 billion parameters train on eight devices that are not here? A prediction
from shapes.
"""

import torch
from torch import nn

import gradfit as gf


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.silu(self.wide(self.norm(x))))


with torch.device("meta"):
    model = nn.Sequential(*(Block(8192) for _ in range(15))).to(torch.bfloat16)
print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters")

for devices in (1, 8):
    profile = gf.profile(
        model,
        lambda m, x: m(x).square().mean(),
        torch.zeros(1, 8192, 8192, dtype=torch.bfloat16, device="meta"),
        torch.optim.AdamW(model.parameters()),
        fake=True,
        hardware=gf.Hardware(memory="40 GiB", devices=devices, name=f"{devices} × 40 GiB"),
    )
    try:
        print(gf.plan(profile, memory="40 GiB", batch_size=8))
    except gf.BudgetInfeasible as error:
        print(f"{devices} × 40 GiB: {error}")
