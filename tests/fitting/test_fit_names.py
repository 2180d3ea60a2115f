"""`fit` plans around what was asked for by name, and still holds the budget exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfit as gf

WIDTH, ROWS = 32, 16


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + gf.name(torch.tanh(gf.name(layer(x), "linear")), "tanh").sin()
        return x


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def rows(count: int = ROWS) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 16, WIDTH)


def fitted(memory: Any, **options: Any) -> tuple[gf.TrainStep, Network]:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gf.fit(model, optimizer, square, rows(), memory, **options), model


def names_of(step: gf.TrainStep, name: str) -> set[str]:
    (tested,) = step.known
    return {step.plan.actions[value] for value in tested.profile.names[name]}


def updated_plainly() -> Network:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square(model, rows()).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"keep": ["tanh"]},
        {"rebuild": ["tanh"]},
        {"offload": ["tanh"]},
        {"rebuild": ["tanh"], "micro_batch": "whole"},
    ],
    ids=str,
)
def test_a_step_does_what_was_asked_for_within_its_budget(options: dict[str, Any]) -> None:
    free, _ = fitted("1 GiB")
    budget = int(0.8 * free.plan.peak_bytes)
    step, model = fitted(budget, **options)
    (action,) = {"keep", "rebuild", "offload"} & options.keys()
    assert names_of(step, "tanh") == {action}
    assert "fixed by name: 'tanh'" in str(step.plan)
    result = step(rows())
    assert result.stepped
    assert result.peak_bytes <= budget
    for ours, plain in zip(model.parameters(), updated_plainly().parameters(), strict=True):
        if step.plan.steps == 1:
            assert torch.equal(ours, plain)
        else:
            assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_without_a_budget_a_name_is_rebuilt_all_the_same() -> None:
    step, model = fitted(None, rebuild=["linear"])
    assert names_of(step, "tanh") == {"keep"}
    assert step(rows()).stepped
    for ours, plain in zip(model.parameters(), updated_plainly().parameters(), strict=True):
        assert torch.equal(ours, plain)


def test_other_shapes_do_it_too() -> None:
    step, _ = fitted("1 GiB", rebuild=["tanh"])
    step(rows())
    step(rows(8))
    step(torch.randn(4, 24, WIDTH))
    assert all(one.profile.fixed == {"tanh": "rebuild"} for one in step.known)


def test_what_cannot_be_is_refused_and_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = Network()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gf.UnknownName, match=r"'nothing'.*'linear', 'tanh'"):
        gf.fit(model, optimizer, square, rows(), "1 GiB", keep=["nothing"])
    with pytest.raises(gf.MisuseError, match="in one of them"):
        gf.fit(model, optimizer, square, rows(), "1 GiB", keep=["tanh"], offload=["tanh"])
    with pytest.raises(gf.MisuseError, match="offload"):
        gf.fit(model, optimizer, square, rows(), "1 GiB", offload="tanh")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_budget_that_names_do_not_allow_is_refused_with_their_bytes() -> None:
    smallest = 120_000
    with pytest.raises(gf.BudgetInfeasible, match=r"Fixed by name: 'tanh' kept"):
        fitted(smallest, keep=["tanh"], micro_batch="whole")


def test_plans_of_other_names_are_not_taken_up() -> None:
    step, _ = fitted("1 GiB", keep=["tanh"])
    again, _ = fitted("1 GiB", keep=["tanh"], known=step.known)
    assert again.plan.named == step.plan.named
    with pytest.raises(gf.MisuseError, match="known="):
        fitted("1 GiB", known=step.known)
    free, _ = fitted("1 GiB")
    with pytest.raises(gf.MisuseError, match="known="):
        fitted("1 GiB", keep=["tanh"], known=free.known)
