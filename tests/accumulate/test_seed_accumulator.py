"""The tests that the first document lists, by their names there (docs/seeds.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf


def one_weight(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# -- unit tests ----------------------------------------------------------------------------------


def test_enable_accumulation_on_tensor() -> None:
    w = one_weight(1.0)
    assert not gf.has_grad_accumulation(w)
    gf.enable_grad_accumulation(w)
    assert gf.has_grad_accumulation(w)
    gf.disable_grad_accumulation(w)
    assert not gf.has_grad_accumulation(w)
    accumulator = gf.GradientAccumulator(steps=2)
    accumulator.enable_accumulation([w])
    assert gf.has_grad_accumulation(w)
    assert accumulator.enabled
    del accumulator
    assert not gf.has_grad_accumulation(w)


def test_accumulate_gradients_over_3_steps_verify_sum() -> None:
    w = one_weight(1.0, 2.0)
    accumulator = gf.GradientAccumulator(steps=4)
    accumulator.enable_accumulation([w])
    for x in (1.0, 10.0, 100.0):
        (w * x).sum().backward()
    assert accumulator.current_step == 3
    assert torch.equal(w.grad, torch.full((2,), 111.0, dtype=torch.float64))


def test_automatic_scaling() -> None:
    w = one_weight(1.0)
    accumulator = gf.GradientAccumulator(steps=4)
    accumulator.enable_accumulation([w])
    for x in (1.0, 2.0, 3.0, 6.0):
        (w * x).sum().backward()
    assert accumulator.is_ready
    assert w.grad.item() == 3.0
    assert accumulator.is_ready  # looking twice does not divide twice
    assert w.grad.item() == 3.0


def test_is_ready_at_different_steps() -> None:
    w = one_weight(1.0)
    accumulator = gf.GradientAccumulator(steps=3)
    accumulator.enable_accumulation([w])
    seen = [accumulator.is_ready]
    for _ in range(3):
        (w * 2).sum().backward()
        seen.append(accumulator.is_ready)
    assert seen == [False, False, False, True]
    assert accumulator.progress == 1.0


def test_gradient_reset_after_optimizer_step() -> None:
    w = one_weight(1.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    for _ in range(2):
        accumulator.backward((w * 3).sum())
        result = accumulator.step()
    assert result.stepped
    assert w.item() == -2.0
    assert w.grad is None
    assert accumulator.current_step == 0
    assert not accumulator.is_ready
    assert accumulator.windows == 1


def test_disable_accumulation_clears_state() -> None:
    w = one_weight(1.0)
    accumulator = gf.GradientAccumulator(steps=3)
    accumulator.enable_accumulation([w])
    (w * 2).sum().backward()
    accumulator.disable_accumulation()
    assert accumulator.current_step == 0
    assert not accumulator.is_ready
    assert not accumulator.enabled
    assert not gf.has_grad_accumulation(w)
    (w * 2).sum().backward()
    assert accumulator.current_step == 0
    accumulator.enable_accumulation([w])
    (w * 2).sum().backward()
    assert accumulator.current_step == 1


def test_accumulation_with_multiple_tensors() -> None:
    a, b, c = one_weight(1.0), one_weight(2.0, 3.0), one_weight(4.0)
    accumulator = gf.GradientAccumulator(steps=2)
    accumulator.enable_accumulation([a, b, c])
    (a.sum() * 2 + b.sum()).backward()
    (a.sum() * 4).backward()
    assert accumulator.is_ready
    seen = []
    accumulator.apply_gradients(seen.append)
    assert [id(t) for t in seen] == [id(a), id(b)]
    assert a.grad.item() == 3.0
    assert b.grad.tolist() == [0.5, 0.5]
    accumulator.reset_gradients()
    assert a.grad is None
    assert accumulator.current_step == 0


# -- integration tests ---------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


def trajectory(name: str, batch_size: int, steps: int) -> list[float]:
    """Losses over the whole data after each update, of a linear regression."""
    torch.manual_seed(0)
    x = torch.randn(64, 5, dtype=torch.float64)
    y = x @ torch.randn(5, 1, dtype=torch.float64) + 0.1 * torch.randn(64, 1, dtype=torch.float64)
    model = nn.Linear(5, 1, dtype=torch.float64)
    accumulator = gf.GradientAccumulator(OPTIMIZERS[name](model.parameters()), steps=steps)
    losses = []
    for _ in range(4):
        for rows in torch.arange(64).split(batch_size):
            accumulator.backward(nn.functional.mse_loss(model(x[rows]), y[rows]), weight=len(rows))
            if accumulator.step():
                losses.append(nn.functional.mse_loss(model(x), y).item())
    return losses


def test_linear_regression_batch_4_accumulation_2_equals_batch_8() -> None:
    accumulated, full = trajectory("sgd", 4, 2), trajectory("sgd", 8, 1)
    assert len(accumulated) == len(full) == 32
    torch.testing.assert_close(accumulated, full, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loss_trajectory_with_and_without_accumulation(name: str) -> None:
    torch.testing.assert_close(trajectory(name, 4, 2), trajectory(name, 8, 1), rtol=1e-10, atol=0)


def test_gradient_accumulation_with_momentum_optimizer() -> None:
    torch.testing.assert_close(
        trajectory("momentum", 2, 8), trajectory("momentum", 16, 1), rtol=1e-10, atol=0
    )


def test_gradient_accumulation_with_adam_optimizer() -> None:
    torch.testing.assert_close(
        trajectory("adam", 2, 8), trajectory("adam", 16, 1), rtol=1e-10, atol=0
    )


def test_memory_usage_with_large_accumulation_steps() -> None:
    """256 micro-batches hold no more gradient memory than one: the tensors themselves are the
    same.
    """
    model = nn.Linear(64, 64)
    accumulator = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=256)
    x = torch.randn(2, 64)
    accumulator.backward(model(x).mean(), weight=2)
    accumulator.step()
    storages = [p.grad.data_ptr() for p in model.parameters()]
    for _ in range(254):
        accumulator.backward(model(x).mean(), weight=2)
        assert not accumulator.step()
    assert [p.grad.data_ptr() for p in model.parameters()] == storages


def test_the_loop_as_printed() -> None:
    """The training loop, word for word, against the full batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    inputs, targets = torch.randn(8, 3, 4).double(), torch.randn(8, 3, 1).double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    epochs, num_batches = 3, 8

    accumulator = gf.GradientAccumulator(4)
    accumulator.enable_accumulation(model.parameters())
    for _epoch in range(epochs):
        for batch in range(num_batches):
            output = model(inputs[batch])
            loss = criterion(output, targets[batch])
            loss.backward()
            if accumulator.is_ready:
                optimizer.step()
                optimizer.zero_grad()

    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _epoch in range(epochs):
        for at in (0, 4):
            loss = criterion(
                plain(inputs[at : at + 4].flatten(0, 1)), targets[at : at + 4].flatten(0, 1)
            )
            loss.backward()
            reference.step()
            reference.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert accumulator.windows == 6


