"""An accumulator for what accelerate has prepared."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import gradfit as gf
from gradfit.integrations.accelerate import accumulator


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def test_unequal_micro_batches_are_the_full_batch() -> None:
    accelerator = Accelerator(cpu=True)
    inner = network()
    reference = copy.deepcopy(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, prepared, prepared_scheduler = accelerator.prepare(inner, optimizer, scheduler)
    acc = accumulator(accelerator, prepared, steps=3, clip=0.5)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for number in range(5):
        parts = [
            torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (1, 7, 3)
        ]
        for part in parts:
            acc.backward(model(part).square().mean(), weight=len(part))
            result = acc.step()
        assert result.stepped
        prepared_scheduler.step()
        plain.zero_grad()
        reference(torch.cat(parts)).square().mean().backward()
        norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
        for parameter in reference.parameters():
            parameter.grad *= min(1.0, 0.5 / norm.item())
        plain.step()
        for group in plain.param_groups:
            group["lr"] = 0.01 * 0.5 ** ((number + 1) // 2)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_an_accelerator_that_accumulates_itself_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = network()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(gf.MisuseError, match="gradient_accumulation_steps=4"):
        accumulator(accelerator, optimizer)
    with pytest.raises(gf.MisuseError, match="scaler="):
        accumulator(Accelerator(cpu=True), optimizer, scaler=torch.amp.GradScaler("cpu"))


def test_the_accelerators_scaler_is_used() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    inner = network()
    reference = copy.deepcopy(inner)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    acc = accumulator(accelerator, optimizer, steps=2)
    rows = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for part in (rows[:4], rows[4:]):
        acc.backward(model(part).square().mean(), weight=len(part))
        result = acc.step()
    assert result.stepped
    reference(rows).square().mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12
    for part in (rows[:4], rows[4:] * float("inf")):
        acc.backward(model(part).square().mean(), weight=len(part))
        result = acc.step()
    assert not result.stepped
    assert accelerator.scaler.get_scale() == 2.0**11
