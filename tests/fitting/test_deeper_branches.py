"""Batches of one shape for which the forward does more than it did when its plan was tried out:
the budget is held in every attempt of a step, as measured from outside.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import gradfit as gf

_WIDTH = 64


class _Deeper(nn.Module):
    """Runs its layer, and functions after it, more often where the numbers are positive.

    Args:
        layers: how often the layer is run, for negative numbers and for positive ones.
        functions: the same for functions of its result.
        late: a layer that only positive numbers meet.
    """

    def __init__(
        self,
        layers: tuple[int, int] = (4, 4),
        functions: tuple[int, int] = (0, 0),
        *,
        late: bool = False,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.late = nn.Linear(_WIDTH, _WIDTH) if late else None
        self.layers, self.functions = layers, functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_deep = int(float(x.sum()) > 0)
        for _ in range(self.layers[is_deep]):
            x = torch.tanh(self.layer(x))
        for _ in range(self.functions[is_deep]):
            x = torch.tanh(x)
        return self.late(x) if self.late is not None and is_deep else x


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _batch(rows: int, sign: int) -> torch.Tensor:
    return sign * torch.rand(rows, _WIDTH, generator=torch.Generator().manual_seed(0))


def _plain_peak(model: nn.Module, batch: torch.Tensor) -> int:
    with gf.meter(model, batch) as live:
        _loss(model, batch).backward()
    model.zero_grad()
    return live.peak_bytes


def _peaks(model: nn.Module, sample: torch.Tensor, budget: int, signs: Sequence[int]) -> list[int]:
    """Of steps with batches of these signs, each in all of its attempts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, _loss, sample, memory=budget)
    peaks = []
    for sign in signs:
        batch = sign * sample.abs()
        with gf.meter(model, optimizer, batch) as live:
            assert step(batch)
        peaks.append(live.peak_bytes)
    return peaks


@pytest.mark.parametrize("room", [4096, 20480])
def test_a_backward_pass_that_was_refused_is_let_go_of_before_the_next_attempt(room: int) -> None:
    torch.manual_seed(0)
    model, sample = _Deeper(layers=(4, 12)), _batch(64, -1)
    budget = _plain_peak(model, sample) + room
    assert max(_peaks(model, sample, budget, (-1, 1, -1, 1, 1))) <= budget


def test_a_step_that_fails_in_its_backward_pass_leaves_nothing_behind() -> None:
    def failing(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the backward pass")

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        waiting = model(x).square().mean()  # its nodes are ready to run when the later ones fail
        y = model(x)
        if fails:
            y.register_hook(failing)
        return waiting + torch.tanh(y).square().mean()

    fails = False
    model, sample = _Deeper(), _batch(64, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, loss_fn, sample, memory="1 MiB")
    step(sample)
    fails = True
    with gf.meter(model, optimizer, sample) as live:
        before = live.current_bytes
        with contextlib.suppress(ValueError):
            step(sample)
        gc.collect()
        assert live.current_bytes <= before + 64


def test_what_held_when_a_batch_left_its_plan_is_begun_with_when_it_does_so_again() -> None:
    torch.manual_seed(0)
    model, sample = _Deeper(layers=(4, 12)), _batch(64, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = _plain_peak(model, sample) + 20480
    step = gf.fit(model, optimizer, _loss, sample, memory=budget, planning_share=0)
    attempts = [step(sign * sample.abs()).attempts for sign in (-1, 1, -1, 1, -1, 1)]
    assert attempts[1] > 2
    assert attempts[2:] == [1, 2, 1, 2]


def test_parameters_that_autograd_saves_are_no_room_for_activations() -> None:
    torch.manual_seed(0)
    model, sample = _Deeper(layers=(12, 12), functions=(0, 80)), _batch(64, -1)
    budget = _plain_peak(model, sample) + 16 * sample.nbytes
    assert max(_peaks(model, sample, budget, (-1, 1, 1))) <= budget


def test_a_gradient_that_the_trial_did_not_have_is_no_room_for_activations() -> None:
    torch.manual_seed(0)
    model, sample = _Deeper(layers=(1, 1), functions=(8, 60), late=True), _batch(16, -1)
    budget = _plain_peak(model, sample) + (1 << 15) + 8 * sample.nbytes
    assert max(_peaks(model, sample, budget, (-1, 1, 1))) <= budget


class _ByTurns(nn.Module):
    """Once it is told to, each second forward is deeper, whatever the numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.is_told, self.calls = False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.is_told
        for _ in range(4 if self.calls % 2 or not self.calls else 12):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.filterwarnings("ignore:Some micro-batches follow no plan")
@pytest.mark.parametrize("room", [0, 20480], ids=["rebuilt", "kept"])
def test_what_a_later_micro_batch_saves_is_looked_at_too(room: int) -> None:
    """It was of a step's first one alone, where the data decide nothing: each step passed."""
    torch.manual_seed(0)
    model, sample = _ByTurns(), _batch(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = _plain_peak(model, sample[:32]) + sample.nbytes + room
    step = gf.fit(model, optimizer, _loss, sample, memory=budget, micro_batch=32)
    assert step.plan.keeps_everything is bool(room)
    model.is_told = True
    peaks = []
    for _ in range(5):
        with gf.meter(model, optimizer, sample) as live:
            assert step(sample).micro_batches == 2
        peaks.append(live.peak_bytes)
    assert max(peaks[2:]) <= budget  # in the first two, what is done by turns is measured, too
