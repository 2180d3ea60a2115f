"""Every differentiation rule the toolbox promises, against its formula, with broadcasting, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradfit as gf


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made + made.sign() * 0.1).requires_grad_()  # away from zero: division, and ReLU's kink


def _backward(result: Tensor, grad_output: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The gradients for a chosen `grad_output`."""
    grads = gf.backward((result * grad_output).sum(), list(inputs))
    return [grads[tensor] for tensor in inputs]


def _reduced(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting: sum over the dimensions that were stretched."""
    gradient = (
        gradient.sum(dim=tuple(range(gradient.dim() - len(shape))))
        if gradient.dim() > len(shape)
        else gradient
    )
    stretched = tuple(at for at, size in enumerate(shape) if size == 1 and gradient.shape[at] != 1)
    return gradient.sum(dim=stretched, keepdim=True) if stretched else gradient


@st.composite
def broadcastable(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    shapes = []
    for _ in range(2):
        kept = [draw(st.sampled_from([size, 1])) for size in full]
        shapes.append(tuple(kept[draw(st.integers(0, len(full))) :]))
    return shapes[0], shapes[1]


Pair = Callable[[Tensor, Tensor], Tensor]
Formula = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
BINARY: dict[str, tuple[Pair, Formula]] = {
    "add": (torch.add, lambda g, a, b: (g, g)),
    "sub": (torch.sub, lambda g, a, b: (g, -g)),
    "mul": (torch.mul, lambda g, a, b: (g * b, g * a)),
    "div": (torch.div, lambda g, a, b: (g / b, -g * a / b**2)),
}


@pytest.mark.parametrize("name", BINARY)
@settings(deadline=None, max_examples=40)
@given(shapes=broadcastable(), seed=st.integers(0, 10**6))
def test_elementwise(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], seed: int) -> None:
    function, formula = BINARY[name]
    a, b = _draw(shapes[0], seed), _draw(shapes[1], seed + 1)
    result = function(a, b)
    grad_output = _draw(tuple(result.shape), seed + 2).detach()
    expected = formula(grad_output, a.detach(), b.detach())
    for found, rule, tensor in zip(
        _backward(result, grad_output, a, b), expected, (a, b), strict=True
    ):
        torch.testing.assert_close(found, _reduced(rule, tensor.shape))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 10**6),
)
def test_matmul(n: int, k: int, m: int, batch: int, seed: int) -> None:
    a = _draw((batch, n, k) if batch else (n, k), seed)
    b = _draw((k, m), seed + 1)  # broadcast over the batch
    c = a.matmul(b)
    grad_c = _draw(tuple(c.shape), seed + 2).detach()
    grad_a, grad_b = _backward(c, grad_c, a, b)
    torch.testing.assert_close(grad_a, grad_c @ b.detach().T)
    torch.testing.assert_close(grad_b, _reduced(a.detach().transpose(-1, -2) @ grad_c, b.shape))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_transpose(n: int, m: int, seed: int) -> None:
    a = _draw((n, m), seed)
    grad_output = _draw((m, n), seed + 1).detach()
    (grad,) = _backward(a.t(), grad_output, a)
    assert torch.equal(grad, grad_output.t())


UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu, lambda g, x: g * (x > 0)),
    "sigmoid": (torch.sigmoid, lambda g, x: g * torch.sigmoid(x) * (1 - torch.sigmoid(x))),
    "tanh": (torch.tanh, lambda g, x: g * (1 - torch.tanh(x) ** 2)),
}


@pytest.mark.parametrize("name", UNARY)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 10**6))
def test_activations(name: str, shape: tuple[int, ...], seed: int) -> None:
    function, formula = UNARY[name]
    x = _draw(shape, seed)
    grad_output = _draw(shape, seed + 1).detach()
    (grad,) = _backward(function(x), grad_output, x)
    torch.testing.assert_close(grad, formula(grad_output, x.detach()))


def test_relu_is_flat_at_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert torch.equal(gf.backward(torch.relu(x).sum())[x], torch.zeros(3))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.floats(-3, 3), st.integers(0, 10**6))
def test_sum_and_mean_of_everything(shape: tuple[int, ...], grad_output: float, seed: int) -> None:
    x = _draw(shape, seed)
    (grad,) = _backward(x.sum(), torch.tensor(grad_output, dtype=torch.float64), x)
    assert torch.equal(grad, torch.full_like(x, grad_output))
    (grad,) = _backward(x.mean(), torch.tensor(grad_output, dtype=torch.float64), x)
    torch.testing.assert_close(grad, torch.full_like(x, grad_output / x.numel()))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.data(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_sum_along_a_dimension(
    shape: tuple[int, ...], data: st.DataObject, keepdim: bool, seed: int
) -> None:
    x = _draw(shape, seed)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    y = x.sum(dim, keepdim=keepdim)
    grad_output = _draw(tuple(y.shape), seed + 1).detach()
    (grad,) = _backward(y, grad_output, x)
    assert torch.equal(grad, (grad_output if keepdim else grad_output.unsqueeze(dim)).expand(shape))
