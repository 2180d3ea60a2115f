"""A micro-batch comes in whole or not at all; loss scaling happens once, in the right order."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf


class Trap(torch.autograd.Function):
    """Raises in the backward pass, when later layers' gradients are already in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise ctx.error


def setup(**options: object) -> tuple[nn.Sequential, gf.GradientAccumulator]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    options = {"isolate": True, "steps": 4, **options}
    return model, gf.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options
    )


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), torch.OutOfMemoryError("too much"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("options", [{}, {"isolate": False, "dtype": torch.float64}])
def test_an_exception_leaves_the_window_untouched(
    error: BaseException, explicit: bool, options: dict
) -> None:
    model, acc = setup(**options)
    with acc.micro_batch(weight=3):
        model(torch.randn(3, 3)).square().mean().backward()
    before, weight = gradients(model), acc.window.weight
    loss = model[2](Trap.apply(model[0](torch.randn(5, 3)), error)).square().mean()
    with pytest.raises(type(error)), acc.micro_batch(weight=5):
        acc.backward(loss) if explicit else loss.backward()
    assert same(gradients(model), before)
    assert (acc.window.weight, acc.current_step) == (weight, 1)
    with acc.micro_batch(weight=2):
        model(torch.randn(2, 3)).square().mean().backward()
    assert acc.current_step == 2
    result = acc.flush()
    assert (result.weight, result.micro_batches, result.skipped) == (5, 2, 0)


def test_an_exception_in_the_first_micro_batch() -> None:
    model, acc = setup()
    with pytest.raises(RuntimeError, match="no"), acc.micro_batch(weight=5):
        model[2](Trap.apply(model[0](torch.randn(5, 3)), RuntimeError("no"))).sum().backward()
    assert gradients(model) == [None] * 4
    assert not acc.flush()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["micro_batch", "backward", "terms"])
def test_a_bad_micro_batch_costs_one_micro_batch(bad: float, how: str) -> None:
    model, acc = setup(on_nonfinite="skip")
    reference = copy.deepcopy(model)
    parts = [torch.randn(n, 3) for n in (2, 5, 1, 3)]
    poisoned = parts[1].clone()
    poisoned[0] = bad
    for part in (parts[0], poisoned, parts[2], parts[3]):
        loss = model(part).square().mean()
        if how == "backward":
            acc.backward(loss, weight=len(part))
        elif how == "terms":
            acc.backward(terms={"main": (loss * len(part), len(part))})
        else:
            with acc.micro_batch(weight=len(part)):
                loss.backward()
        result = acc.step()
    assert (result.stepped, result.weight, result.micro_batches, result.skipped) == (True, 6, 3, 1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    reference(torch.cat([parts[0], parts[2], parts[3]])).square().mean().backward()
    optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_bad_micro_batch_raises_by_default_and_is_taken_back() -> None:
    model, acc = setup()
    acc.backward(model(torch.randn(2, 3)).mean(), weight=2)
    before = gradients(model)
    with pytest.raises(gf.NonFiniteGradient, match="this micro-batch is not finite in 3 of 4"):
        acc.backward(model(torch.full((2, 3), math.nan)).mean(), weight=2)
    assert same(gradients(model), before)
    assert acc.current_step == 1


def test_a_bad_window_without_isolation() -> None:
    model, acc = setup(isolate=False)
    start = copy.deepcopy(model.state_dict())
    for _ in range(3):
        acc.backward(model(torch.randn(2, 3)).mean(), weight=2)
        acc.step()
    acc.backward(model(torch.full((2, 3), math.nan)).mean(), weight=2)
    with pytest.raises(gf.NonFiniteGradient, match="the window"):
        acc.step()
    acc.reset()
    acc = gf.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=0.1), steps=1, on_nonfinite="skip"
    )
    acc.backward(model(torch.full((2, 3), math.nan)).mean(), weight=2)
    result = acc.step()
    assert (result.stepped, result.reason, result.skipped) == (False, "non-finite gradient", 1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_weights_inside_a_micro_batch() -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=4, isolate=True)
    with acc.micro_batch(weight=2):  # all passes inside are one mean over 2 items
        (w * 1).sum().backward()
        (w * 2).sum().backward()
    with acc.micro_batch():  # the passes say it themselves
        acc.backward((w * 4).sum(), weight=3)
        acc.backward((w * 10).sum(), weight=1, reduction="sum")
    with acc.micro_batch(weight=2):
        acc.backward((w * 14).sum(), weight=2, reduction="sum")
    with acc.micro_batch(weight=0):
        acc.backward((w * math.nan).sum())
    with acc.micro_batch():
        pass
    assert acc.current_step == 4
    result = acc.flush()
    assert result.weight == 8
    assert w.item() == pytest.approx(-(2 * 3 + 3 * 4 + 10 + 14) / 8)


