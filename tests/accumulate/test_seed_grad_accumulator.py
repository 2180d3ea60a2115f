"""The tests that the fourth document prints, by their names there and line by line
(docs/seeds.md).
"""

from __future__ import annotations

import pickle

import pytest
import torch

import gradfit as gf
from gradfit import GradAccumulator


def variable(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def set_grad(w: torch.Tensor, *values: float) -> None:
    w.grad = torch.tensor(values, dtype=torch.float64)


def test_construction() -> None:
    w = variable(1.0, 2.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=0.01)
    accum = GradAccumulator(sgd, params, 4)
    assert accum.accumulation_steps == 4
    assert accum.current_step == 0
    assert accum.inner is sgd
    assert accum.inner_mut is sgd


def test_zero_accumulation_steps_errors() -> None:
    w = variable(1.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=0.01)
    with pytest.raises(gf.InvalidParameter) as caught:
        GradAccumulator(sgd, params, 0)
    assert caught.value.name == "accumulation_steps"
    assert caught.value.reason == "must be at least 1"
    assert isinstance(caught.value, gf.MisuseError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.name) == (
        gf.InvalidParameter,
        str(caught.value),
        "accumulation_steps",
    )


def test_step_counting() -> None:
    w = variable(1.0, 2.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=0.1)
    accum = GradAccumulator(sgd, params, 3)

    # Simulate 3 micro-batches.
    set_grad(w, 1.0, 1.0)
    assert accum.step() is False  # step 1 of 3

    set_grad(w, 1.0, 1.0)
    assert accum.step() is False  # step 2 of 3

    set_grad(w, 1.0, 1.0)
    assert accum.step() is True  # step 3 of 3: the update

    # Counter should be reset.
    assert accum.current_step == 0


def test_gradient_scaling() -> None:
    # Gradients are scaled by 1/N before the optimizer step; with lr=1.0 the update is the scaled
    # gradient.
    w = variable(0.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=1.0)
    accum = GradAccumulator(sgd, params, 2)

    set_grad(w, 6.0)
    assert not accum.step()

    set_grad(w, 12.0)  # as if accumulated on top
    assert accum.step()

    assert abs(w.item() - (-6.0)) < 1e-10


def test_flush_before_full_accumulation() -> None:
    w = variable(0.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=1.0)
    accum = GradAccumulator(sgd, params, 4)

    set_grad(w, 8.0)
    accum.step()  # current_step = 1
    assert accum.current_step == 1
    assert accum.flush()

    assert abs(w.item() - (-8.0)) < 1e-10
    assert accum.current_step == 0


def test_flush_no_op_when_no_steps() -> None:
    w = variable(5.0)
    params = [w]
    sgd = torch.optim.SGD(params, lr=1.0)
    accum = GradAccumulator(sgd, params, 4)

    assert not accum.flush()
    assert abs(w.item() - 5.0) < 1e-10


def test_reset_zeroes_gradients_and_counter() -> None:
    w = variable(5.0)
    accum = GradAccumulator(torch.optim.SGD([w], lr=1.0), [w], 4)
    (w * 3).sum().backward()
    accum.step()
    accum.reset()
    assert (w.grad, accum.current_step, accum.flush(), w.item()) == (None, 0, False, 5.0)


def test_debug_text() -> None:
    w = variable(1.0, 2.0)
    accum = GradAccumulator(torch.optim.SGD([w], lr=0.01), [w], 4)
    (w * 3).sum().backward()
    accum.step()
    assert repr(accum) == "GradAccumulator(accumulation_steps=4, current_step=1, num_parameters=1)"


def test_backward_passes_accumulate_and_each_window_is_one_update() -> None:
    w = variable(0.0)
    accum = GradAccumulator(torch.optim.SGD([w], lr=1.0), [w], 2)
    for x, stepped in ((1.0, False), (3.0, True), (5.0, False)):
        (w * x).sum().backward()
        assert accum.step() is stepped
    assert w.item() == -2.0
    accum.flush()
    assert w.item() == -7.0


@pytest.mark.parametrize("optimizer", [None, 4, "sgd"])
def test_what_is_no_optimizer_is_named(optimizer: object) -> None:
    with pytest.raises(gf.MisuseError, match="optimizer"):
        GradAccumulator(optimizer, [variable(1.0)], 4)  # type: ignore[arg-type]
