"""With one micro-batch an update, an accumulator is not there: each plain loop around its optimizer
gives what it gives without one, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf

Loop = Callable[[nn.Sequential, torch.optim.Optimizer, list[Tensor]], None]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def clipped(model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        loss(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def with_other_gradients(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    for x in batches:
        loss(model, x).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad + 0.1
        optimizer.step()
        optimizer.zero_grad()


def first_layer_left_out(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    for x in batches:
        optimizer.zero_grad()
        loss(model, x).backward()
        model[0].zero_grad()
        optimizer.step()


def some_batches_left_out(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    for number, x in enumerate(batches):
        optimizer.zero_grad(set_to_none=bool(number % 2))
        loss(model, x).backward()
        if number % 3 != 1:
            optimizer.step()


def two_losses(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    """As a GAN's discriminator has them, of real rows and of made ones."""
    for x in batches:
        optimizer.zero_grad()
        loss(model, x).backward()
        loss(model, -x).backward()
        loss(model, 2 * x).backward()
        optimizer.step()


def sharpness_aware(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    """The gradient of a step is that of parameters that lie uphill."""
    for x in batches:
        loss(model, x).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss(model, x).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


def through_another_model(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> None:
    """A generator's losses go through a discriminator, which clears its gradients at the top."""
    made = nn.Parameter(torch.ones(6, 4))
    for x in batches:
        model.zero_grad()
        loss(model, x).backward()
        loss(model, made.detach()).backward()
        optimizer.step()
        loss(model, made).backward()
        loss(model, 2 * made).backward()


LOOPS = [
    clipped,
    with_other_gradients,
    first_layer_left_out,
    some_batches_left_out,
    two_losses,
    through_another_model,
    sharpness_aware,
]


class StepOfAccumulator:
    """An optimizer to a loop, whose step is its accumulator's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, accumulator: gf.GradientAccumulator
    ) -> None:
        self.accumulator, self.zero_grad = accumulator, optimizer.zero_grad

    def step(self) -> None:
        assert self.accumulator.step().stepped


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("optimizers", [with_momentum, adam])
@pytest.mark.parametrize("loop", LOOPS)
def test_plain_loops_are_as_without_an_accumulator(
    loop: Loop, optimizers: Optimizers, by_hand: bool
) -> None:
    batches = list(torch.randn(7, 6, 4))
    plain = new_model()
    loop(plain, optimizers(plain), batches)
    model = new_model()
    optimizer = optimizers(model)
    with gf.GradientAccumulator(optimizer, steps=1) as accumulator:
        stepper = optimizer if by_hand else StepOfAccumulator(optimizer, accumulator)
        loop(model, stepper, batches)  # type: ignore[arg-type]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_mean_of_many_items_may_be_clipped() -> None:
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=1)
    accumulator.backward(loss(model, x), weight=len(x))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    assert accumulator.step().grad_norm == pytest.approx(0.01, rel=1e-3)


def test_cleared_gradients_of_no_step_are_dropped_with_their_weight() -> None:
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=1)
    accumulator.backward(loss(model, x), weight=5)
    optimizer.zero_grad()
    accumulator.backward(loss(model, x), weight=3)
    assert accumulator.step().weight == 3
    assert accumulator.windows == 2


def test_stepping_an_accumulator_with_cleared_gradients_is_refused() -> None:
    model = new_model()
    optimizer = with_momentum(model)
    accumulator = gf.GradientAccumulator(optimizer, steps=1)
    loss(model, torch.randn(6, 4)).backward()
    optimizer.zero_grad()
    with pytest.raises(gf.MisuseError, match=r"zero_grad\(\) only after a step"):
        accumulator.step()


def test_used_gradients_must_be_cleared_before_the_next_step() -> None:
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=1)
    for _ in range(2):
        loss(model, x).backward()
        if not accumulator.windows:
            optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in (optimizer.step, accumulator.step, accumulator.flush, accumulator.state_dict):
        with pytest.raises(gf.MisuseError, match="from before this window"):
            step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    optimizer.zero_grad()
    loss(model, x).backward()
    optimizer.step()


@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_is_as_without_an_accumulator(clears: bool) -> None:
    batches = list(torch.randn(3, 6, 4))

    def run(accumulates: bool) -> list[Tensor]:
        model = new_model()
        optimizer = with_momentum(model)
        accumulator = gf.GradientAccumulator(optimizer, steps=1) if accumulates else None

        def closure(x: Tensor) -> float:
            if clears:
                optimizer.zero_grad()
            value = loss(model, x)
            value.backward()
            return value.item()

        for x in batches:
            optimizer.step(lambda x=x: closure(x))  # type: ignore[misc]
        assert accumulator is None or accumulator.windows == len(batches)
        return [parameter.detach() for parameter in model.parameters()]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("weights", [(5, 3, 1, 7), None])
def test_what_a_closure_accumulates_is_the_mean_that_its_step_uses(
    steps: int, weights: tuple[int, ...] | None
) -> None:
    batches = list(torch.randn(4, 6, 4, dtype=torch.float64))
    parts = weights or (1,) * steps

    def run(accumulates: bool) -> list[Tensor]:
        model = new_model().double()
        optimizer = with_momentum(model)
        accumulator = gf.GradientAccumulator(optimizer, steps=steps) if accumulates else None

        def closure() -> float:
            optimizer.zero_grad()
            for x, weight in zip(batches, parts, strict=False):
                value = loss(model, x)
                if accumulator is None:
                    (value * weight / sum(parts)).backward()
                elif weights is None:
                    value.backward()
                else:
                    accumulator.backward(value, weight=weight)
            return 0.0

        optimizer.step(closure)
        optimizer.step(closure=closure)
        assert accumulator is None or accumulator.windows == 2
        return [parameter.detach() for parameter in model.parameters()]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b)


def test_the_terms_of_a_closure_are_in_the_gradients_of_its_step() -> None:
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=1)

    def closure() -> float:
        accumulator.backward(
            terms={"square": (6 * loss(model, x), 6), "other": (model(x).sum(), 2)}
        )
        return 0.0

    before = [parameter.detach().clone() for parameter in model.parameters()]
    value = loss(model, x) + model(x).sum() / 2
    gradients = torch.autograd.grad(value, [*model.parameters()])
    optimizer.step(closure)
    for old, gradient, new in zip(before, gradients, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old - 0.1 * gradient)


def test_losses_of_several_threads_add_up() -> None:
    plain, model = new_model(), new_model()
    accumulator = gf.GradientAccumulator(with_momentum(model), steps=1)
    for x in torch.randn(2, 6, 4):
        loss(plain, x).backward()
        loss(plain, -x).backward()
        loss(model, x).backward()
        thread = threading.Thread(target=lambda x=x: loss(model, -x).backward())  # type: ignore[misc]
        thread.start()
        thread.join()
    assert accumulator.step().weight == 1
    optimizer = with_momentum(plain)
    optimizer.step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_used_gradients_are_found_where_a_step_follows_each_pass() -> None:
    """Also if `step()` has ended micro-batches before, and asks little of a usual pass."""
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    for _ in range(2):
        loss(model, x).backward()
        accumulator.step()
    accumulator.accumulation_count = 1
    loss(model, x).backward()
    optimizer.step()
    loss(model, x).backward()
    with pytest.raises(gf.MisuseError, match="from before this window"):
        accumulator.step()


def test_a_mean_that_was_changed_takes_no_further_weights() -> None:
    model = new_model()
    x = torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(with_momentum(model), steps=1)
    accumulator.backward(loss(model, x), weight=5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(gf.MisuseError, match="changed by hand"):
        accumulator.backward(loss(model, x), weight=3)


def test_sums_of_several_micro_batches_are_still_not_to_be_clipped() -> None:
    model = new_model()
    optimizer, x = with_momentum(model), torch.randn(6, 4)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    for _ in range(2):
        loss(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(gf.MisuseError, match="changed by hand"):
        optimizer.step()
    accumulator.reset()
    accumulator.accumulation_count = 1  # from here on they are means
    loss(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
