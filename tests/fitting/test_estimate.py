"""`estimate` against what a real step takes, and the table of machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf
from gradfit.machines import MACHINES, find_machine


def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64)
    ), torch.randn(128, 64)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 144, 8),
    ]
    return nn.Sequential(*layers), torch.randn(32, 3, 16, 16)


def attention() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(16, 24, 64)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("make", [perceptron, convolutions, attention])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_peak_is_that_of_a_plain_step(
    make: Callable[[], tuple[nn.Module, Tensor]], kind: type
) -> None:
    model, x = make()
    optimizer = kind(model.parameters(), lr=0.1)
    found = gf.estimate(model, loss_fn, x, optimizer, hardware="t4")
    for _ in range(2):  # the first makes the optimizer's state
        optimizer.zero_grad()
        with gf.meter(model, optimizer, x) as live:
            loss = loss_fn(model, x)
            loss.backward()
            del loss
            optimizer.step()
    assert found.peak_bytes == pytest.approx(live.peak_bytes, rel=0.01)
    assert sum(found.parts.values()) == found.peak_bytes
    assert found.fits
    assert gf.Estimate.from_json(found.to_json()) == found
    assert str(found).startswith("A batch of")


def test_nothing_is_run_and_nothing_changes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(60_000, 60_000), nn.ReLU(), nn.Linear(60_000, 10))
    x = torch.empty(4, 60_000, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    found = gf.estimate(model, loss_fn, x, optimizer, hardware="h100-80gb")
    assert not found.fits or found.peak_bytes > 40 << 30
    assert not optimizer.state
    assert all("foreach" in group and group["foreach"] is None for group in optimizer.param_groups)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_levers_say_what_fits() -> None:
    model, x = perceptron()
    memory = gf.estimate(model, loss_fn, x, hardware="t4").peak_bytes * 3 // 4
    found = gf.estimate(model, loss_fn, x, hardware=gf.Hardware(memory))
    assert not found.fits
    assert any(lever.fits for lever in found.levers)
    for lever in found.levers:
        assert lever.fits == (lever.peak_bytes <= memory)
    cut = next(lever for lever in found.levers if lever.name.startswith("micro-batches of"))
    step = gf.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, x, memory="1 GiB",
                  micro_batch=int(cut.name.split()[-1]))  # fmt: skip
    assert step.plan.peak_bytes <= memory


def test_every_machine_can_be_named() -> None:
    assert len(MACHINES) >= 30
    for name, machine in MACHINES.items():
        half, full = find_machine(name.upper(), torch.float16), find_machine(name, torch.float32)
        assert half.flops >= full.flops >= 1e12
        assert half.memory == machine.gib << 30
        assert 1e11 < half.bandwidth < 1e13


def test_another_name_is_refused_with_near_ones() -> None:
    with pytest.raises(gf.InvalidParameter, match="near it are a100-80gb"):
        find_machine("a100-8gb", torch.float32)
