"""Loops as people write them: each is exact, or refused with the call that would be right.

The model is one number `w`, which starts at 0, and the loss is `w * x`, so that a gradient is `x`
and an update by SGD with a learning rate of 1 subtracts the mean.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from window_interrupts import interrupt_in

import gradfit as gf


def weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=dtype))


def loss(w: torch.Tensor, x: float) -> torch.Tensor:
    return (w * x).sum()


def sgd(*tensors: torch.Tensor, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(tensors), **{"lr": 1.0, **options})


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    """Run something in another thread, and give what it raised."""
    raised: list[BaseException | None] = [None]
    device = torch.get_default_device()  # which each thread has for itself

    def run() -> None:
        try:
            with device:
                work()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0]


def collect(*_: Any) -> None:
    gc.collect()


class Fails(torch.autograd.Function):
    """Raises in the backward pass, after what comes later in the forward has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("half-way")


# -- optimizers' hooks ---------------------------------------------------------------------------


def test_no_optimizer_but_the_one_handed_over_has_hooks() -> None:
    from torch.optim import optimizer as module

    before = [len(module._global_optimizer_pre_hooks), len(module._global_optimizer_post_hooks)]
    w, other = weight(), sgd(weight())
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    assert [
        len(module._global_optimizer_pre_hooks),
        len(module._global_optimizer_post_hooks),
    ] == before
    assert not other._optimizer_step_pre_hooks
    assert len(acc.optimizer._optimizer_step_pre_hooks) == 1
    gf.GradientAccumulator(acc.optimizer, steps=3)
    assert len(acc.optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("same", [False, True])
def test_an_accumulator_may_die_while_any_optimizer_steps(kind: str, same: bool) -> None:
    w, other = weight(), weight()
    optimizer = sgd(w)
    stepping = optimizer if same else sgd(other)
    trainer: dict[str, Any] = {"acc": gf.GradientAccumulator(optimizer, steps=2)}
    trainer["self"] = trainer  # a reference cycle
    register = getattr(stepping, f"register_step_{kind}_hook")
    register(collect)
    register(lambda *_: None)
    acc = gf.GradientAccumulator(optimizer, steps=1) if same else None
    del trainer
    (w if same else other).grad = torch.ones(1, dtype=torch.float64)
    assert acc.step() if acc is not None else stepping.step() is None
    assert (w if same else other).item() == -1.0


def test_a_hook_that_fails_after_the_update_does_not_repeat_it() -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=1)

    def fail(*_: Any) -> None:
        raise RuntimeError("the logger is gone")

    handle = optimizer.register_step_post_hook(fail)
    acc.backward(loss(w, 3.0))
    with pytest.raises(RuntimeError, match="logger"):
        acc.step()
    handle.remove()
    assert (w.item(), w.grad, acc.windows, acc.current_step) == (-3.0, None, 1, 0)
    acc.step()
    assert w.item() == -3.0


def test_an_update_that_fails_in_its_middle_cannot_be_repeated() -> None:
    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                a.sub_(a.grad)
            raise RuntimeError("half of it")

    a, b = weight(), weight()
    acc = gf.GradientAccumulator(Half([a, b], lr=1.0), steps=1)
    acc.backward(loss(a, 3.0) + loss(b, 3.0))
    with pytest.raises(RuntimeError, match="half of it"):
        acc.step()
    with pytest.raises(gf.MisuseError, match=r"changed 1 of 2 parameters.* Call reset\(\)"):
        acc.step()
    acc.reset()


# -- loss scalers --------------------------------------------------------------------------------

SCALERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=256.0),
    "gradfit": lambda: gf.LossScaler(256.0),
}


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("own", [(), (1,), (0, 1)])
def test_plain_passes_of_scaled_losses(kind: str, own: tuple[int, ...]) -> None:
    w, scaler = weight(), SCALERS[kind]()
    acc = gf.GradientAccumulator(sgd(w), steps=2, scaler=scaler)
    for _ in range(2):
        for at, x in enumerate((1.0, 3.0)):
            acc.backward(loss(w, x)) if at in own else scaler.scale(loss(w, x)).backward()
            result = acc.step()
        assert (result.stepped, result.grad_norm) == (True, 2.0)
    assert w.item() == -4.0


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("used", [False, True])
def test_plain_passes_of_losses_that_were_not_scaled(kind: str, used: bool) -> None:
    w, scaler = weight(), SCALERS[kind]()
    acc = gf.GradientAccumulator(sgd(w), steps=2, scaler=scaler)
    if used:
        scaler.scale(loss(w, 1.0)).backward()
        acc.step()
    before = None if w.grad is None else w.grad.item()
    with pytest.raises(gf.MisuseError, match=r"not scaled.* scaler.scale\(loss\).backward\(\)"):
        loss(w, 3.0).backward()
    assert (None if w.grad is None else w.grad.item()) == before
    scaler.scale(loss(w, 3.0)).backward()
    acc.step()
    acc.flush()
    assert w.item() == (-2.0 if used else -3.0)


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaled_window_stepped_by_hand(kind: str) -> None:
    w, scaler = weight(), SCALERS[kind]()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=2, scaler=scaler)
    for x in (1.0, 3.0):
        scaler.scale(loss(w, x)).backward()
    for _ in range(2):
        with pytest.raises(gf.MisuseError, match=r"loss scale of 256.* scaler.step\(optimizer\)"):
            optimizer.step()
        assert w.item() == 0.0
        assert acc.is_ready
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert (w.item(), acc.current_step, acc.windows) == (-2.0, 0, 1)


