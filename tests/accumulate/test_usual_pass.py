"""The short way of the usual pass asks what the long way asks: whatever happens in between is seen.

Every disturbance comes after two weighted passes, when the next one would go the short way; each is
exact, or refused before the pass is run, as if there were no short way.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from two_parameters import TOUCHES, Dies, TwoParameters

import gradfit as gf
from gradfit.accumulate.usual_pass import UsualPass


class Loop(TwoParameters):
    """Windows of four micro-batches over two parameters; the third and fourth pass go the short
    way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acc = gf.GradientAccumulator(self.optimizer, steps=4)

    def bring(self, *values: float) -> None:
        for x in values:
            self.acc.backward(self.loss(x), weight=1)
            self.acc.step()

    def settle(self) -> None:
        """A whole window, after which step() is known to end micro-batches, and half of the
        next.
        """
        self.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
        assert self.acc.window.settled is not None


@pytest.fixture
def loop() -> Loop:
    one = Loop()
    one.settle()
    return one


def test_the_usual_pass_is_exact(loop: Loop) -> None:
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]
    assert loop.b.tolist() == [-6.0, -6.0]


@pytest.mark.parametrize("touch", TOUCHES)
def test_touched_gradients_are_refused_before_the_pass(
    loop: Loop, touch: Callable[[Loop], None]
) -> None:
    touch(loop)
    last = loop.loss(3.0)
    with loop.same_gradients(), pytest.raises(gf.MisuseError, match="in the middle of a window"):
        loop.acc.backward(last)
    loop.acc.reset()
    loop.acc.backward(last)  # its graph is still there
    loop.acc.step()
    loop.bring(3.0, 3.0, 3.0)
    assert loop.a.tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("touch", TOUCHES)
def test_touched_gradients_are_refused_by_the_last_step(
    loop: Loop, touch: Callable[[Loop], None]
) -> None:
    loop.bring(3.0)
    loop.acc.backward(loop.loss(6.0))
    touch(loop)
    with pytest.raises(gf.MisuseError, match="in the middle of a window"):
        loop.acc.step()
    assert loop.a.tolist() == [0.0, 0.0]


def test_a_gradient_where_there_was_none_is_refused() -> None:
    loop = Loop()
    for x in (0.0, 0.0, 0.0, 0.0, 1.0, 2.0):
        loop.acc.backward((loop.a * x).sum())
        loop.acc.step()
    loop.b.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(gf.MisuseError, match="in the middle of a window"):
        loop.acc.backward((loop.a * 3.0).sum())


def test_a_parameter_that_is_reached_later(loop: Loop) -> None:
    loop.bring(0.0, 0.0)
    for x in (1.0, 2.0, 3.0):
        loop.acc.backward((loop.a * x).sum())
        loop.acc.step()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0 - 0.75] * 2
    assert loop.b.tolist() == [-1.5 - 3.0] * 2


def test_gradients_that_a_hook_replaces_are_the_pass_s(loop: Loop) -> None:
    def replace(tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad = tensor.grad.clone()

    loop.a.register_post_accumulate_grad_hook(replace)  # type: ignore[no-untyped-call]
    loop.bring(3.0, 6.0, 4.0, 4.0, 4.0, 4.0)
    assert loop.a.tolist() == [-7.0, -7.0]


def test_another_weight_reduction_and_type(loop: Loop) -> None:
    loop.acc.backward(loop.loss(3.0), weight=3)  # beyond what the divisor has room for together
    loop.acc.step()
    loop.acc.backward(loop.loss(7.0).float().sum().reshape(1), weight=1, reduction="sum")
    result = loop.acc.step()
    assert result.weight == 6
    assert loop.a.tolist() == pytest.approx([-(1 + 2 + 9 + 7) / 6] * 2)


def test_a_plain_pass_between(loop: Loop) -> None:
    loop.loss(3.0).backward()
    loop.acc.step()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_new_parameters_between(loop: Loop) -> None:
    new = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    loop.optimizer.add_param_group({"params": [new]})
    loop.bring(3.0)
    loop.acc.backward(loop.loss(6.0) + new.sum())
    loop.acc.step()
    assert loop.a.tolist() == [-3.0, -3.0]
    assert new.tolist() == [-0.25, -0.25]


def test_a_parameter_taken_out_by_hand(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["params"].pop()
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]
    assert loop.b.tolist() == [0.0, 0.0]


def test_terms_between(loop: Loop) -> None:
    loop.acc.backward(terms={"aux": (loop.a.sum() * 8.0, 2)})
    loop.acc.step()
    loop.bring(6.0)
    assert loop.a.tolist() == [-(1.0 + 2.0 + 6.0) / 3 - 4.0] * 2


def test_saved_and_resumed_between(loop: Loop) -> None:
    state = copy.deepcopy(loop.acc.state_dict())
    loop.acc.reset()
    loop.acc.load_state_dict(state)
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_disabled_and_closed(loop: Loop) -> None:
    with pytest.raises(gf.MisuseError, match="flush"):
        loop.acc.enabled = False
    loop.acc.close()
    with pytest.raises(gf.MisuseError, match="closed"):
        loop.acc.backward(loop.loss(3.0))


def test_a_pass_that_is_interrupted_breaks_the_window(loop: Loop) -> None:
    with pytest.raises(KeyboardInterrupt):
        loop.acc.backward(loop.loss(3.0) + Dies.apply(loop.a.sum()))
    for call in (loop.acc.step, loop.acc.flush, lambda: loop.acc.backward(loop.loss(3.0))):
        with pytest.raises(gf.MisuseError, match="reset"):
            call()
    loop.acc.reset()
    loop.bring(1.0, 1.0, 1.0, 1.0)
    assert loop.a.tolist() == [-1.0, -1.0]


def test_an_interrupt_between_a_pass_and_its_booking(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UsualPass, "settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.acc.backward(loop.loss(3.0))
    with pytest.raises(gf.MisuseError, match="interrupted half-way"):
        loop.acc.step()


def test_passes_of_several_threads(loop: Loop) -> None:
    results: list[gf.StepResult] = []

    def work() -> None:
        for _ in range(50):
            loop.acc.backward(loop.loss(1.0))
            results.append(loop.acc.step())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.append(loop.acc.flush())
    windows = [one.weight for one in results if one]
    assert sum(windows) == 2 + 200  # two before, whatever window each of the others came into
    first = next(one.weight for one in results if one)
    means = [(first + 1) / first] + [1.0] * (len(windows) - 1)
    assert loop.a[0].item() == pytest.approx(-sum(means), abs=1e-9)


def test_step_in_another_thread_waits_for_the_pass(loop: Loop) -> None:
    """A step() of a thread that has put in nothing ends the others' micro-batches, short way or
    not.
    """
    loop.acc.backward(loop.loss(3.0))
    results: list[gf.StepResult] = []
    thread = threading.Thread(target=lambda: results.append(loop.acc.step()))
    thread.start()
    thread.join()
    assert results[0].micro_batches == 3
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_held_gradients_are_let_go(loop: Loop) -> None:
    """The short way holds gradients only while the window fills."""
    import weakref

    assert loop.a.grad is not None
    gradient = weakref.ref(loop.a.grad)
    loop.bring(3.0, 6.0)
    assert gradient() is None
