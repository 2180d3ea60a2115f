"""What the tape does around FSDP2's units, which take their parameters' memory away and give it
back.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from distributed_jobs import Net, full, wrap
from distributed_pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradfit as gf
from gradfit.distributed.process_group import Group
from gradfit.fitting.fit import fit
from gradfit.recompute.evict import Online


class Twice(nn.Module):
    """One unit that is used several times in a forward, and so is gathered in the middle of a scope
    again and again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net(2, 7)
        self.back = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.back(self.inner(x)) + x
        return x * 1.0


def both(kind: str, frozen: bool, size: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    model: Any = Twice().double() if kind == "twice" else Net(2, 7).double()
    if frozen:
        for block in getattr(model, "inner", model).blocks:
            block.up.requires_grad_(False)
            block.norm.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    if kind == "twice":
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(model.inner, mesh=mesh)
        return fully_shard(model, mesh=mesh), reference
    return wrap(model, "fsdp", size), reference


def differences(rank: int, size: int, kind: str, frozen: bool, how: str) -> list[float]:
    """Three passes; the first ones of a model are where FSDP2 makes what it gathers into."""
    model, reference = both(kind, frozen, size)
    generator = torch.Generator().manual_seed(1)
    worst, evictions = [], 0
    for _ in range(3):
        x = torch.randn(32, 4, dtype=torch.float64, generator=generator)
        model.zero_grad()
        if how == "scope":
            with gf.CheckpointScope("all"):
                loss = model(x).square().mean()
            loss.backward()
        else:
            with Online(60_000 if kind == "twice" else 30_000) as online:
                online.evictor.watch(model)
                loss = model(x).square().mean()
                loss.backward()
            evictions += online.evictor.evictions
        reference.zero_grad()
        reference(x).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        worst.append(
            max((full(p.grad) - q.grad).abs().max().item() for p, q in pairs if q.grad is not None)
        )
    assert how == "scope" or evictions > 0
    return worst


@pytest.mark.parametrize("how", ["scope", "online"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["net", "twice"])
def test_gathering_again_changes_nothing(pair: Pool, kind: str, frozen: bool, how: str) -> None:
    for worst in pair.run(differences, kind, frozen, how):
        assert max(worst) < 1e-14


def attempts_with_known_plans(rank: int, size: int) -> list[int]:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = both("net", False, size)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    x = torch.randn(7, 32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    model, optimizer = made()
    with pytest.raises(gf.BudgetInfeasible) as caught:
        fit(model, optimizer, loss, x, memory=1)
    everybody = Group(torch.distributed.group.WORLD).exchange({"least": caught.value.min_bytes})
    least = max(one["least"] for one in everybody)
    model, optimizer = made()
    first = fit(model, optimizer, loss, x, memory=least)
    assert "rebuild" in first.plan.actions
    model, optimizer = made()
    step = fit(model, optimizer, loss, x, memory=least, known=first.known)
    return [step(x).attempts for _ in range(2)]


def test_known_plans_hold_in_a_models_first_pass(pair: Pool) -> None:
    assert pair.run(attempts_with_known_plans) == [[1, 1], [1, 1]]