@pytest.mark.parametrize("kind", SCALERS)
def test_another_optimizer_whose_gradients_are_unscaled_steps_first(kind: str) -> None:
    """The update ended with `scaler.update()`, and they were unscaled once more."""
    w, other, scaler = weight(), weight(), SCALERS[kind]()
    optimizer = sgd(other)
    acc = gf.GradientAccumulator(sgd(w), steps=1, scaler=scaler)
    acc.backward(loss(w, 3.0))
    scaler.scale(loss(other, 1.0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(gf.MisuseError, match="has not stepped"):
        acc.step()
    scaler.step(optimizer)
    assert acc.step()
    assert (w.item(), other.item()) == (-3.0, -1.0)


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_fused_optimizer_with_a_scaler(kind: str, by_hand: bool) -> None:
    """Torch's scaler calls its `step` also when it is not to step, and leaves unscaling to it: the
    first overflow, and each step by hand, was refused.
    """
    w, scaler = weight(), SCALERS[kind]()
    optimizer = torch.optim.SGD([w], lr=1.0, fused=True)
    acc = gf.GradientAccumulator(optimizer, steps=2, scaler=scaler)
    for last in (3.0, math.inf, 3.0):
        for x in (1.0, last):
            scaler.scale(loss(w, x)).backward()
            result = None if by_hand else acc.step()
        if result is None and acc.is_ready:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert result is None or result.stepped == math.isfinite(last)
    assert (w.item(), scaler.get_scale(), acc.windows) == (-4.0, 128.0, 3)


def test_a_fused_optimizer_that_a_scaler_lets_not_step_has_not_stepped() -> None:
    """Because of a parameter of its own that is not the accumulator's."""
    w, other = weight(), weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD([w, other], lr=1.0, fused=True)
    acc = gf.GradientAccumulator(optimizer, parameters=[w], scaler=scaler)
    other.grad = torch.full_like(other, math.inf)
    acc.backward(loss(w, 1.0))
    assert (acc.step().stepped, w.item()) == (False, 0.0)


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("steps", [False, True])
def test_unscaled_by_hand_in_the_middle_of_a_window(kind: str, steps: bool) -> None:
    w, scaler = weight(), SCALERS[kind]()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=2, scaler=scaler)
    scaler.scale(loss(w, 1.0)).backward()
    if steps:
        with pytest.raises(gf.MisuseError, match=r"loss scale of 256|changed by hand"):
            scaler.step(optimizer)
    else:
        scaler.unscale_(optimizer)
        acc.step()
    with pytest.raises(gf.MisuseError, match="changed by hand"):
        scaler.scale(loss(w, 1.0)).backward()
    assert w.item() == 0.0


def test_a_scaler_that_is_watched_can_be_copied() -> None:
    for make in SCALERS.values():
        scaler = make()
        acc = gf.GradientAccumulator(sgd(weight()), steps=2, scaler=scaler)
        for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert other.scale(torch.ones(())).item() == 256.0
        del acc


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["backward", "micro_batch", "terms", "plain"])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("steps", [256, 1024])
def test_float16_gradients_do_not_vanish_in_float32_sums(steps: int, size: int, how: str) -> None:
    w = weight(torch.float16)
    acc = gf.GradientAccumulator(parameters=[w], steps=steps, dtype=torch.float32)
    g = torch.tensor(1e-5, dtype=torch.float16)
    for _ in range(steps):
        if how == "backward":
            acc.backward((w * g).sum(), weight=size)
        elif how == "micro_batch":
            with acc.micro_batch(weight=size):
                (w * g).sum().backward()
        elif how == "terms":
            acc.backward(terms={"a": ((w * g).sum() * size, size)})
        else:
            (w * g).sum().backward()
    assert acc.is_ready
    assert w.grad.item() == pytest.approx(
        g.item(), rel=1e-2 if how == "terms" and size > 1 else 1e-5
    )


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(
    "weights", [(1, 10**9), (1, 1), (3, 1, 5), (10**9, 1), (1e-30, 1.0), (1, 2, 4, 8, 16)]
)
def test_sums_stay_in_the_range_of_a_mean(
    weights: tuple[float, ...], terms: bool, isolate: bool
) -> None:
    w = weight(torch.float32)
    acc = gf.GradientAccumulator(parameters=[w], steps=2, isolate=isolate)
    expected = 3e38 * (len(weights) / sum(weights) if terms else 1.0)
    if expected > 3.4e38:
        pytest.skip("terms are sums: here their mean is beyond float32 itself")
    for number in weights:
        if terms:
            acc.backward(terms={"a": (loss(w, 3e38), number)})
        else:
            acc.backward(loss(w, 3e38), weight=number)
    acc.flush()
    assert w.grad.item() == pytest.approx(expected, rel=1e-6)


