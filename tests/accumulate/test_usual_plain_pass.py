"""The short way of a plain pass asks what the long way asks: whatever happens in between is seen.

Every disturbance comes after two plain passes of a window of four, when the next one would go the
short way; each is exact, or refused before the pass adds anything, as if there were no short way.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from two_parameters import TOUCHES, Dies, TwoParameters

import gradfit as gf
from gradfit.accumulate.usual_plain_pass import UsualPlainPass


class Loop(TwoParameters):
    """Windows of four plain passes over two parameters; the accumulator steps, or the loop does."""

    def __init__(self, *, handed: bool) -> None:
        super().__init__()
        self.handed = handed
        self.acc = (
            gf.GradientAccumulator(self.optimizer, steps=4)
            if handed
            else gf.GradientAccumulator(steps=4, parameters=[self.a, self.b])
        )

    def end(self) -> None:
        if self.handed:
            self.acc.step()
        elif self.acc.is_ready:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bring(self, *values: float) -> None:
        for x in values:
            self.loss(x).backward()
            self.end()

    @property
    def takes_short_way(self) -> bool:
        return isinstance(self.acc.window.settled, UsualPlainPass)


@pytest.fixture(params=[True, False], ids=["step", "is_ready"])
def loop(request: pytest.FixtureRequest) -> Loop:
    one = Loop(handed=request.param)
    one.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
    assert one.takes_short_way
    return one


def test_the_usual_pass_is_exact(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    short = 0
    book = UsualPlainPass.book

    def count(self: UsualPlainPass, *args: Any) -> None:
        nonlocal short
        short += 1
        book(self, *args)

    monkeypatch.setattr(UsualPlainPass, "book", count)
    loop.bring(3.0, 6.0, 1.0, 1.0, 1.0, 1.0)
    assert short == 6
    assert loop.a.tolist() == [-4.0, -4.0]
    assert loop.b.tolist() == [-8.0, -8.0]
    assert loop.acc.windows == 3


@pytest.mark.parametrize("touch", TOUCHES)
def test_touched_gradients_are_refused_before_the_pass(
    loop: Loop, touch: Callable[[Loop], None]
) -> None:
    touch(loop)
    with loop.same_gradients(), pytest.raises(gf.MisuseError, match="in the middle of a window"):
        loop.loss(3.0).backward()
    loop.acc.reset()
    loop.bring(3.0, 3.0, 3.0, 3.0)
    assert loop.a.tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("touch", TOUCHES)
def test_touched_gradients_are_refused_by_the_last_step(touch: Callable[[Loop], None]) -> None:
    loop = Loop(handed=True)
    loop.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0)
    loop.loss(6.0).backward()
    assert loop.takes_short_way
    touch(loop)
    with pytest.raises(gf.MisuseError, match="in the middle of a window"):
        loop.acc.step()
    assert loop.a.tolist() == [0.0, 0.0]


def test_parameters_that_somebody_updates_between() -> None:
    loop = Loop(handed=False)
    loop.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
    with torch.no_grad():
        loop.b.add_(1.0)
    with pytest.raises(gf.MisuseError, match="updated in the middle of a window"):
        loop.loss(3.0).backward()


def test_parameters_that_a_hook_updates_in_the_pass() -> None:
    loop = Loop(handed=False)
    loop.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)

    def write(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.add_(1.0)

    loop.a.register_post_accumulate_grad_hook(write)  # type: ignore[no-untyped-call]
    with pytest.raises(gf.MisuseError, match="while a backward pass ran"):
        loop.loss(3.0).backward()


def test_gradients_that_a_hook_replaces_are_the_pass_s(loop: Loop) -> None:
    def replace(tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad = tensor.grad.clone()

    loop.a.register_post_accumulate_grad_hook(replace)  # type: ignore[no-untyped-call]
    loop.bring(3.0, 6.0, 4.0, 4.0, 4.0, 4.0)
    assert loop.a.tolist() == [-7.0, -7.0]


def test_a_parameter_that_is_reached_later(loop: Loop) -> None:
    loop.bring(0.0, 0.0)
    for x in (1.0, 2.0, 3.0):
        (loop.a * x).sum().backward()
        loop.end()
    loop.bring(6.0)
    assert loop.a.tolist() == [-0.75 - 3.0] * 2
    assert loop.b.tolist() == [-1.5 - 3.0] * 2


def test_a_weighted_pass_between(loop: Loop) -> None:
    loop.acc.backward(loop.loss(3.0))
    loop.end()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_two_losses_of_one_forward_are_one_micro_batch() -> None:
    loop = Loop(handed=True)
    loop.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
    first, second = loop.loss(1.0), loop.loss(2.0)
    first.backward(retain_graph=True)
    second.backward()
    loop.acc.step()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_a_kept_graph_without_step_is_one_micro_batch_with_the_next_loss() -> None:
    loop = Loop(handed=False)
    loop.bring(0.0, 0.0, 0.0, 0.0)
    loop.loss(1.0).backward()
    loop.loss(2.0).backward()
    both = loop.loss(1.0)
    first, second = both * 1.0, both * 2.0
    first.backward(retain_graph=True)
    second.backward()  # shares the micro-batch of the one before
    assert not loop.acc.is_full
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_grad_counts_nothing(loop: Loop) -> None:
    torch.autograd.grad(loop.loss(100.0), [loop.a, loop.b])
    assert loop.acc.current_step == 2
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


class Inner(torch.autograd.Function):
    """Runs a backward pass of its own inside of the outer one, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (inner * 3.0).backward(gradient)
        assert inner.grad is not None
        return inner.grad


