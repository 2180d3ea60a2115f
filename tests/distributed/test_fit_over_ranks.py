"""`fit` on several ranks: each holds its own budget, with unequal batches, and the update is that
of all rows.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from distributed_jobs import Net, full, largest_difference, wrap
from distributed_pool import Pool

import gradfit as gf
from gradfit.distributed.replicas import replicate


def fitted(rank: int, size: int, how: str, memory: str) -> Any:
    torch.manual_seed(0)
    inner = Net(4, 64).double()
    reference = copy.deepcopy(inner)
    model = replicate(inner) if how == "replicas" else wrap(inner, how, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alone = torch.optim.AdamW(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randn(192 + 64 * r, 4, generator=generator, dtype=torch.float64) for r in range(size)
    ]

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    step = gf.fit(model, optimizer, loss, data[rank], memory=memory)
    peaks = []
    for _ in range(3):
        with gf.meter(model, optimizer, data[rank]) as live:
            result = step(data[rank])
        peaks.append(max(result.peak_bytes, live.peak_bytes))
        alone.zero_grad()
        expected = loss(reference, torch.cat(data))
        expected.backward()
        alone.step()
    return {
        "difference": largest_difference(model, reference),
        "peak": max(peaks),
        "budget": step.budget_bytes,
        "loss": abs(result.loss - expected.item()),
        "tight": step.plan.actions.count("rebuild") + step.plan.steps - 1,
        "unchanged": [full(p).sum().item() for p in model.parameters()],
    }


@pytest.mark.parametrize("how", ["ddp", "fsdp", "replicas"])
def test_every_rank_holds_its_budget(pair: Pool, how: str) -> None:
    answers = pair.run(fitted, how, "3 MiB" if how == "fsdp" else "4 MiB")
    for answer in answers:
        assert answer["difference"] < 1e-10
        assert answer["loss"] < 1e-12
        assert answer["peak"] <= answer["budget"]
    assert answers[0]["unchanged"] == answers[1]["unchanged"]
    # the budget is too small for one piece with all kept
    assert all(answer["tight"] for answer in answers)


def planned(rank: int, size: int) -> Any:
    """A plan made by hand for an FSDP2 model, followed: bit for bit what the run that keeps
    everything gives.
    """
    torch.manual_seed(0)
    model = wrap(Net(4, 16).double(), "fsdp", size)
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    gradients = []
    for recompute in (False, True):
        with gf.CheckpointScope("all", enabled=recompute) as scope:
            value = loss(model, rows)
        value.backward()
        gradients.append([full(p.grad) for p in model.parameters()])
        model.zero_grad()
    same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return same, scope.stats.freed_bytes


def test_a_scope_over_sharded_units_is_bit_identical(pair: Pool) -> None:
    for same, freed in pair.run(planned):
        assert same
        assert freed > 0


def too_small(rank: int, size: int) -> Any:
    model = wrap(Net(4, 64).double(), "ddp", size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(gf.BudgetInfeasible) as caught:
        gf.fit(
            model,
            optimizer,
            lambda m, x: m(x).square().mean(),
            torch.ones(8, 4).double(),
            memory="100 KiB",
        )
    return str(caught.value)


def test_buckets_count(pair: Pool) -> None:
    for text in pair.run(too_small):
        assert "communication buckets" in text