def test_gradients_as_values_stay_in_range_too() -> None:
    accumulator = gf.DynamicBatchAccumulator(steps=2)
    for size in (1, 10**9):
        accumulator.accumulate(torch.tensor([3e38]), size)
    assert accumulator.get_accumulated_gradient().item() == pytest.approx(3e38, rel=1e-6)


@pytest.mark.parametrize("number", [10**400, 1e300])
def test_weights_that_no_sum_can_hold(number: float) -> None:
    acc = gf.GradientAccumulator(sgd(weight()), steps=2)
    with pytest.raises(gf.MisuseError, match="Divide all weights"):
        acc.backward(loss(acc.window.tensors[0], 1.0), weight=number)


# -- several accumulators ------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_two_accumulators_on_one_parameter(own: bool, first: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    one, two = (gf.GradientAccumulator(optimizer, steps=2) for _ in range(2))
    acc = one if first else two
    try:
        for x in (1.0, 3.0):
            acc.backward(loss(w, x)) if own else loss(w, x).backward()
            result = acc.step()
    except gf.MisuseError as error:
        refusal = str(error)
        assert (first, own, w.item()) == (True, False, 0.0)
    else:
        refusal = "Call flush() or reset()"
        assert (w.item(), result.grad_norm) == (-2.0, 2.0)
    assert "Call flush() or reset()" in refusal


def test_a_dead_accumulator_frees_its_parameters() -> None:
    w = weight()
    trainer: dict[str, Any] = {"acc": gf.GradientAccumulator(sgd(w), steps=4)}
    trainer["self"] = trainer
    trainer["acc"].backward(loss(w, 1.0))
    del trainer
    w.grad = None
    acc = gf.GradientAccumulator(sgd(w), steps=1)
    acc.backward(loss(w, 2.0))
    acc.step()
    assert w.item() == -2.0


def test_a_model_that_was_fitted_twice() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batch = torch.randn(8, 4)
    optimizer = sgd(*model.parameters(), lr=0.1)

    def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    steps = [gf.fit(model, optimizer, loss_fn, batch, memory="64 MiB") for _ in range(2)]
    reference = copy.deepcopy(model)
    plain = sgd(*reference.parameters(), lr=0.1)
    for step in (*steps, *steps):
        step(batch)
        plain.zero_grad()
        loss_fn(reference, batch).backward()
        plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- inside of a micro-batch ---------------------------------------------------------------------

CALLS: dict[str, Callable[[gf.GradientAccumulator], Any]] = {
    "step": lambda acc: acc.step(),
    "flush": lambda acc: acc.flush(),
    "reset": lambda acc: acc.reset(),
    "optimizer.step": lambda acc: acc.optimizer.step(),
    "load_state_dict": lambda acc: acc.load_state_dict(STATE),
    "state_dict": lambda acc: acc.state_dict(),
    "is_ready": lambda acc: acc.is_ready,
    "apply_gradients": lambda acc: acc.apply_gradients(print),
    "disable_accumulation": lambda acc: acc.disable_accumulation(),
    "accumulation_count": lambda acc: setattr(acc, "accumulation_count", 7),
    "enabled": lambda acc: setattr(acc, "enabled", False),
}
STATE: dict[str, Any] = gf.GradientAccumulator(sgd(weight()), steps=3, isolate=True).state_dict()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_what_ends_a_window_is_refused_inside_a_micro_batch(
    name: str, other_thread: bool, early: bool
) -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=3, isolate=True)
    call = CALLS[name]
    acc.backward(loss(w, 1.0))
    acc.step()
    with acc.micro_batch():
        if not early:
            loss(w, 2.0).backward()
        error: BaseException | None = None
        if other_thread:
            error = in_thread(lambda: call(acc))
        else:
            with pytest.raises(gf.MisuseError) as caught:
                call(acc)
            error = caught.value
        assert isinstance(error, gf.MisuseError)
        assert "micro_batch" in str(error)
        assert "Call it" in str(error)
        if early:
            loss(w, 2.0).backward()
    acc.step()
    acc.backward(loss(w, 3.0))
    result = acc.step()
    assert (result.stepped, result.micro_batches, w.item()) == (True, 3, -2.0)


@pytest.mark.parametrize("fill", [False, True])
def test_zero_grad_inside_a_micro_batch(fill: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=2, isolate=True)
    acc.backward(loss(w, 1.0))
    acc.step()
    with pytest.raises(gf.MisuseError, match="Leave optimizer"), acc.micro_batch():  # noqa: PT012
        loss(w, 5.0).backward()
        optimizer.zero_grad(set_to_none=not fill)
    with acc.micro_batch():
        optimizer.zero_grad(set_to_none=not fill)  # of nothing
        loss(w, 3.0).backward()
    assert acc.step()
    assert w.item() == -2.0


