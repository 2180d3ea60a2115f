"""Many steps over many shapes: nothing piles up, and plans are bounded in number and bytes."""

from __future__ import annotations

import dataclasses
import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.fitting import families, sequences
from gradfit.fitting.families import MOST_PLANS, within_memory


class Net(nn.Module):
    """Does another thing for one batch of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return torch.sin(y) if float(x.sum()) > 0 else y


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.filterwarnings("ignore:Some micro-batches follow no plan")
@pytest.mark.parametrize(
    ("steps", "shapes"), [(80, 20), pytest.param(5000, 200, marks=pytest.mark.slow)]
)
def test_nothing_piles_up(steps: int, shapes: int) -> None:
    rng = random.Random(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = gf.fit(model, optimizer, loss_of, torch.randn(16, 40, 16), memory="512 KiB")
    sizes = [(rng.randint(2, 24), rng.randint(4, 80)) for _ in range(shapes)]

    def train(count: int) -> tuple[int, int]:
        for _ in range(count):
            rows, length = rng.choice(sizes)
            result = step(torch.randn(rows, length, 16))
            assert result.peak_bytes <= step.budget_bytes
        operations = sum(len(known.profile.operations) for known in step.known)
        return live_bytes(), operations

    train(steps // 2)
    before, operations = train(steps // 4)
    after, _ = train(steps // 4)
    assert after <= before + 64_000  # a batch and what is in a step's result
    assert len(step.known) <= MOST_PLANS
    assert operations <= families.MOST_OPERATIONS
    remembered = step._recovery._sequences
    for memory in (remembered._last, remembered._learnt, remembered.online):
        assert len(memory) <= sequences._MOST_SHAPES + 1


def plans(count: int) -> list[Any]:
    model = Net()
    step = gf.fit(model, torch.optim.SGD(model.parameters()), loss_of, torch.randn(4, 8, 16), None)
    (known,) = step.known
    return [
        dataclasses.replace(known, profile=dataclasses.replace(known.profile)) for _ in range(count)
    ]


def test_plans_are_bounded_in_number_and_those_that_are_used_stay() -> None:
    known = plans(MOST_PLANS + 5)
    last_used = {id(plan): number for number, plan in enumerate(known)}
    kept = within_memory(known, last_used)
    assert kept == known[-(MOST_PLANS - 1) :]
    assert all(one is other for one, other in zip(kept, known[6:], strict=True))


def test_plans_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = plans(6)
    operations = len(known[0].profile.operations)
    monkeypatch.setattr(families, "MOST_OPERATIONS", 3 * operations)
    assert len(within_memory(known, {})) == 3
    shared = [dataclasses.replace(known[0]) for _ in range(6)]  # which have one profile
    assert len(within_memory(shared, {})) == 6


def test_old_shapes_are_forgotten() -> None:
    memory = dict.fromkeys(range(sequences._MOST_SHAPES + 10), "")
    sequences._forget_oldest(memory)
    assert len(memory) == sequences._MOST_SHAPES
    assert min(memory) == 10
