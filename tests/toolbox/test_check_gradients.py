"""`check_gradients`: finds what is wrong and says where; stays silent where nothing is."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf

ACTIVATIONS = [
    nn.ELU(), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Hardswish(), nn.LeakyReLU(),
    nn.LogSigmoid(), nn.ReLU(), nn.ReLU6(), nn.RReLU(), nn.SELU(), nn.CELU(), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.Sigmoid(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Softshrink(),
    nn.Softsign(), nn.Tanh(), nn.Tanhshrink(), nn.Threshold(0.1, 0.5), nn.GLU(), nn.Softmin(-1),
    nn.Softmax(-1), nn.LogSoftmax(-1), nn.Dropout(0.5),
]  # fmt: skip


def _inputs(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 0.3 + 3 * torch.rand((), generator=generator)
    return (torch.randn(2, 6, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_passes(activation: nn.Module, dtype: torch.dtype) -> None:
    for seed in range(4):
        assert gf.check_gradients(activation, _inputs(seed, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_no_false_alarm_over_200_seeds(activation: nn.Module, dtype: torch.dtype) -> None:
    unresolved = 0
    for seed in range(200):
        unresolved += gf.check_gradients(activation, _inputs(seed, dtype)).unresolved
    assert unresolved <= 24  # of 2400 elements: silence must not come from looking away


def test_no_false_alarm_in_float32_over_200_seeds_of_a_small_network() -> None:
    for seed in range(200):
        torch.manual_seed(seed)
        a, b = torch.randn(2, 3), torch.randn(3, 2)
        assert gf.check_gradients(
            lambda a, b: torch.softmax((a @ b).relu() + a.sum(), -1).log(), a, b
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finds_an_error_planted_in_one_element(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for seed in range(25):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
        row, column = rng.randrange(3), rng.randrange(4)
        size = rng.choice([0.02, -0.02, 0.5, -2.0])

        def backward(g: Tensor, x: Tensor, row=row, column=column, size=size) -> Tensor:
            gradient = g * (1 - x.tanh() ** 2)
            gradient[row, column] += size * g[row, column]
            return gradient

        wrong = gf.custom_op(lambda x: x.tanh(), backward, name="planted")
        with pytest.raises(
            gf.GradientMismatch, match=rf"planted: 1 of 12 .*input 0, element \({row}, {column}\)"
        ) as caught:
            gf.check_gradients(wrong, x)
        report: Any = caught.value.report
        assert not report
        assert [w.index for w in report.wrong] == [(row, column)]
        # the weight is between 0.5 and 1.5
        assert report.worst.error == pytest.approx(abs(size) * 1.0, rel=0.6)


def test_says_which_input() -> None:
    op = gf.custom_op(lambda a, b: a * b, lambda g, a, b: (g * b, g * a * 1.01))
    with pytest.raises(gf.GradientMismatch, match="input 1, element"):
        gf.check_gradients(op, torch.randn(3), torch.randn(3))


def test_finds_a_missing_gradient_and_a_wrong_sign() -> None:
    with pytest.raises(gf.GradientMismatch, match="input 1"):
        gf.check_gradients(
            gf.custom_op(lambda a, b: a * b, lambda g, a, b: (g * b, None)),
            torch.ones(2),
            torch.ones(2),
        )
    with pytest.raises(gf.GradientMismatch):
        gf.check_gradients(gf.custom_op(lambda x: x.cos(), lambda g, x: g * x.sin()), torch.ones(2))
    with pytest.raises(gf.GradientMismatch):
        gf.check_gradients(lambda x: x * x.detach(), torch.ones(2, dtype=torch.float64))


def test_nan_in_the_backward_is_wrong() -> None:
    op = gf.custom_op(lambda x: x * 2, lambda g, x: g * math.nan)
    with pytest.raises(gf.GradientMismatch, match="backward gives nan"):
        gf.check_gradients(op, torch.ones(2))


@pytest.mark.parametrize("eps", [None, 1e-2, 1e-4])
def test_steps_of_ones_own(eps: float | None) -> None:
    assert gf.check_gradients(torch.exp, torch.randn(4), eps=eps)
    with pytest.raises(gf.GradientMismatch):
        gf.check_gradients(
            gf.custom_op(torch.exp, lambda g, x: g * x.exp() * 1.2), torch.randn(4), eps=eps
        )


def test_report_tells_the_worst_even_when_all_is_well() -> None:
    report = gf.check_gradients(torch.sin, torch.randn(5, dtype=torch.float64))
    assert (report.elements, report.unresolved, report.wrong) == (5, 0, ())
    assert report.worst.error < 1e-6
    assert "all elements agree; 0 unresolved. Worst: input 0, element" in str(report)


def test_at_a_kink_any_slope_between_is_accepted_and_said() -> None:
    report = gf.check_gradients(torch.relu, torch.zeros(3))
    assert report
    assert report.unresolved == 3
    assert gf.check_gradients(nn.LeakyReLU(), torch.tensor([0.0, 1.0, -2.0])).unresolved == 1
    with pytest.raises(gf.GradientMismatch):
        gf.check_gradients(gf.custom_op(torch.relu, lambda g, x: g * 3), torch.zeros(3))


def test_random_functions_draw_the_same_numbers_and_leave_the_generator() -> None:
    x = torch.randn(4)
    before = torch.get_rng_state()
    assert gf.check_gradients(lambda x: nn.functional.dropout(x, 0.5) * torch.rand(4), x)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_are_not_changed_and_may_be_worked_on_in_place() -> None:
    x = torch.randn(2, 3).t()  # not contiguous
    before = x.clone()
    assert gf.check_gradients(lambda x: x.mul_(2).sin(), x)
    assert torch.equal(x, before)
    assert not x.requires_grad


def test_only_what_requires_a_gradient_is_checked() -> None:
    x, fixed = torch.randn(3, requires_grad=True), torch.randn(3)
    report = gf.check_gradients(lambda x, fixed, n: x * fixed.detach() ** n, x, fixed, 2)
    assert report.elements == 3
    assert (
        gf.check_gradients(lambda i, x: x[i], torch.tensor([0, 0, 2]), torch.randn(3)).elements == 3
    )


def test_modules_scalars_tuples_and_domains() -> None:
    assert gf.check_gradients(nn.Linear(3, 2), torch.randn(4, 3))
    assert gf.check_gradients(lambda x: (x.sum(), x.prod(), x.argmax()), torch.rand(4) + 0.5)
    assert gf.check_gradients(torch.log, torch.tensor([1e-3, 1.0, 1e3]))
    assert gf.check_gradients(torch.sqrt, torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64))
    assert gf.check_gradients(lambda x: x, torch.tensor(2.0))
    assert gf.check_gradients(torch.tanh, torch.randn(4).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gf.check_gradients(torch.sin), "no floating-point tensor"),
        (
            lambda: gf.check_gradients(torch.sin, torch.ones(2, dtype=torch.int64)),
            "no floating-point tensor",
        ),
        (
            lambda: gf.check_gradients(
                torch.sin, torch.ones(1, dtype=torch.complex64, requires_grad=True)
            ),
            "complex64",
        ),
        (lambda: gf.check_gradients(torch.sin, torch.ones(2), eps=0.0), "eps=0.0"),
        (lambda: gf.check_gradients(lambda x: x.tolist(), torch.ones(2)), "returned a float"),
        (lambda: gf.check_gradients(torch.Tensor.detach, torch.ones(2)), "no graph"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(gf.MisuseError, match=message):
        call()


def test_a_function_that_is_not_finite_is_told() -> None:
    with pytest.raises(gf.NonFiniteGradient, match="fn itself gives NaN or Inf"):
        gf.check_gradients(torch.log, torch.tensor([-1.0]))