# -- clearing and changing gradients -------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("fill", [False, True])
def test_zero_grad_at_the_top_of_each_iteration(own: bool, fill: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=4)
    said = r"cleared in the middle.*1 of 4.* only after a step.*acc.step\(\)"
    with pytest.raises(gf.MisuseError, match=said):  # noqa: PT012
        for x in (1.0, 2.0, 3.0, 4.0):
            optimizer.zero_grad(set_to_none=not fill)
            acc.backward(loss(w, x)) if own else loss(w, x).backward()
            acc.step()
    assert w.item() == 0.0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("fill", [False, True])
def test_zero_grad_where_it_belongs(own: bool, fill: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    for at, x in enumerate((1.0, 3.0, 2.0, 4.0)):
        if at % 2 == 0:
            optimizer.zero_grad(set_to_none=not fill)
        acc.backward(loss(w, x)) if own else loss(w, x).backward()
        acc.step()
    assert w.item() == -5.0


def test_clipping_sums_by_hand_is_refused() -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    loss(w, 3.0).backward()
    nn.utils.clip_grad_norm_([w], 1.0)
    with pytest.raises(gf.MisuseError, match=r"changed by hand.* acc.is_ready"):
        acc.flush()
    acc.reset()
    for x in (3.0, 5.0):
        loss(w, x).backward()
    assert acc.is_ready
    nn.utils.clip_grad_norm_([w], 1.0, foreach=False)
    assert acc.step()
    assert w.item() == pytest.approx(-1.0, rel=1e-5)


@pytest.mark.parametrize("steps_by_hand", [3, 4])
@pytest.mark.parametrize("own", [False, True])
def test_an_optimizer_that_was_not_handed_over(steps_by_hand: int, own: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(steps=4, parameters=[w])

    def backward(x: float) -> None:
        acc.backward(loss(w, x)) if own else loss(w, x).backward()

    for at, x in enumerate((1.0, 2.0, 3.0, 6.0) * 2):
        if at == 3 and steps_by_hand == 3:
            with pytest.raises(
                gf.MisuseError, match=r"updated in the middle.*3 of 4.* Pass the optimizer"
            ):
                backward(x)
            return
        backward(x)
        if (at + 1) % steps_by_hand == 0:
            optimizer.step()
            if steps_by_hand == 4:
                optimizer.zero_grad()
    assert (w.item(), acc.windows) == (-6.0, 2)


def test_parts_of_a_micro_batch_without_an_optimizer() -> None:
    a, b = weight(), weight()
    acc = gf.GradientAccumulator(steps=2, parameters=[a, b])
    for x in (1.0, 3.0):
        loss(a, x).backward()
        loss(b, 10 * x).backward()
        result = acc.step()
        assert (result.reason, result.micro_batches) == (
            ("accumulating", 1) if x == 1.0 else ("no optimizer", 2)
        )
    assert (a.grad.item(), b.grad.item()) == (2.0, 20.0)


def test_stepped_but_not_cleared() -> None:
    w = weight()
    optimizer = sgd(w)
    for handed in (True, False):
        acc = gf.GradientAccumulator(optimizer if handed else None, steps=2, parameters=[w])
        for x in (1.0, 3.0):
            loss(w, x).backward()
        assert acc.is_ready
        optimizer.step()
        with pytest.raises(
            gf.MisuseError, match=r"optimizer.zero_grad\(\)\s+after optimizer.step\(\)"
        ):
            loss(w, 1.0).backward()
        assert w.grad.item() == 2.0
        optimizer.zero_grad()
        loss(w, 1.0).backward()
        acc.reset()
    assert w.item() == -4.0


# -- updates by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_apply_gradients_window_after_window(own: bool, reset: bool) -> None:
    w = weight()
    acc = gf.GradientAccumulator(steps=2, parameters=[w])
    applied = []
    for x in (1.0, 3.0) * 3:
        acc.backward(loss(w, x)) if own else loss(w, x).backward()
        if acc.is_ready:
            acc.apply_gradients(lambda tensor: applied.append(tensor.grad.item()))
            assert w.grad.item() == 2.0
            if reset:
                acc.reset_gradients()
    assert (applied, acc.windows) == ([2.0] * 3, 2 if reset else 3) or reset


def test_plain_passes_into_a_broken_window_are_not_lost_in_silence() -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    with pytest.raises(RuntimeError, match="half-way"):
        acc.backward(Fails.apply(loss(w, 1.0)))
    loss(w, 1.0).backward()
    with pytest.raises(gf.MisuseError, match=r"failed half-way.* Call reset\(\)"):
        acc.flush()


def test_apply_gradients_that_fails_half_way() -> None:
    a, b = weight(), weight()
    acc = gf.GradientAccumulator(steps=1, parameters=[a, b])
    (loss(a, 1.0) + loss(b, 1.0)).backward()

    def fail(tensor: torch.Tensor) -> None:
        if tensor is b:
            raise RuntimeError("no")
        with torch.no_grad():
            tensor.sub_(tensor.grad)

    with pytest.raises(RuntimeError, match="no"):
        acc.apply_gradients(fail)
    with pytest.raises(gf.MisuseError, match=r"half-way.* Call reset\(\)"):
        acc.apply_gradients(fail)


@pytest.mark.parametrize("own", [False, True])
def test_step_without_a_pass_counts_nothing(own: bool) -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    acc.step()
    for x in (1.0, None, 1.0):
        if x is not None:
            acc.backward(loss(w, x)) if own else loss(w, x).backward()
        result = acc.step()
    assert (result.stepped, result.micro_batches, w.item()) == (True, 2, -1.0)


def test_a_gradient_put_by_hand_beside_passes() -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    acc.backward(loss(w, 1.0), weight=5)
    acc.step()
    w.grad += 1.0
    with pytest.raises(
        gf.MisuseError, match=r"by hand.* accumulator.backward\(loss\).* Call reset\(\)"
    ):
        acc.step()
    acc.reset()
    for x in (1.0, 3.0):
        w.grad = torch.full_like(w, x) if w.grad is None else w.grad + x
        acc.step()
        acc.step()  # nothing new
    assert w.item() == -2.0


# -- parameter groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["isolate", "plain", "own", "dtype"])
def test_a_parameter_added_in_the_middle_of_a_window(how: str) -> None:
    a, b = weight(), weight()
    optimizer = sgd(a)
    options: dict[str, Any] = {"isolate": {"isolate": True}, "dtype": {"dtype": torch.float64}}.get(
        how, {}
    )
    acc = gf.GradientAccumulator(optimizer, steps=2, **options)
    run = (lambda one: one.backward()) if how == "plain" else acc.backward
    run(loss(a, 1.0))
    acc.step()
    optimizer.add_param_group({"params": [b]})
    run(loss(a, 1.0) + loss(b, 1.0))
    state = acc.state_dict()
    assert "grad.1" in state["tensors"]
    assert acc.step()
    assert (a.item(), b.item()) == (-1.0, -0.5)
    acc.load_state_dict(state)
    assert acc.step()
    assert (a.item(), b.item()) == (-2.0, -1.0)


def test_a_parameter_added_inside_a_micro_batch_that_is_taken_back() -> None:
    a, b = weight(), weight()
    optimizer = sgd(a)
    acc = gf.GradientAccumulator(optimizer, steps=2, isolate=True)
    acc.backward(loss(a, 1.0))
    acc.step()
    with pytest.raises(RuntimeError, match="no"), acc.micro_batch():  # noqa: PT012
        optimizer.add_param_group({"params": [b]})
        (loss(a, 7.0) + loss(b, 7.0)).backward()
        raise RuntimeError("no")
    assert (a.grad.item() != 0, b.grad) == (True, None)
    with acc.micro_batch():
        (loss(a, 3.0) + loss(b, 1.0)).backward()
    assert acc.step()
    assert (a.item(), b.item()) == (-2.0, -0.5)


def test_parameters_in_another_order_keep_their_terms() -> None:
    a, b, c = weight(), weight(), weight()
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1.0)
    acc = gf.GradientAccumulator(optimizer, steps=2)
    for at, x in enumerate((1.0, 3.0)):
        acc.backward(terms={"a": (loss(a, x), 1), "b": (loss(b, 10 * x), 1)})
        if at == 0:
            optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": [c]})
        acc.step()
    assert (a.item(), b.item(), c.item()) == (-2.0, -20.0, 0.0)


# -- no weight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["backward", "isolate", "micro_batch", "terms", "nan"])
def test_what_only_weightless_losses_reach_has_a_gradient_of_zeros(how: str) -> None:
    def train(accumulate: bool) -> list[float]:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9, weight_decay=1.0)
        acc = gf.GradientAccumulator(optimizer, steps=2, isolate=how in ("isolate", "micro_batch"))
        for _ in range(2):
            if not accumulate:
                optimizer.zero_grad()
                (loss(a, 2.0) + loss(b, 5.0) * 0).backward()
                optimizer.step()
                continue
            if how == "terms":
                acc.backward(terms={"main": (loss(a, 2.0), 1), "aux": (loss(b, 5.0), 0)})
                acc.backward(terms={"main": (loss(a, 2.0), 1), "aux": (loss(b, 5.0), 0)})
            elif how == "micro_batch":
                with acc.micro_batch(weight=0):
                    loss(b, 5.0).backward()
                with acc.micro_batch(weight=3):
                    loss(a, 2.0).backward()
            else:
                acc.backward(loss(a, 2.0), weight=3)
                acc.backward(loss(b, math.nan if how == "nan" else 5.0), weight=0)
            assert b.grad.item() == 0.0
            assert acc.flush()
        return [a.item(), b.item()]

    assert train(True) == pytest.approx(train(False), rel=1e-6)


