"""Trials of plans: which micro-batches they run, and that their peak is a step's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf

ROWS, WIDTH = 24, 48


class Routed(nn.Module):
    """Two experts, of which the rows' first number picks one."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=sparse)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for expert in self.experts:
            h = torch.tanh(expert(h))
        return h


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def chain() -> nn.Module:
    return nn.Sequential(*(one for _ in range(5) for one in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def fitted(model: nn.Module, batch: torch.Tensor) -> tuple[gf.TrainStep, list[int], int]:
    """A step of micro-batches of 4, the sizes that its last trial ran, and the trial's peak."""
    seen: list[int] = []

    def noted(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch))
        return square(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, noted, batch, "64 MiB", micro_batch=4)
    sizes = seen[-2:]
    return step, sizes, step.known[0].tested_bytes


def test_one_of_several_micro_batches_is_run_and_its_peak_is_the_steps() -> None:
    torch.manual_seed(0)
    step, sizes, tested = fitted(chain(), torch.rand(ROWS, WIDTH))
    assert sizes[-1] == 4
    assert sizes[-2] != 4
    assert step(torch.rand(ROWS, WIDTH)).peak_bytes <= step.known[0].peak_bytes
    assert tested > 0


def test_gradients_that_are_there_are_of_the_type_they_add_up_in() -> None:
    torch.manual_seed(0)
    model, batch = chain().bfloat16(), torch.rand(ROWS, WIDTH).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, square, batch, "64 MiB", micro_batch=4, dtype=torch.float32)
    assert step(batch).peak_bytes <= step.known[0].peak_bytes


@pytest.mark.parametrize("sparse", [False, True])
def test_two_are_run_where_not_all_gradients_are_as_large_as_their_parameters(sparse: bool) -> None:
    """A parameter without a gradient takes no memory for one, nor does a sparse one as much."""
    torch.manual_seed(0)
    model = Routed(sparse)
    _, sizes, tested = fitted(model, torch.randint(0, 9, (ROWS, 6)))
    assert sizes == [4, 4]
    trained = sum(p.nbytes for p in model.parameters())
    assert tested < 2 * trained + (1 << 20)


def test_the_trial_leaves_no_gradient_and_those_that_were_there_do_not_count() -> None:
    model = chain()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fitted(model, torch.rand(ROWS, WIDTH))
    assert all(parameter.grad is None for parameter in model.parameters())


class OneRowIsAnother(nn.Module):
    """Of a single row it runs other operations than of several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) if len(x) > 1 else layer(x.clone()))
        return x


def test_a_size_at_which_other_operations_run_is_planned_by_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradfit.fitting import plan_until_held

    left = []
    found = plan_until_held._profile_at
    monkeypatch.setattr(
        plan_until_held, "_profile_at", lambda *given: left.append(1) or found(*given)
    )
    torch.manual_seed(0)
    model, batch = OneRowIsAnother(), torch.rand(8, 256, 64)
    with gf.meter(model, batch) as live:
        square(model, batch[:1]).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, square, batch, live.peak_bytes, tile=False)
    assert step.plan.micro_batch == 1
    assert not left
    assert step(batch).peak_bytes <= live.peak_bytes


class DeepWhereAllHaveGradients(nn.Module):
    """As if layers were left out at random, and the trial's first micro-batch had more of them:
    `unused` only ever has a gradient where somebody has put one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(x))
        for _ in range(0 if self.unused.weight.grad is None else 20):
            h = torch.tanh(h)
        return h


def test_what_is_saved_is_of_the_micro_batches_whose_peak_is_measured() -> None:
    """A step may save no more than was saved where its peak was measured: it went past the budget
    by what a micro-batch had saved whose peak did not count.
    """
    torch.manual_seed(0)
    step, sizes, _ = fitted(DeepWhereAllHaveGradients(), torch.rand(ROWS, WIDTH))
    assert sizes == [4, 4]
    tested = step.known[0]
    assert tested.plan.keeps_everything
    activations = 4 * WIDTH * 4
    assert tested.saved_bytes is not None
    assert tested.saved_bytes < WIDTH * WIDTH * 4 + 10 * activations
