"""The toolbox and `GradientAccumulator` say the same: sums, clipping, scaling."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradfit as gf


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _batches(sizes: list[int], seed: int) -> list[Tensor]:
    return [
        torch.randn(n, 4, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)
        for n in sizes
    ]


def _loss(model: nn.Module, micro: Tensor) -> Tensor:
    return model(micro).square().mean(dim=1).mean()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 10**6))
def test_map_accumulation_equals_the_accumulators(sizes: list[int], seed: int) -> None:
    model = _model()
    accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=len(sizes))
    total, weight = gf.GradientMap(), sum(sizes)
    for micro in _batches(sizes, seed):
        total.add_(gf.backward(_loss(model, micro), model), alpha=len(micro) / weight)
        accumulator.backward(_loss(model, micro), weight=len(micro))
    found: dict[int, Tensor] = {}
    accumulator.apply_gradients(lambda p: found.update({id(p): p.grad.clone()}))
    for name, p in model.named_parameters():
        torch.testing.assert_close(total[name], found[id(p)], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "arguments",
    [{"max_norm": 0.01}, {"max_value": 0.002}, {"max_norm": 0.01, "per_parameter": True}],
)
def test_a_clipper_in_the_accumulator_clips_the_window_once(arguments) -> None:
    clipper = gf.GradientClipper(**arguments)
    model, sizes = _model(), [3, 1, 4]
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = gf.GradientAccumulator(optimizer, steps=3, clip=clipper)
    total = gf.GradientMap()
    for micro in _batches(sizes, 0):
        accumulator.backward(_loss(model, micro), weight=len(micro))
        result = accumulator.step()
        total.add_(gf.backward(_loss(reference, micro), reference), alpha=len(micro) / sum(sizes))
    assert result.stepped
    assert result.grad_norm == pytest.approx(clipper.clip_grads(total).item())
    total.assign()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_either_scaler_in_the_accumulator_gives_the_same_run() -> None:
    runs = []
    for make in (gf.LossScaler, lambda **kw: torch.amp.GradScaler("cpu", **kw)):
        model = _model()
        scaler = make(init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = gf.GradientAccumulator(
            optimizer, steps=2, scaler=scaler, clip=0.5, on_nonfinite="skip"
        )
        scales, stepped = [], []
        for index, micro in enumerate(_batches([3, 2, 1, 4, 2, 2, 3, 3], 0)):
            loss = _loss(model, micro) * (float("inf") if index == 3 else 1.0)
            accumulator.backward(loss, weight=len(micro))
            result = accumulator.step()
            stepped.append(bool(result))
            scales.append(scaler.get_scale())
        runs.append((scales, stepped, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][1] == [False, True, False, False, False, True, False, True]
    for p, q in zip(runs[0][2], runs[1][2], strict=True):
        assert torch.equal(p, q)