def test_weightless_losses_of_a_sparse_table() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    acc = gf.GradientAccumulator(sgd(*table.parameters()), steps=2)
    acc.backward(table(torch.tensor([1, 2])).sum() * math.nan, weight=0)
    gradient = table.weight.grad.coalesce()
    assert (gradient.indices().tolist(), gradient.values().any().item()) == ([[1, 2]], False)


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["backward", "isolate", "terms", "mixed"])
def test_backward_and_step_in_every_thread(how: str) -> None:
    """Every micro-batch comes in once, with its weight, whoever ends the window that it is in."""
    for _ in range(5):
        w = weight()
        acc = gf.GradientAccumulator(sgd(w), steps=4, isolate=how == "isolate")
        results = []
        barrier = threading.Barrier(4)

        def work(index: int) -> None:
            barrier.wait()  # noqa: B023
            for _ in range(6):
                if how == "terms" or (how == "mixed" and index % 2):
                    acc.backward(terms={"a": (loss(w, 2.0), 1)})  # noqa: B023
                else:
                    acc.backward(loss(w, 2.0))  # noqa: B023
                results.append(acc.step())  # noqa: B023

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 24
        stepped = [one for one in results if one.stepped]
        rest = acc.flush()
        stepped += [rest] if rest.stepped else []
        if how != "mixed":  # there a window's gradient is the sum of two losses, if it holds both
            assert all(one.grad_norm == pytest.approx(2.0) for one in stepped)
            assert sum(one.weight for one in stepped) == 24
            assert w.item() == pytest.approx(-2.0 * len(stepped))