def test_micro_batch_misuse() -> None:
    model, acc = setup(isolate=False)
    with pytest.raises(gf.MisuseError, match="isolate=True or dtype"), acc.micro_batch(weight=1):
        pass
    model, acc = setup()
    with pytest.raises(gf.MisuseError, match="weight=-1"), acc.micro_batch(weight=-1):
        pass
    with (
        pytest.raises(gf.MisuseError, match="inside micro_batch"),
        acc.micro_batch(),
        acc.micro_batch(),
    ):
        pass
    with pytest.raises(gf.MisuseError, match="one place"), acc.micro_batch(weight=3):
        acc.backward(model(torch.randn(2, 3)).mean(), weight=2)
    with pytest.raises(gf.MisuseError, match="state_dict"), acc.micro_batch(weight=3):
        acc.state_dict()
    assert acc.current_step == 0


# -- loss scaling --------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("kind", ["torch", "gradfit"])
def test_scaler_order(kind: str, isolate: bool) -> None:
    """Unscaled once, clipped on true values, stepped, updated: the same as without a scaler."""
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0) if kind == "torch" else gf.LossScaler(1024.0)
    )
    model, acc = setup(scaler=scaler, clip=0.05, isolate=isolate)
    reference = copy.deepcopy(model)
    plain = gf.GradientAccumulator(
        torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), steps=4, clip=0.05
    )
    for _ in range(3):
        for size in (1, 4, 2, 2):
            x = torch.randn(size, 3)
            acc.backward(model(x).square().mean(), weight=size)
            plain.backward(reference(x).square().mean(), weight=size)
            result, expected = acc.step(), plain.step()
        assert result.stepped
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["torch", "gradfit"])
def test_scaler_skips_the_window_and_says_so(kind: str) -> None:
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0) if kind == "torch" else gf.LossScaler(1024.0)
    )
    model, acc = setup(scaler=scaler, steps=2, isolate=False)
    start = copy.deepcopy(model.state_dict())
    acc.backward(model(torch.randn(2, 3)).mean(), weight=2)
    acc.step()
    acc.backward(model(torch.randn(2, 3)).mean() * math.inf, weight=2)
    result = acc.step()
    assert (result.stepped, result.reason) == (False, "non-finite gradient")
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    for _ in range(2):
        acc.backward(model(torch.randn(2, 3)).mean(), weight=2)
        result = acc.step()
    assert result.stepped


@pytest.mark.parametrize("kind", ["torch", "gradfit"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_scaler_with_isolation_loses_one_micro_batch(kind: str, dtype: torch.dtype | None) -> None:
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=1024.0) if kind == "torch" else gf.LossScaler(1024.0)
    )
    model, acc = setup(scaler=scaler, dtype=dtype)
    reference = copy.deepcopy(model)
    parts = [torch.randn(n, 3) for n in (2, 5, 1, 3)]
    for at, part in enumerate(parts):
        loss = model(part).square().mean()
        acc.backward(loss * math.inf if at == 1 else loss, weight=len(part))
        result = acc.step()
    assert (result.stepped, result.weight, result.skipped) == (True, 6, 1)
    assert scaler.get_scale() == 512.0
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    reference(torch.cat([parts[0], parts[2], parts[3]])).square().mean().backward()
    optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["torch", "gradfit"])
