"""Which steps are measured: the first two by a plan, larger batches, and those after which the
optimizer has more state than before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf

BATCH = {"x": torch.rand(8, 4), "y": torch.rand(8, 1)}


class TwoHeads(nn.Module):
    """The second head gets a gradient only where the batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = self.body(batch["x"]).tanh()
        return (self.second if "second" in batch else self.first)(hidden)


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch), batch["y"])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each step that is measured."""
    seen: list[int] = []
    meter_for = gf.TrainStep._meter_for

    def noted(step: Any, tested: Any) -> Any:
        seen.append(len(seen))
        return meter_for(step, tested)

    monkeypatch.setattr(gf.TrainStep, "_meter_for", noted)
    return seen


@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, torch.optim.SGD])
def test_a_parameter_that_never_has_a_gradient(optimizer_of: Any, measured: list[int]) -> None:
    model = TwoHeads()
    step = gf.fit(model, optimizer_of(model.parameters(), lr=0.1), loss_fn, BATCH, "64 MiB")
    for _ in range(5):
        step(BATCH)
    assert len(measured) <= 2
    assert step.known[0].seen


def test_a_state_that_comes_late_is_measured(measured: list[int]) -> None:
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, loss_fn, BATCH, "64 MiB")
    before = [step(BATCH) for _ in range(3)][-1].peak_bytes
    measured.clear()
    second = {**BATCH, "second": "yes"}  # of the same shape
    step(second)
    step(second)
    late = step(BATCH)
    assert len(measured) == 1  # the first step that begins with all that there is
    states = (optimizer.state[p] for p in model.second.parameters())
    tensors = (one for state in states for one in state.values())
    # Adam counts its steps on the host
    state = sum(one.nbytes for one in tensors if one.device == BATCH["x"].device)
    assert late.peak_bytes == before + 2 * state  # it is copied beside the update
