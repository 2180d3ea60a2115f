"""`LossScaler` beside `torch.amp.GradScaler`: the same scales, the same steps, exchangeable
states.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradfit as gf


def _drive(scaler, overflows: list[bool]) -> tuple[list[float], list[list[float]]]:
    """One update per entry; an overflow is an infinite gradient."""
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.01, momentum=0.9)
    scales, weights = [], []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale((w * torch.tensor([3.0, math.inf if overflow else 5.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(w.tolist())
    return scales, weights


@settings(deadline=None, max_examples=60)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    init=st.sampled_from([2.0**16, 1.0, 3.7, 2.0**127]),
    growth=st.sampled_from([2.0, 1.1, 10.0]),
    backoff=st.sampled_from([0.5, 0.3, 0.99]),
    interval=st.integers(1, 5),
)
def test_same_scales_and_steps_as_torch(overflows, init, growth, backoff, interval) -> None:
    arguments = {
        "init_scale": init,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    ours = _drive(gf.LossScaler(**arguments), overflows)
    theirs = _drive(torch.amp.GradScaler("cpu", **arguments), overflows)
    assert ours == theirs


def test_states_are_exchangeable_with_torch() -> None:
    pattern = [False, True, False, False]
    ours, theirs = gf.LossScaler(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    _drive(ours, pattern)
    _drive(theirs, pattern)
    swapped_ours, swapped_theirs = gf.LossScaler(1.0), torch.amp.GradScaler("cpu", init_scale=1.0)
    swapped_ours.load_state_dict(theirs.state_dict())
    swapped_theirs.load_state_dict(ours.state_dict())
    again = [False] * 5
    assert _drive(swapped_ours, again) == _drive(swapped_theirs, again) == _drive(ours, again)


def test_static_scale_never_moves_but_still_skips() -> None:
    scales, weights = _drive(gf.LossScaler(1024.0, dynamic=False), [False, True, False])
    assert scales == [1024.0] * 3
    assert weights[0] == weights[1] != weights[2]
    state = gf.LossScaler(1024.0, dynamic=False).state_dict()
    scaler = gf.LossScaler()
    scaler.load_state_dict(state)
    assert not scaler.dynamic


def test_disabled_passes_everything_through() -> None:
    scaler = gf.LossScaler(enabled=False)
    _, weights = _drive(scaler, [False])
    assert weights[0] == pytest.approx([1.0 - 0.03, -2.0 - 0.05])
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert scaler.unscale_(None)


def test_small_float16_gradients_survive() -> None:
    w = torch.ones(1, requires_grad=True)

    def loss() -> torch.Tensor:
        return ((w.half() * 2.0**-13) * 2.0**-13).sum()

    assert gf.backward(loss())[w].item() == 0.0
    scaler = gf.LossScaler(2.0**12)
    grads = gf.backward(scaler.scale(loss()), {"w": w})
    assert scaler.unscale_(grads)
    assert grads["w"].item() == 2.0**-26


def test_a_float16_loss_does_not_overflow_when_scaled() -> None:
    scaled = gf.LossScaler(2.0**16).scale(torch.tensor(3.0, dtype=torch.float16))
    assert scaled.dtype == torch.float32
    assert scaled.item() == 3 * 2.0**16


def test_scales_nests() -> None:
    scaler = gf.LossScaler(2.0)
    a, (b, c) = scaler.scale([torch.ones(()), (torch.ones(()), torch.ones(2))])
    assert (a.item(), b.item(), c.tolist()) == (2.0, 2.0, [2.0, 2.0])
    with pytest.raises(gf.MisuseError, match="outputs is a str"):
        scaler.scale("loss")


def test_clip_between_unscale_and_step() -> None:
    w = torch.tensor([0.0, 0.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = gf.LossScaler(512.0)
    scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
    assert scaler.unscale_(optimizer)
    assert gf.GradientClipper(1.0).clip_grads([w]).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


def test_unscaled_map_with_an_overflow_lowers_the_scale() -> None:
    scaler = gf.LossScaler(4.0)
    grads = gf.GradientMap({"a": torch.tensor([math.inf]), "b": torch.tensor([8.0])})
    assert not scaler.unscale_(grads)
    assert grads["b"].item() == 2.0
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_two_optimizers_one_overflow() -> None:
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    scaler = gf.LossScaler(8.0)
    scaler.scale((a * math.inf + b).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (a.item(), b.item(), scaler.get_scale()) == (0.0, -1.0, 4.0)


def test_order_mistakes_are_told() -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = gf.LossScaler()
    with pytest.raises(gf.MisuseError, match="no gradients were unscaled"):
        scaler.update()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(gf.MisuseError, match="already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(gf.MisuseError, match="already"):
        scaler.step(optimizer)
    with pytest.raises(gf.MisuseError, match="before step"):
        scaler.unscale_(optimizer)
    with pytest.raises(gf.MisuseError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(gf.MisuseError, match=r"is a list. Pass the optimizer"):
        scaler.unscale_([w])
    scaler.update(new_scale=7.0)
    assert scaler.get_scale() == 7.0
    with pytest.raises(gf.MisuseError, match="new_scale=0"):
        scaler.update(new_scale=0.0)


def test_float16_parameters_are_refused_unchanged() -> None:
    w = torch.ones(2, dtype=torch.float16, requires_grad=True)
    w.grad = torch.full((2,), 8.0, dtype=torch.float16)
    with pytest.raises(gf.MisuseError, match="parameters are float16"):
        gf.LossScaler().unscale_(torch.optim.SGD([w], lr=1.0))
    assert w.grad.tolist() == [8.0, 8.0]


def test_a_scale_of_zero_is_an_error() -> None:
    scaler = gf.LossScaler(2.0**-148)
    bad = [True, True]
    with pytest.raises(gf.NonFiniteGradient, match="overflow at every scale"):
        _drive(scaler, bad)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": math.inf}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(gf.MisuseError, match=name):
        gf.LossScaler(**arguments)


def test_a_state_without_a_scale_is_refused() -> None:
    with pytest.raises(gf.StateError, match="holds no scale"):
        gf.LossScaler().load_state_dict({})
    assert "scale=65536, dynamic" in repr(gf.LossScaler())
