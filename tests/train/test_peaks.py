"""The peak that a step's plan names is the peak that is measured, wherever in the step it is."""

from __future__ import annotations

import warnings

import pytest
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