@pytest.mark.parametrize("way", ["accumulator", "plain", "terms"])
def test_a_scale_that_changes_amid_a_window(kind: str, way: str) -> None:
    """Another optimizer's update has changed it: each micro-batch was scaled by its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if kind == "torch" else gf.LossScaler(4.0)
    w = torch.zeros(1, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=2, scaler=scaler)
    for number in (2.0, 4.0):
        loss = (w * number).sum()
        if way == "plain":
            scaler.scale(loss).backward()
        elif way == "terms":
            acc.backward(terms={"one": (loss, 1)})
        else:
            acc.backward(loss)
        result = acc.step()
        if not result.stepped:
            scaler.update(8.0)
    assert result.stepped
    assert result.grad_norm == 3.0
    assert w.item() == -3.0


def test_float16_parameters_with_a_scaler() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    acc = gf.GradientAccumulator(
        torch.optim.AdamW(model.parameters(), lr=0.01), steps=2, dtype=torch.float32, scaler=scaler
    )
    x = torch.randn(32, 8).half()
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(40):
        for rows in torch.arange(32).split(16):
            loss = (model(x[rows]).float() - y[rows].float()).square().mean()
            acc.backward(loss, weight=len(rows))
            acc.step()
        losses.append(loss.item())
    assert acc.windows == 40
    assert losses[-1] < 0.5 * losses[0]


def test_a_disabled_scaler_changes_nothing() -> None:
    model, acc = setup(scaler=torch.amp.GradScaler("cpu", enabled=False), steps=1)
    acc.backward(model(torch.randn(2, 3)).mean())
    assert acc.step().stepped


def test_an_infinity_elsewhere_in_the_optimizer() -> None:
    """The scaler looks at all of the optimizer's parameters, so we must not claim a step it left
    out.
    """
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    acc = gf.GradientAccumulator(
        torch.optim.SGD([a, b], lr=1.0),
        parameters=[a],
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
    )
    acc.backward((a + b * math.inf).sum())
    assert not acc.step().stepped
    assert a.item() == 1.0


@pytest.mark.parametrize("inside", [False, True])
def test_a_plain_pass_after_the_scale_has_changed(inside: bool) -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    scaler = gf.LossScaler(64.0)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=3, isolate=True, scaler=scaler)
    scaler.scale((w * 3).sum()).backward()
    acc.step()
    acc.backward((w * math.inf).sum())
    acc.step()
    assert scaler.get_scale() == 32.0
    with acc.micro_batch() if inside else contextlib.nullcontext():
        scaler.scale((w * 5).sum()).backward()
    result = acc.step()
    assert (result.stepped, result.skipped, result.grad_norm, w.item()) == (True, 1, 4.0, -4.0)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=repr)
def test_a_step_that_failed_after_its_first_group_is_not_repeated(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does not count what its fused kernels write: the first group was updated twice."""
    layer = nn.Linear(3, 2)
    groups = [{"params": [parameter]} for parameter in layer.parameters()]
    acc = gf.GradientAccumulator(torch.optim.SGD(groups, lr=0.1, **options))
    acc.backward(layer(torch.ones(1, 3)).sum())
    step, calls = torch.optim.SGD._init_group, []

    def second_fails(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "_init_group", second_fails)
    with pytest.raises(MemoryError):
        acc.step()
    once = [*map(torch.clone, layer.parameters())]
    with pytest.raises(gf.MisuseError, match="changed 1 of 2 parameters"):
        acc.step()
    assert all(map(torch.equal, layer.parameters(), once))


def test_a_fused_step_that_failed_before_it_wrote_is_repeated() -> None:
    layer, times = nn.Linear(3, 2), []
    acc = gf.GradientAccumulator(torch.optim.SGD(layer.parameters(), lr=0.1, fused=True))

    def fails_once(*_: Any) -> None:
        times.append(1)
        if len(times) == 1:
            raise MemoryError

    acc.optimizer.register_step_pre_hook(fails_once)  # type: ignore[union-attr]
    acc.backward(layer(torch.ones(1, 3)).sum())
    with pytest.raises(MemoryError):
        acc.step()
    assert acc.step()
