"""Copies and pickles: they work, or are refused with what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf


def sgd(tensor: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor], lr=0.1)


def context() -> gf.AccumulationContext:
    window = gf.AccumulationContext(2)
    window.register_tensor(torch.ones(2, requires_grad=True))
    return window


def step() -> gf.TrainStep:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gf.fit(model, optimizer, lambda m, x: m(x).mean(), torch.ones(4, 2), memory="1 MiB")


def plan() -> gf.AppliedPlan:
    return gf.apply(nn.Linear(2, 2), step().plan)


WEIGHT = torch.ones(2, requires_grad=True)
REFUSED: dict[str, Callable[[], Any]] = {
    "accumulator": lambda: gf.GradientAccumulator(sgd(torch.ones(2, requires_grad=True)), steps=2),
    "plain accumulator": lambda: gf.GradAccumulator(sgd(WEIGHT), [WEIGHT], 2),
    "window": context,
    "step": step,
    "applied plan": plan,
    "budget": lambda: gf.budget("1 GiB"),
}
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_live_tensors_is_refused(name: str, way: Callable[[Any], Any]) -> None:
    with pytest.raises(gf.MisuseError, match=r"cannot be copied or pickled.*\. (Make|Call) "):
        way(REFUSED[name]())


def test_a_scope_in_a_copied_or_saved_model_is_a_scope_of_its_own() -> None:
    scope = gf.CheckpointScope("layer", use_recomputation=False)
    x = torch.ones(4, requires_grad=True)
    with gf.CheckpointScope("around"), scope:
        loss = x.exp().sin().sum()
    for twin in (copy.deepcopy(scope), pickle.loads(pickle.dumps(scope))):
        assert (twin.name, twin.is_enabled, twin.use_recomputation) == ("layer", True, False)
        assert not twin.nodes()
    loss.backward()


def test_a_model_under_an_accumulator_is_copied_without_it() -> None:
    model = nn.Linear(2, 1)
    accumulator = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 2)).sum().backward()
    assert accumulator.current_step == 0
    assert not gf.has_grad_accumulation(twin.weight)
