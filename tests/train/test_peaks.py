"""The peak that a step's plan names is the peak that is measured, wherever in the step it is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from train_models import OPTIMIZERS, make, plain_peak

import gradfit as gf

STEADY = ("gpt2", "bert", "t5", "vit", "resnet")


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STEADY)
def test_predicted_and_measured(name: str, optimizer: str, share: float) -> None:
    model, batch, loss_fn = make(name)
    updates = OPTIMIZERS[optimizer](model.parameters())
    budget = int(plain_peak(name, optimizer) * share)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gf.ExactnessWarning)
        try:
            step = gf.fit(model, updates, loss_fn, batch, memory=budget)
        except gf.BudgetInfeasible as error:
            step = gf.fit(model, updates, loss_fn, batch, memory=error.min_bytes)
            budget = error.min_bytes
    step(batch)
    with gf.meter(model, updates, batch) as live:
        result = step(batch)
    assert live.peak_bytes <= budget
    assert sum(step.plan.breakdown.values()) == step.plan.peak_bytes
    assert step.plan.peak_bytes == pytest.approx(live.peak_bytes, rel=0.05)
    assert result.peak_bytes == pytest.approx(live.peak_bytes, rel=0.05)


def test_few_large_values_between_many_small_ones_hold_the_budget_while_fitting() -> None:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [parametrizations.spectral_norm(nn.Linear(40, 40)), nn.GELU(), nn.Dropout(0.2)]
    model, batch = nn.Sequential(*layers), torch.randn(3, 64, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, optimizer, square, batch, memory="10 KiB")
    with gf.meter(model, optimizer, batch) as live:
        step = gf.fit(model, optimizer, square, batch, memory=refused.value.min_bytes)
        step(batch)
    assert live.peak_bytes <= refused.value.min_bytes