def test_accumulation_context() -> None:
    w = one_weight(1.0)
    context = gf.AccumulationContext(target_steps=3)
    context.register_tensor(w)
    for step in range(1, 4):
        (w * 6).sum().backward()
        context.step()
        assert context.accumulation_steps == step
        assert context.is_ready == (step == 3)
    assert (context.target_steps, w.grad.item()) == (3, 6.0)
    context.reset()
    assert (context.accumulation_steps, context.is_ready, w.grad) == (0, False, None)
    context.close()
    (w * 6).sum().backward()
    assert context.accumulation_steps == 0


def test_the_number_of_steps_may_come_first() -> None:
    assert gf.GradientAccumulator(4).accumulation_count == 4
    with pytest.raises(gf.MisuseError, match=r"steps=0 must be at least 1. Pass steps=4"):
        gf.GradientAccumulator(0)
    with pytest.raises(gf.MisuseError, match=r"optimizer=4 is a number.*GradientAccumulator\(4\)"):
        gf.GradientAccumulator(4, 3)
    with pytest.raises(gf.MisuseError, match="optimizer is a bool"):
        gf.GradientAccumulator(True)


def test_an_accumulator_is_disposed_of() -> None:
    w = one_weight(1.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    with gf.GradientAccumulator(optimizer, steps=2) as accumulator:
        (w * 2).sum().backward()
        accumulator.step()
    assert w.grad is None  # an open window goes, and its half of a sum with it
    assert not gf.has_grad_accumulation(w)
    accumulator.dispose()  # once more does nothing
    for use in (
        lambda: accumulator.backward((w * 2).sum()),
        accumulator.step,
        accumulator.flush,
        accumulator.__enter__,
        lambda: accumulator.enable_accumulation([w]),
        lambda: accumulator.micro_batch().__enter__(),
    ):
        with pytest.raises(gf.MisuseError, match=r"closed|micro_batch needs"):
            use()
    (w * 3).sum().backward()  # nobody counts, scales or holds anything from here on
    optimizer.step()
    gradient: Any = w.grad
    assert (w.item(), gradient.item()) == (-2.0, 3.0)


def test_a_context_is_disposed_of() -> None:
    w = one_weight(1.0)
    context = gf.AccumulationContext(2)
    context.register_tensor(w)
    context.dispose()
    (w * 2).sum().backward()
    assert (context.accumulation_steps, w.grad.item()) == (0, 2.0)


def test_lbfgs_accumulates_inside_its_closure() -> None:
    """An optimizer that wants the loss again and again gets each time all micro-batches, as one."""

    def train(parts: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, y = torch.randn(24, 5).double(), torch.randn(24, 1).double()
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        sizes = [24] if parts == 1 else [3, 11, 10]
        accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=len(sizes))

        def closure() -> torch.Tensor:
            accumulator.reset()
            total = torch.zeros((), dtype=torch.float64)
            for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accumulator.backward(loss, weight=len(inputs))
                accumulator.step()
                total += loss.detach() * len(inputs) / len(x)
            return total

        for _ in range(4):
            optimizer.step(closure)
        return [p.detach() for p in model.parameters()]

    for cut, whole in zip(train(3), train(1), strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-8, atol=1e-10)
