"""Hessian-vector products against the explicit Hessian, and second derivatives through recomputed
scopes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradfit as gf


def _network(seed: int) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.randn(5, 3, dtype=torch.float64)


def _curved(x: Tensor) -> Tensor:
    return (x.sin() * x.roll(1) ** 2).sum() + x.prod()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_equals_the_explicit_hessian(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2))
    hessian = torch.autograd.functional.hessian(_curved, x)
    torch.testing.assert_close(gf.hessian_vector_product(_curved, x, v), hessian @ v)
    leaf = x.clone().requires_grad_()
    loss = _curved(leaf)
    for _ in range(2):  # the graph is kept for the next vector
        torch.testing.assert_close(gf.hessian_vector_product(loss, leaf, v), hessian @ v)
    assert leaf.grad is None


def test_over_all_parameters_of_a_model() -> None:
    model, x = _network(0)
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def loss_of(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return (
            torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))
            .square()
            .mean()
        )

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    vector = torch.randn_like(flat)
    expected = torch.autograd.functional.hessian(loss_of, flat) @ vector
    by_name = {n: p.view(s) for n, p, s in zip(names, vector.split(sizes), shapes, strict=True)}
    loss = model(x).square().mean()
    found = gf.hessian_vector_product(loss, model, by_name)
    assert isinstance(found, gf.GradientMap)
    assert list(found) == names
    torch.testing.assert_close(torch.cat([found[name].flatten() for name in names]), expected)
    as_list = gf.hessian_vector_product(loss, list(model.parameters()), list(by_name.values()))
    torch.testing.assert_close(torch.cat([one.flatten() for one in as_list]), expected)


def test_a_linear_loss_has_no_curvature() -> None:
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(gf.hessian_vector_product((x * 2).sum(), x, torch.ones(3)), torch.zeros(3))
    y = torch.randn(3, requires_grad=True)
    a, b = gf.hessian_vector_product((x**2).sum() + y.sum(), [x, y], [torch.ones(3), torch.ones(3)])
    assert torch.equal(a, torch.full((3,), 2.0))
    assert torch.equal(b, torch.zeros(3))


@pytest.mark.parametrize("nested", [False, True])
def test_second_derivatives_through_a_recomputed_scope_are_bit_identical(nested: bool) -> None:
    model, x = _network(1)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def run(recomputed: bool) -> list[Tensor]:
        with gf.CheckpointScope("outer", enabled=recomputed) as outer:
            hidden = model[:2](x)
            with gf.CheckpointScope("inner", enabled=recomputed and nested):
                loss = model[2](hidden).square().mean()
        first = gf.backward(loss, model, create_graph=True)
        penalty = first.norm() ** 2
        second = gf.backward(penalty, model)
        if recomputed:
            assert outer.stats.freed_bytes > 0
        with gf.CheckpointScope("again", enabled=recomputed):
            loss = model(x).square().mean()
        product = gf.hessian_vector_product(loss, model, vector)
        return [*first.values(), *second.values(), *product.values()]

    plain, rebuilt = run(False), run(True)
    assert len(plain) == 12
    for a, b in zip(plain, rebuilt, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: gf.hessian_vector_product((x**2).sum(), x, torch.ones(4)),
            r"is \(4,\), expected shape \(3,\)",
        ),
        (
            lambda x: gf.hessian_vector_product((x**2).sum(), [x], []),
            "vector holds 0 tensors, inputs 1",
        ),
        (
            lambda x: gf.hessian_vector_product((x**2).sum(), {"x": x}, {"y": torch.ones(3)}),
            "no entry for 'x'",
        ),
        (
            lambda x: gf.hessian_vector_product(lambda x: x.sum(), {"x": x}, {"x": torch.ones(3)}),
            "inputs has names",
        ),
        (lambda x: gf.hessian_vector_product(x**2, x, torch.ones(3)), "expected one number"),
        (lambda x: gf.hessian_vector_product(x.detach().sum(), x, torch.ones(3)), "no graph"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(gf.MisuseError, match=message):
        call(torch.randn(3, requires_grad=True))