class InnerThroughParameter(torch.autograd.Function):
    """Adds to a parameter from a pass inside of the outer one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            (ctx.parameter * gradient).sum().backward()
        return gradient, None


def test_a_pass_inside_a_pass_is_part_of_it(loop: Loop) -> None:
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    out = InnerThroughParameter.apply(shift + loop.loss(3.0), loop.a)  # adds 1 to a's gradient
    out.backward()
    assert loop.acc.current_step == 3
    loop.end()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.25, -3.25]
    assert loop.b.tolist() == [-6.0, -6.0]


def test_a_pass_inside_that_reaches_nothing_of_ours(loop: Loop) -> None:
    Inner.apply(loop.loss(1.0)).backward()
    loop.end()
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_new_parameters_between() -> None:
    loop = Loop(handed=True)
    loop.bring(0.0, 0.0, 0.0, 0.0, 1.0, 2.0)
    new = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    loop.optimizer.add_param_group({"params": [new]})
    loop.bring(3.0)
    (loop.loss(6.0) + new.sum()).backward()
    loop.acc.step()
    assert loop.a.tolist() == [-3.0, -3.0]
    assert new.tolist() == [-0.25, -0.25]


def test_a_second_accumulator_between(loop: Loop) -> None:
    with pytest.raises(gf.MisuseError, match="in the middle of another"):
        gf.GradientAccumulator(steps=2, parameters=[loop.a, loop.b])
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_saved_and_resumed_between(loop: Loop) -> None:
    state = copy.deepcopy(loop.acc.state_dict())
    loop.acc.reset()
    loop.acc.load_state_dict(state)
    loop.bring(3.0, 6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_a_pass_that_dies_breaks_the_window(loop: Loop) -> None:
    # `a` is reached first, by the part of the graph that was made last
    with pytest.raises(KeyboardInterrupt):
        (Dies.apply(loop.b.sum()) + loop.a.sum()).backward()
    for call in (loop.acc.step, loop.acc.flush, lambda: loop.acc.is_ready):
        with pytest.raises(gf.MisuseError, match="reset"):
            call()
    loop.acc.reset()
    loop.bring(1.0, 1.0, 1.0, 1.0)
    assert loop.a.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("where", ["book", "settle"])
def test_an_interrupt_while_a_pass_is_counted(
    loop: Loop, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is part of the window or not; who goes on must not be told that all is well."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UsualPlainPass, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.loss(3.0).backward()
    if where == "book":
        with pytest.raises(gf.MisuseError, match="half-way"):
            loop.acc.step()
    else:  # it was counted, and has added everything
        assert loop.acc.current_step == 3


def test_passes_of_another_thread_take_the_long_way(loop: Loop) -> None:
    thread = threading.Thread(target=loop.bring, args=(3.0,))
    thread.start()
    thread.join()
    assert not loop.takes_short_way
    loop.bring(6.0)
    assert loop.a.tolist() == [-3.0, -3.0]


def test_passes_of_several_threads_at_once() -> None:
    loop = Loop(handed=True)
    loop.acc.accumulation_count = 1000
    ready = threading.Barrier(3)

    def work() -> None:
        ready.wait()
        for _ in range(50):
            loop.loss(1.0).backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    result = loop.acc.flush()
    assert (result.weight, result.stepped) == (150, True)
    assert loop.a.tolist() == [-1.0, -1.0]


def test_held_gradients_are_let_go(loop: Loop) -> None:
    """The short way holds gradients only while the window fills."""
    assert loop.a.grad is not None
    gradient = weakref.ref(loop.a.grad)
    loop.bring(3.0, 6.0)
    assert gradient() is None


def test_the_short_way_does_not_keep_the_window() -> None:
    loop = Loop(handed=False)
    loop.bring(1.0, 2.0)
    assert loop.takes_short_way
    window = weakref.ref(loop.acc.window)
    gc.disable()
    try:
        del loop.acc
        assert window() is None
    finally:
        gc.enable()


def test_a_full_window_that_goes_on_counts_all_of_it() -> None:
    """Nobody has asked for the mean yet, so that a fifth micro-batch comes in."""
    loop = Loop(handed=False)
    for x in (1.0, 2.0, 3.0, 6.0, 8.0):
        loop.loss(x).backward()
    result = loop.acc.flush()
    assert (result.weight, result.micro_batches) == (5, 5)
    assert loop.a.grad is not None
    assert loop.a.grad.tolist() == [4.0, 4.0]


def test_an_accumulator_of_other_parameters_does_not_lengthen_the_way(loop: Loop) -> None:
    other = Loop(handed=True)
    for _ in range(3):
        loop.bring(3.0, 6.0, 1.0, 2.0)
        other.bring(1.0, 1.0, 1.0, 1.0)
        assert loop.acc.window.is_noted
        assert other.acc.window.is_noted


def test_an_accumulator_that_takes_a_parameter_over_is_seen(loop: Loop) -> None:
    loop.bring(3.0, 6.0)
    other = gf.GradientAccumulator(torch.optim.SGD([loop.b], lr=1.0), steps=1)
    assert not loop.acc.window.is_noted
    before = loop.acc.window.accumulation_steps
    loop.loss(4.0).backward()  # the other one's pass now
    assert loop.acc.window.accumulation_steps == before
    assert other.window.accumulation_steps == 1
