"""A window that one pass fills and an update ends goes the short way: the same, bit by bit, as the
long one, and whatever is not usual goes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradfit.accumulate.accumulator import BareAccumulator
from gradfit.accumulate.single_pass import SinglePass
from gradfit.errors import NonFiniteGradient

Loss = Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, Any, str]]


def mean(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().mean(), len(x), "mean"


def summed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().sum(), 3 * len(x), "sum"


def by_half(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().mean(), 0.5, "mean"


def without_weight(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().mean() * float("nan"), 0, "mean"


def on_a_tensor(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().sum(), torch.tensor(len(x)), "sum"


def of_one_element(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().mean().reshape(1), len(x), "mean"


def infinite(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any, str]:
    return model(x).square().mean() * float("inf"), len(x), "mean"


def steps_of(loss: Loss, options: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    """Three updates: their results, and what they leave."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulator = BareAccumulator(optimizer, **options)
    seen: list[Any] = []
    for number in range(3):
        x = torch.randn(3 + number, 4, dtype=dtype)
        if number == 1:  # somebody else's, which are nobody's
            model(x).sum().backward()
        try:
            accumulator.backward_one(*loss(model, x))
            seen.append(accumulator.current_step)
            seen.append(accumulator.flush())
        except NonFiniteGradient as error:
            seen.append(str(error))
            accumulator.reset()
        seen += [accumulator.windows, accumulator.current_step, dict(accumulator.notes)]
        seen.append([parameter.grad is None for parameter in model.parameters()])
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if type(one) is list:
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 1e-2}, {"on_nonfinite": "skip"}, {"dtype": torch.float64}, {"isolate": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "loss",
    [mean, summed, by_half, without_weight, on_a_tensor, of_one_element, infinite],
    ids=lambda loss: loss.__name__,
)
def test_both_ways_are_the_same(
    loss: Loss, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = steps_of(loss, options, dtype)
    monkeypatch.setattr(SinglePass, "backward", lambda *_: False)
    assert same(short, steps_of(loss, options, dtype))


def lengths(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, BareAccumulator]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, BareAccumulator(optimizer, **options)


def is_short(accumulator: BareAccumulator, model: nn.Module) -> bool:
    """Whether the next pass goes the short way; it has come in either way."""
    loss = model(torch.ones(2, 3)).mean()
    taken = accumulator._single.backward(loss, 2, "mean")
    if not taken:
        accumulator.backward(loss, 2)
    return taken


def test_it_is_taken_from_the_second_window_on() -> None:
    """The first one looks whether the parameters were wrapped since, and makes them its own."""
    model, _, accumulator = lengths()
    assert not is_short(accumulator, model)
    assert accumulator.flush().stepped
    assert is_short(accumulator, model)
    assert accumulator.flush().stepped
    assert accumulator.windows == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer, accumulator: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(1))]}
        ),
        lambda model, optimizer, accumulator: is_short(accumulator, model),  # a pass is in it
        lambda model, optimizer, accumulator: setattr(accumulator, "accumulation_count", 2),
        lambda model, optimizer, accumulator: BareAccumulator(optimizer).backward(
            model(torch.ones(1, 3)).mean()
        ),
        lambda model, optimizer, accumulator: setattr(accumulator, "enabled", False),
    ],
    ids=["members", "filled", "count", "another", "disabled"],
)
def test_what_is_not_usual_goes_the_long_way(change: Any) -> None:
    model, optimizer, accumulator = lengths()
    is_short(accumulator, model), accumulator.flush()
    change(model, optimizer, accumulator)
    assert not accumulator._single.backward(model(torch.ones(2, 3)).mean(), 2, "mean")


def test_a_pass_or_an_update_that_fails_leaves_a_window_that_can_be_dropped() -> None:
    model, optimizer, accumulator = lengths()
    is_short(accumulator, model), accumulator.flush()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def fails(*_: Any) -> None:
        raise OSError("half-way")

    output = model(torch.ones(2, 3))
    output.register_hook(fails)
    with pytest.raises(OSError, match="half-way"):
        accumulator.backward_one(output.mean(), 2, "mean")
    accumulator.reset()
    assert is_short(accumulator, model)
    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="half-way"):
        accumulator.flush()
    hook.remove()
    assert all(map(torch.equal, model.parameters(), before))
    result = accumulator.flush()  # the gradients are the mean, and were kept
    assert result.stepped
    assert accumulator.windows == 2
    assert is_short(accumulator, model)


def test_a_second_pass_in_the_same_window_adds_up() -> None:
    model, _, accumulator = lengths()
    is_short(accumulator, model), accumulator.flush()
    x = torch.randn(6, 3)
    accumulator.backward_one(model(x[:4]).mean(), 4, "mean")
    accumulator.backward_one(model(x[4:]).mean(), 2, "mean")
    expected = torch.autograd.grad(model(x).mean(), model.weight)[0]
    seen: list[torch.Tensor] = []
    accumulator.optimizer.register_step_pre_hook(  # type: ignore[union-attr]
        lambda *_: seen.append(model.weight.grad.clone())  # type: ignore[union-attr]
    )
    assert accumulator.flush().weight == 6
    torch.testing.assert_close(seen[0], expected)
