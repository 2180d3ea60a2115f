"""A custom operation: its gradient, its second derivative, and what a wrong backward is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradfit as gf


def test_seed_example_with_a_list_of_inputs() -> None:
    op = gf.custom_op(
        forward=lambda inputs: inputs[0] * 2.0,
        backward=lambda grad_output, inputs: [grad_output * 2.0],
    )
    x = torch.randn(3, requires_grad=True)
    y = op(x)
    assert torch.equal(y, x * 2)
    assert torch.equal(gf.backward(y.sum())[x], torch.full((3,), 2.0))


def test_several_inputs_one_by_one_and_as_a_list() -> None:
    apart = gf.custom_op(lambda a, b: a * b, lambda g, a, b: (g * b, g * a))
    together = gf.custom_op(
        lambda inputs: inputs[0] * inputs[1], lambda g, inputs: [g * inputs[1], g * inputs[0]]
    )
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for op in (apart, together):
        grads = gf.backward(op(a, b).sum())
        assert torch.equal(grads[a], b)
        assert torch.equal(grads[b], a)


def test_star_arguments_are_one_by_one() -> None:
    op = gf.custom_op(lambda *inputs: inputs[0] + inputs[1], lambda g, *inputs: [g] * len(inputs))
    a, b = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    assert gf.check_gradients(op, a, b)


def test_a_gradient_of_ones_own_is_used_and_not_autograds() -> None:
    def sign(x: Tensor) -> Tensor:
        return x.sign()

    straight_through = gf.custom_op(sign, lambda g, x: g)
    x = torch.randn(4, requires_grad=True)
    y = straight_through(x)
    assert torch.equal(gf.backward(y.sum())[x], torch.ones(4))
    assert gf.AutogradContext.graph(y.sum())[0].op == "sign"
    assert repr(straight_through) == "CustomOp(sign)"


def test_differentiable_twice_where_its_backward_is() -> None:
    cube = gf.custom_op(lambda x: x**3, lambda g, x: g * 3 * x**2)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    first = gf.backward(cube(x).sum(), [x], create_graph=True)
    second = gf.backward(first[x].sum(), [x])
    torch.testing.assert_close(second[x], 6 * x.detach())
    assert torch.autograd.gradgradcheck(cube, (x,))


def test_none_means_no_gradient() -> None:
    op = gf.custom_op(lambda x, mask: x * mask, lambda g, x, mask: (g * mask, None))
    x, mask = torch.randn(3, requires_grad=True), torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(gf.backward(op(x, mask).sum())[x], mask)


def test_under_no_grad_and_vmap() -> None:
    op = gf.custom_op(lambda x: x.sin(), lambda g, x: g * x.cos())
    x = torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        assert not op(x).requires_grad
    jacobian = torch.func.vmap(torch.func.grad(lambda row: op(row).sum()))(x.detach())
    torch.testing.assert_close(jacobian, x.detach().cos())


def test_inside_a_recomputed_scope() -> None:
    op = gf.custom_op(lambda x: x.exp(), lambda g, x: g * x.exp())
    x = torch.randn(6, requires_grad=True)
    plain = gf.backward(op(x * 2).square().sum())[x]
    with gf.CheckpointScope("custom"):
        y = op(x * 2).square().sum()
    assert torch.equal(gf.backward(y)[x], plain)


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (
            lambda g, a, b: g,
            r"product: backward returned 1 gradients, expected 2, one for each input",
        ),
        (lambda g, a, b: (g, g, g), r"product: backward returned 3 gradients, expected 2"),
        (
            lambda g, a, b: (g, g[:1]),
            r"product: backward returned shape \(1,\) for input 1, expected \(3,\)",
        ),
        (
            lambda g, a, b: (g, 1.0),
            r"product: backward returned a float for input 1, expected a tensor of shape \(3,\)",
        ),
    ],
)
def test_a_wrong_backward_is_named_with_what_was_expected(backward, message: str) -> None:
    op = gf.custom_op(lambda a, b: a * b, backward, name="product")
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    loss = op(a, b).sum()
    with pytest.raises(gf.MisuseError, match=message):
        loss.backward()
    with pytest.raises(gf.MisuseError, match=message):
        gf.check_gradients(op, a, b)


def test_other_mistakes() -> None:
    with pytest.raises(gf.MisuseError, match="backward=None is a NoneType"):
        gf.custom_op(lambda x: x, None)
    double = gf.custom_op(lambda x: x * 2, lambda g, x: g * 2, name="double")
    with pytest.raises(gf.MisuseError, match="double: input 0 is a float, expected a tensor"):
        double(1.0)
    with pytest.raises(gf.MisuseError, match="pair: forward returned a tuple, expected one tensor"):
        gf.custom_op(lambda x: (x, x), lambda g, x: g, name="pair")(
            torch.ones(2, requires_grad=True)
        )
