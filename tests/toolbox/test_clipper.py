"""`GradientClipper` against torch's own clipping, and at the edges where that is silent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradfit as gf


def _model(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    (model(torch.randn(6, 3, dtype=torch.float64)).square().mean() * scale).backward()
    return model


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]


@settings(deadline=None, max_examples=30)
@given(st.floats(0.01, 100), st.floats(0.1, 100))
def test_norm_like_torch(bound: float, scale: float) -> None:
    model, reference = _model(scale), _model(scale)
    norm = gf.GradientClipper(bound).clip_grads(model)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), bound)
    torch.testing.assert_close(norm, expected)
    # torch adds 1e-6 to the norm
    torch.testing.assert_close(_grads(model), _grads(reference), rtol=1e-4, atol=0)
    assert gf.GradientMap.from_grads(model).norm() <= bound * (1 + 1e-12)


def test_below_the_bound_nothing_changes_by_a_bit() -> None:
    model, reference = _model(), _model()
    gf.GradientClipper(1e6).clip_grads(model)
    assert all(torch.equal(a, b) for a, b in zip(_grads(model), _grads(reference), strict=True))


@settings(deadline=None, max_examples=20)
@given(st.floats(0.001, 1))
def test_value_like_torch(bound: float) -> None:
    model, reference = _model(), _model()
    gf.GradientClipper(max_value=bound).clip_grads(model)
    nn.utils.clip_grad_value_(reference.parameters(), bound)
    assert all(torch.equal(a, b) for a, b in zip(_grads(model), _grads(reference), strict=True))


def test_per_parameter_silences_only_the_loud() -> None:
    grads = gf.GradientMap({"loud": torch.tensor([30.0, 40.0]), "quiet": torch.tensor([0.3])})
    norm = gf.GradientClipper(1.0, per_parameter=True).clip_grads(grads)
    assert norm.item() == pytest.approx(math.hypot(50.0, 0.3))
    torch.testing.assert_close(grads["loud"], torch.tensor([0.6, 0.8]))
    assert torch.equal(grads["quiet"], torch.tensor([0.3]))


def test_values_first_then_norm() -> None:
    grads = gf.GradientMap({"w": torch.tensor([100.0, 1.0])})
    assert gf.GradientClipper(1.0, max_value=1.0).clip_grads(grads).item() == pytest.approx(
        math.hypot(100, 1)
    )
    torch.testing.assert_close(grads["w"], torch.full((2,), 0.5**0.5))


@pytest.mark.parametrize("kind", ["map", "model", "list", "generator", "mapping", "tensor"])
def test_every_form_clips_in_place(kind: str) -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    source = {
        "map": gf.GradientMap.from_grads(layer),
        "model": layer,
        "list": list(layer.parameters()),
        "generator": layer.parameters(),
        "mapping": dict(layer.named_parameters()),
        "tensor": layer.weight,
    }[kind]
    assert gf.GradientClipper(1.0).clip_grads(source).item() == 5.0
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize(
    "arguments", [{"max_norm": 1.0}, {"max_value": 0.5}, {"max_norm": 0.3, "per_parameter": True}]
)
def test_scaled_gradients_are_clipped_as_if_unscaled(arguments) -> None:
    scale = 1024.0
    plain, scaled = _model(), _model(scale)
    clipper = gf.GradientClipper(**arguments)
    torch.testing.assert_close(clipper.clip_grads(plain), clipper.clip_grads(scaled, scale=scale))
    for a, b in zip(_grads(plain), _grads(scaled), strict=True):
        torch.testing.assert_close(a, b / scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("arguments", [{"max_norm": 1.0}, {"max_value": 1.0}])
def test_nonfinite_names_the_parameter_and_changes_nothing(bad: float, arguments) -> None:
    model = _model()
    model[2].weight.grad[0, 1] = bad
    before = [g.clone() for g in _grads(model)]
    with pytest.raises(gf.NonFiniteGradient, match=r"1 of 4 gradients are not finite: '2\.weight'"):
        gf.GradientClipper(**arguments).clip_grads(model)
    for now, then in zip(_grads(model), before, strict=True):
        torch.testing.assert_close(now, then, equal_nan=True, rtol=0, atol=0)


def test_finite_gradients_whose_norm_overflows_are_told_and_left_alone() -> None:
    grads = gf.GradientMap({"w": torch.full((4,), 3e38)})
    assert grads.norm().isinf()
    with pytest.raises(gf.NonFiniteGradient, match=r"norm .* overflows"):
        gf.GradientClipper(1.0).clip_grads(grads)
    assert torch.equal(grads["w"], torch.full((4,), 3e38))


def test_nothing_to_clip() -> None:
    assert gf.GradientClipper(1.0).clip_grads(nn.Linear(2, 2)).item() == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gf.GradientClipper(), "has no bound"),
        (lambda: gf.GradientClipper(0.0), "max_norm=0.0"),
        (lambda: gf.GradientClipper(max_value=-1.0), "max_value=-1.0"),
        (lambda: gf.GradientClipper(math.nan), "max_norm=nan"),
        (lambda: gf.GradientClipper(max_value=1.0, per_parameter=True), "per_parameter"),
        (lambda: gf.GradientClipper(1.0).clip_grads(3), "grads=3 is a int"),
        (lambda: gf.GradientClipper(1.0).clip_grads(gf.GradientMap(), scale=0.0), "scale=0.0"),
    ],
)
def test_bad_arguments(make, message: str) -> None:
    with pytest.raises(gf.MisuseError, match=message):
        make()


def test_sparse() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().mul(10).backward()
    assert gf.GradientClipper(1.0).clip_grads(table).item() == pytest.approx(20 * 2**0.5)
    torch.testing.assert_close(table.weight.grad.to_dense().norm(), torch.tensor(1.0))
    with pytest.raises(gf.MisuseError, match="sparse gradient of 'weight'"):
        gf.GradientClipper(max_value=1.0).clip_grads(table)
    assert "max_norm=1.0" in repr(gf.GradientClipper(1.0))


def test_elements_of_complex_gradients_are_not_clipped() -> None:
    """torch refuses that, and after others had been clipped."""
    real, other = (
        torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.cfloat)
    )
    real.grad, other.grad = torch.full((2,), 3.0), torch.full((2,), 3j)
    with pytest.raises(gf.MisuseError, match=r"complex gradient of .* Pass max_norm only"):
        gf.GradientClipper(max_value=1.0).clip_grads([real, other])
    assert real.grad.tolist() == [3.0, 3.0]
