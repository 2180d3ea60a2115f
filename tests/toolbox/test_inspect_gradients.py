"""`inspect_gradients`: what is bad and what is missing, by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradfit as gf


def test_names_what_is_bad_and_what_is_missing() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1, bias=False), "c": nn.Linear(2, 1)}
    )
    model["c"].requires_grad_(False)
    model["a"](torch.tensor([[1.0, math.nan]])).sum().backward()
    report = gf.inspect_gradients(model)
    assert not report.is_finite
    assert report.nonfinite == ("a.weight",)
    assert report.missing == ("b.weight",)
    assert report.parameters["a.weight"].nan_count == 1
    text = str(report)
    assert "not finite: a.weight" in text
    assert "no gradient: b.weight" in text
    assert gf.GradientReport.from_json(report.to_json()) == report


def test_norms_agree_with_torch() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    model(torch.randn(4, 5)).square().sum().backward()
    report = gf.inspect_gradients(model)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert report.norm == pytest.approx(norm.item())
    for name, p in model.named_parameters():
        stats = report.parameters[name]
        assert stats.norm == pytest.approx(p.grad.norm().item())
        assert stats.mean == pytest.approx(p.grad.mean().item(), abs=1e-7)
        assert stats.std == pytest.approx(p.grad.std(correction=0).item(), rel=1e-5)
        assert (stats.min, stats.max) == (p.grad.min().item(), p.grad.max().item())


def test_histogram_counts_every_finite_element_once() -> None:
    values = torch.tensor(
        [0.0, 2.0**-50, 2.0**-24, -(2.0**-21), 1.0, 15.99, 16.0, 1e30, math.inf, math.nan]
    )
    histogram = gf.inspect_gradients(gf.GradientMap({"w": values})).histogram
    bins = dict(zip(histogram.exponents, histogram.counts, strict=False))
    assert histogram.zero_count == 1
    assert sum(histogram.counts) == 7
    assert (bins[-40], bins[-24], bins[0], bins[4], bins[16]) == (1, 2, 2, 1, 1)


def test_other_sources() -> None:
    w = torch.ones(2, requires_grad=True)
    (w * 3).sum().backward()
    assert list(gf.inspect_gradients([w]).parameters) == ["0"]
    assert list(gf.inspect_gradients({"w": w}).parameters) == ["w"]
    assert gf.inspect_gradients(gf.backward((w * 3).sum())).norm == pytest.approx(3 * 2**0.5)
    assert gf.inspect_gradients(nn.Linear(1, 1)).missing == ("weight", "bias")
    with pytest.raises(gf.MisuseError, match=r"source=1.0 is a float"):
        gf.inspect_gradients(1.0)


def test_a_gradient_without_values_is_refused() -> None:
    weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    weight.grad = torch.empty(2, device="meta")
    with pytest.raises(gf.MisuseError, match="on the meta device has no values"):
        gf.inspect_gradients([weight])