def test_a_plain_pass_that_dies_in_another_thread() -> None:
    a, b = weight(), weight()
    acc = gf.GradientAccumulator(sgd(a, b), steps=1)
    error = in_thread(lambda: (Fails.apply(loss(a, 1.0)) * loss(b + 1, 1.0)).backward())
    assert "half-way" in str(error)
    assert (a.grad is None) != (b.grad is None)
    with pytest.raises(gf.MisuseError, match=r"failed half-way.* Call reset\(\)"):
        acc.step()
    acc.reset()
    in_thread(lambda: (loss(a, 1.0) + loss(b, 1.0)).backward())
    assert acc.step()
    assert (a.item(), b.item()) == (-1.0, -1.0)


class Waits(torch.autograd.Function):
    """Stops in the middle of a backward pass, until it may go on."""

    reached, go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Waits.reached.set()
        assert Waits.go_on.wait(60)
        return gradient


@pytest.mark.parametrize(
    "name", ["step", "flush", "reset", "is_ready", "state_dict", "optimizer.step"]
)
def test_nothing_is_used_while_a_plain_pass_runs(name: str) -> None:
    a, b = weight(), weight()
    acc = gf.GradientAccumulator(sgd(a, b), steps=1, isolate=True)
    Waits.reached.clear()
    Waits.go_on.clear()
    both = Waits.apply(loss(a + 1, 1.0)) * loss(b + 1, 1.0)  # b's gradient comes first
    thread = threading.Thread(target=both.backward)
    thread.start()
    assert Waits.reached.wait(60)
    try:
        with pytest.raises(
            gf.MisuseError, match=r"another thread runs a plain backward.* Call it when"
        ):
            CALLS[name](acc)
        with pytest.raises(gf.MisuseError, match="plain backward"):
            # isolated, so it would take the other's gradients for its own
            acc.backward(loss(a, 1.0))
    finally:
        Waits.go_on.set()
        thread.join(60)
    assert acc.step()
    assert (a.item(), b.item()) == (-1.0, -1.0)


def test_a_plain_pass_beside_another_threads_micro_batch() -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2, isolate=True)
    with pytest.raises(RuntimeError, match="no"), acc.micro_batch():  # noqa: PT012
        loss(w, 7.0).backward()
        error = in_thread(loss(w, 1.0).backward)
        assert isinstance(error, gf.MisuseError)
        assert "accumulator.backward(loss), which waits" in str(error)
        raise RuntimeError("no")
    assert (w.grad, acc.current_step) == (None, 0)


