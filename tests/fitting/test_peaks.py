"""The peak that a step's plan names is the peak that is measured, wherever in the step it is."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from sampling import sampled
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from train_models import OPTIMIZERS, make, plain_peak

import gradfit as gf
from gradfit.profiling import measure

STEADY = ("gpt2", "bert", "t5", "vit", "resnet")


@pytest.mark.parametrize("share", [0.7, 4.0])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    sampled(
        itertools.product(STEADY, OPTIMIZERS),
        lambda pair: (pair[1] == "adamw") == (pair[0] != "bert"),
    ),
)
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


@pytest.mark.filterwarnings("ignore::gradfit.ExactnessWarning")  # what the norms write is read
def test_few_large_values_between_many_small_ones_hold_the_budget_while_fitting() -> None:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [parametrizations.spectral_norm(nn.Linear(40, 40)), nn.GELU(), nn.Dropout(0.2)]
    model, batch = nn.Sequential(*layers), torch.randn(3, 64, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, optimizer, square, batch, memory="10 KiB", exact=False)
    least = refused.value.min_bytes
    with gf.meter(model, optimizer, batch) as live:
        step = gf.fit(model, optimizer, square, batch, memory=least, exact=False)
        step(batch)
    assert live.peak_bytes <= refused.value.min_bytes


def wide(rows: int = 128) -> tuple[nn.Module, torch.Tensor]:
    """Where parameters are large and rows are small."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(rows, 256)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def looking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The data decide, so that shapes tell nothing."""
    result = model(batch)
    return result.square().mean() * (2.0 if result.sum().item() > 0 else 1.0)


def test_what_plain_needs_is_enough_where_only_one_row_can_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_had_room", lambda *_: False)  # else two are
    model, batch = wide()
    with gf.meter(model, batch) as live:
        square(model, batch).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = live.peak_bytes + 4096  # a few numbers of the accumulator's
    with gf.meter(model, optimizer, batch) as live:
        step = gf.fit(model, optimizer, square, batch, memory=budget)
        assert step.profile.batch_size == 1  # there was no room to see what grows
        step(batch)
    assert step.plan.steps == 1
    assert step.plan.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)
    assert live.peak_bytes <= budget


def test_where_shapes_tell_nothing_everything_is_taken_to_grow() -> None:
    model, batch = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, optimizer, looking, batch, memory="10 KiB")
    with gf.meter(model, optimizer, batch) as live:
        step = gf.fit(model, optimizer, looking, batch, memory=refused.value.min_bytes)
        step(batch)
    assert live.peak_bytes <= refused.value.min_bytes


def test_a_meter_counts_fake_tensors_only_if_it_is_about_them() -> None:
    fake = FakeTensorMode()
    with gf.meter() as about_real, fake:
        first = torch.zeros(1000)
    with fake, gf.meter() as inside:
        second = torch.zeros(1000)
    with gf.meter(first, second) as about_fakes:
        third = first + second
    assert about_real.peak_bytes == 0
    assert inside.peak_bytes == 4000
    assert about_fakes.peak_bytes == 12000
    assert third.shape == (1000,)
