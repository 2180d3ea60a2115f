"""Passes for other libraries' loops: a batch whose passes fail is begun anew, whole, or has left no
trace.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.batches.loss import PartLoss
from gradfit.batches.weights import Weight
from gradfit.fitting.other_trainers import MeanInProgress, Passes


class Failing:
    """A mean loss over labels that raises what it is told to, in its n-th call from when it was
    armed.
    """

    def __init__(self) -> None:
        self.countdown, self.error = -1, RuntimeError("nothing")

    def arm(self, calls: int, error: Exception) -> None:
        self.countdown, self.error = calls, error

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error
        return F.cross_entropy(model(batch[0]), batch[1])


def made() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, 16),
        nn.BatchNorm1d(16).eval(),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.Tanh(),
    ]
    model = nn.Sequential(*layers, nn.Linear(16, 16), nn.Linear(16, 3)).double()
    model[6].weight = model[4].weight  # tied
    labels = torch.randint(0, 3, (12,))
    labels[::3] = -100
    return model, (torch.randn(12, 6, dtype=torch.float64), labels)


def run(passes: Passes, model: nn.Module, batch: Any) -> float:
    mean = MeanInProgress()

    def backward(part: PartLoss, weight: Weight) -> None:
        share = mean.add(part.loss, weight, parts=12 / part.rows)
        if share is not None:
            share.backward()  # type: ignore[no-untyped-call]

    passes.run(batch, backward, mean.rewind)
    return float(mean.finish(model.parameters()))


def gradients(model: nn.Module) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("calls", [1, 2, 4])
@pytest.mark.parametrize("had_gradients", [False, True])
def test_a_batch_for_which_memory_ran_out_is_begun_anew(calls: int, had_gradients: bool) -> None:
    model, batch = made()
    loss_fn = Failing()
    passes = Passes(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, "1 GiB", micro_batch=3
    )
    passes.plan(batch)
    before = []
    if had_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = gradients(model)
    torch.manual_seed(1)
    plain = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    for parameter in plain.parameters():
        parameter.grad = None
    expected = run(
        Passes(
            plain, torch.optim.SGD(plain.parameters(), lr=0.1), Failing(), "1 GiB", micro_batch=3
        ),
        plain,
        batch,
    )
    generator = torch.get_rng_state()
    torch.manual_seed(1)
    loss_fn.arm(calls, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."))
    assert run(passes, model, batch) == pytest.approx(expected, rel=1e-12)
    assert loss_fn.countdown < 0, "it did not fail"
    assert torch.equal(torch.get_rng_state(), generator)
    for place, (found, other) in enumerate(zip(gradients(model), gradients(plain), strict=True)):
        torch.testing.assert_close(
            found, other + before[place] if had_gradients else other, rtol=1e-12, atol=1e-14
        )
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("error", [ValueError("the user's own"), gf.MisuseError("said")])
def test_another_failure_leaves_everything_as_it_was(error: Exception) -> None:
    model, batch = made()
    loss_fn = Failing()
    passes = Passes(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, "1 GiB", micro_batch=3
    )
    passes.plan(batch)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    generator = torch.get_rng_state()
    loss_fn.arm(3, error)
    with pytest.raises(type(error), match=str(error)):
        run(passes, model, batch)
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients(model))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_split_of_ones_own_is_asked_once_in_a_step() -> None:
    """For the parts, which say how many rows there are at most; that is enough for this loss."""
    calls: list[int] = []

    def split(batch: Tensor, size: int) -> Any:
        calls.append(size)
        return batch.split(size, dim=1)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    sample = torch.randn(3, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, loss_fn, sample, memory="1 GiB", split=split, micro_batch=2)
    step(sample)
    calls.clear()
    assert step(sample).micro_batches == 4
    assert calls == [2]