@pytest.mark.parametrize("where", ["here", "worker", "engine"])
def test_what_counts_as_one_pass_wherever_it_runs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine`: hooks run in a thread of the engine's, whose stack does not show who has called."""
    if where == "engine":
        from gradfit import _torch

        original = _torch._is_python_thread
        main = threading.get_ident()
        monkeypatch.setattr(
            _torch, "_is_python_thread", lambda number: number != main and original(number)
        )
        frames = _torch._engine_calls

        def elsewhere() -> dict[int, Any]:
            return {-1: __import__("sys")._getframe(1)}

        monkeypatch.setattr(_torch.sys, "_current_frames", elsewhere)
        assert frames is _torch._engine_calls
    run: Callable[[Callable[[], Any]], Any] = (
        in_thread if where == "worker" else lambda work: work()
    )
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    acc = gf.GradientAccumulator(steps=8, parameters=layers.parameters())

    def two_losses() -> None:
        h = layers[0](torch.randn(2, 3))
        h.sum().backward(retain_graph=True)
        h.square().sum().backward()

    def reentrant() -> None:
        h = torch.randn(2, 3, requires_grad=True)
        for at, layer in enumerate(layers):
            h = checkpoint(layer, h, use_reentrant=True) if at < 2 else layer(h)
        h.sum().backward()

    for count, work in enumerate((two_losses, reentrant, two_losses, reentrant), 1):
        assert run(work) is None
        assert acc.current_step == count


def test_own_passes_in_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that runs in another thread than the one that called finds out that the pass is a
    window's own.
    """
    from gradfit.accumulate import plain_backwards

    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    monkeypatch.setattr(plain_backwards.threading, "get_ident", lambda: -7)
    plain_backwards.OWN_PASSES[threading.main_thread().ident or 0] = acc.window.plain.token
    try:
        loss(w, 1.0).backward()
    finally:
        plain_backwards.OWN_PASSES.pop(threading.main_thread().ident or 0)
    assert acc.window.state.is_empty


# -- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "take_marks"])
@pytest.mark.parametrize("own", [False, True])
def test_an_interrupt_between_a_pass_and_its_booking(name: str, own: bool) -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    acc.backward(loss(w, 1.0))
    acc.step()
    with interrupt_in(acc.window, name), pytest.raises(KeyboardInterrupt):
        acc.backward(loss(w, 3.0)) if own else loss(w, 3.0).backward()
    if name == "take_marks" and not own:  # it is in as a whole
        assert acc.step()
        assert w.item() == -2.0
        return
    with pytest.raises(gf.MisuseError, match=r"half-way.* Call reset\(\)"):
        acc.step()
    acc.reset()
    for x in (1.0, 3.0):
        acc.backward(loss(w, x))
        acc.step()
    assert w.item() == -2.0


def test_an_interrupt_while_a_micro_batch_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfit.accumulate import transaction

    a, b = weight(), weight()
    acc = gf.GradientAccumulator(sgd(a, b), steps=3, isolate=True)
    for x in (1.0, 3.0):
        acc.backward(loss(a, x) + loss(b, x))
        acc.step()
    calls = []
    original = transaction.add_scaled

    def interrupt(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(transaction, "add_scaled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        acc.backward(loss(a, 5.0) + loss(b, 5.0))
    with pytest.raises(gf.MisuseError, match=r"half-way.* Call reset\(\)"):
        acc.step()


# -- windows by the noise of the gradient --------------------------------------------------------


def noisy_windows(scale: float, seed: int, windows: int = 60, **options: Any) -> list[int]:
    """How many micro-batches of one item each window took, for gradients of a known noise scale."""
    generator = torch.Generator().manual_seed(seed)
    accumulator = gf.DynamicBatchAccumulator(
        strategy=gf.AdaptiveAccumulation(4, by="noise_scale", **options)
    )
    steps = []
    dimension = 16
    for _ in range(windows):
        while not accumulator.is_complete():
            noise = torch.randn(dimension, generator=generator, dtype=torch.float64)
            accumulator.accumulate(
                torch.ones(dimension, dtype=torch.float64) / 4 + noise * math.sqrt(scale) / 4, 1
            )
        steps.append(accumulator.current_step)
        accumulator.reset()
    return steps


def test_the_noise_scale_does_not_run_away() -> None:
    runs = [noisy_windows(9.0, seed) for seed in range(40)]
    assert max(max(run) for run in runs) <= 128
    late = [size for run in runs for size in run[30:]]
    assert 4 <= sum(late) / len(late) <= 25  # 9 items, give or take


def test_windows_of_one_micro_batch_are_measured_again() -> None:
    strategy = gf.AdaptiveAccumulation(1, by="noise_scale")
    accumulator = gf.DynamicBatchAccumulator(strategy=strategy)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for window in range(200):
        noise = 0.01 if window < 60 else 4.0
        while not accumulator.is_complete():
            value = torch.ones(16, dtype=torch.float64) / 4
            value += torch.randn(16, generator=generator, dtype=torch.float64) * noise / 4
            accumulator.accumulate(value, 1)
        sizes.append(accumulator.current_step)
        accumulator.reset()
    assert sizes[20:60].count(1) > 30
    assert max(sizes[150:]) > 4


def test_a_dropped_window_leaves_no_sizes_behind() -> None:
    w = weight()
    strategy = gf.AdaptiveAccumulation(16)
    acc = gf.GradientAccumulator(sgd(w), strategy=strategy)
    for size in (2, 14):
        acc.backward(loss(w, 1.0), weight=size)
        acc.step()
    assert strategy.required_batch_size > 16
    acc.reset()
    assert strategy.required_batch_size == 16


# -- several hands on one parameter --------------------------------------------------------------


def halves() -> tuple[nn.Parameter, gf.GradientAccumulator, nn.Parameter, gf.GradientAccumulator]:
    v, w = weight(), weight()
    return v, gf.GradientAccumulator(sgd(v), steps=2), w, gf.GradientAccumulator(sgd(w), steps=2)


def test_a_pass_of_another_accumulator_is_not_taken_for_put_by_hand() -> None:
    v, first, w, second = halves()
    first.backward(loss(v, 1.0) + loss(w, 2.0))
    first.step()
    with pytest.raises(
        gf.MisuseError, match=r"Another accumulator's backward.*loss\.backward\(\).*reset\(\)"
    ):
        second.step()
    second.reset()
    for x in (1.0, 3.0):
        (loss(v, x) + loss(w, x)).backward()
        first.step()
        second.step()
    assert w.item() == -2.0


def test_a_plain_pass_does_not_add_to_another_accumulator_s() -> None:
    v, first, w, second = halves()
    first.backward(loss(v, 1.0) + loss(w, 2.0))
    with pytest.raises(gf.MisuseError, match="from before this window"):
        loss(w, 1.0).backward()
    second.reset()
    loss(w, 1.0).backward()
    second.step()
    loss(w, 3.0).backward()
    second.step()
    assert w.item() == -2.0


def test_both_accumulators_count_plain_passes() -> None:
    v, first, w, second = halves()
    for x in (1.0, 3.0):
        (loss(v, x) + loss(w, 2 * x)).backward()
        first.step()
        second.step()
    assert (v.item(), w.item()) == (-2.0, -4.0)


@pytest.mark.parametrize("how", ["backward", "plain", "GradAccumulator", "by hand"])
def test_an_optimizer_of_more_parameters_with_gradients_is_refused(how: str) -> None:
    v, w = weight(), weight()
    optimizer = sgd(v, w)
    acc: Any = (
        gf.GradAccumulator(optimizer, [v], 2)
        if how == "GradAccumulator"
        else gf.GradientAccumulator(optimizer, 2, parameters=[v])
    )

    def window() -> None:
        for x in (1.0, 3.0):
            one = loss(v, x) + loss(w, x)
            acc.backward(one) if how == "backward" else one.backward()
            if how != "by hand":
                acc.step()
            elif acc.is_ready:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(gf.MisuseError, match=r"1 of the optimizer's 2.*requires_grad_\(False\)"):
        window()
    assert (v.item(), w.item()) == (0.0, 0.0)
    acc.reset()
    w.requires_grad_(False)
    window()
    assert (v.item(), w.item()) == (-2.0, 0.0)


class Adversaries:
    """A generator `v` and a discriminator `w`, through which its losses go, by two accumulators."""

    def __init__(self, *, asks: bool) -> None:
        self.v, self.maker, self.w, self.judge = halves()
        self.asks = asks

    def end(self, acc: gf.GradientAccumulator) -> None:
        if self.asks:
            if acc.is_ready:
                acc.optimizer.step()
                acc.optimizer.zero_grad()
        else:
            acc.step()

    def train_maker(self) -> None:
        for x in (10.0, 30.0):
            (loss(self.v, x) + loss(self.w, 100 * x)).backward()
            self.end(self.maker)

    def train_judge(self, *, own: bool) -> None:
        for x in (1.0, 3.0):
            one = loss(self.w, x)
            self.judge.backward(one) if own else one.backward()
            self.end(self.judge)


@pytest.mark.parametrize("asks", [False, True], ids=["step", "is_ready"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("maker_first", [False, True])
def test_a_generators_passes_are_no_micro_batches_of_its_discriminator(
    asks: bool, own: bool, maker_first: bool
) -> None:
    gan = Adversaries(asks=asks)
    if not maker_first:
        gan.train_judge(own=own)
    gan.train_maker()
    before = gan.w.item()
    with pytest.raises(
        gf.MisuseError, match=r"another accumulator has ended.*Call reset\(\) before"
    ):
        gan.train_judge(own=own)
    assert gan.w.item() == before
    for _ in range(2):
        gan.judge.reset()
        gan.train_judge(own=own)
        gan.train_maker()
    assert (gan.v.item(), gan.w.item()) == (-60.0, before - 4.0)


def test_accumulators_of_other_lengths_may_share_all_passes() -> None:
    """Also where only the shorter one calls `step()` after each of them."""
    v, w = weight(), weight()
    short = gf.GradientAccumulator(sgd(v), steps=2)
    long = gf.GradientAccumulator(sgd(w), steps=4)
    for x in (1.0, 3.0, 5.0, 7.0):
        (loss(v, x) + loss(w, x)).backward()
        short.step()
    assert long.step()
    assert (v.item(), w.item()) == (-8.0, -4.0)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("isolate", [False, True])
def test_an_optimizer_that_steps_in_a_hook_is_refused(plain: bool, isolate: bool) -> None:
    w = weight()
    optimizer = sgd(w)
    acc = gf.GradientAccumulator(steps=2, parameters=[w], isolate=isolate)

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    one = loss(w, 1.0)
    with pytest.raises(gf.MisuseError, match=r"in a hook.*is_ready"):
        one.backward() if plain else acc.backward(one)


def test_the_optimizer_scaler_and_type_stay() -> None:
    w = weight()
    acc = gf.GradientAccumulator(sgd(w), steps=2)
    for name in ("optimizer", "scaler", "dtype"):
        with pytest.raises(AttributeError):
            setattr(acc, name, None)
