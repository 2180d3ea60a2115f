"""What a profile and a plan do grows as the model does: counted in operators and simulated
operations, not seconds.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.planning.simulate import Simulator
from gradfit.profiling import measure
from gradfit.profiling.trace import Trace


class _Chain(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.weight = rounds, nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = torch.sin(x * self.weight)
        return x


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operators a profile has watched."""
    count = [0]
    hear = Trace._observe

    def counting(self: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        count[0] += 1
        return hear(self, func, args, kwargs)

    monkeypatch.setattr(Trace, "_observe", counting)
    return count


@pytest.mark.parametrize("memory", [None, 1 << 16])
def test_a_profile_watches_as_much_per_operation_however_many_there_are(
    watched: list[int], memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if every pass took long: how often and at how many sizes is then not the clock's choice
    monkeypatch.setattr(measure, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_LONG_SECONDS", 0.0)
    per_operation = []
    for rounds in (600, 1200):
        watched[0] = 0
        found = gf.profile(_Chain(rounds), _loss, torch.rand(8, 4), memory_bytes=memory)
        per_operation.append(watched[0] / len(found.operations))
    assert per_operation[1] < 1.1 * per_operation[0]
    # of six runs, each a forward, a replay and a backward of two operators
    assert per_operation[1] < 60


def test_a_plan_simulates_as_much_per_operation_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = [0]
    run = Simulator.run

    def counting(self: Simulator, *args: Any, **options: Any) -> Any:
        result = run(self, *args, **options)
        simulated[0] += len(self.graph.op_inputs) + sum(result.replays)
        return result

    monkeypatch.setattr(Simulator, "run", counting)
    per_operation = []
    for rounds in (400, 1600):
        profile = gf.profile(_Chain(rounds), _loss, torch.rand(8, 4))
        kept = gf.plan(profile, memory="1 GiB")
        simulated[0] = 0
        gf.plan(profile, memory=kept.peak_bytes - kept.kept_bytes // 2)
        per_operation.append(simulated[0] / len(profile.operations))
    assert per_operation[1] < 1.5 * per_operation[0]


def _calls(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many Python functions are called."""
    watch = cProfile.Profile(builtins=False)
    watch.enable()
    try:
        result = run()
    finally:
        watch.disable()
    return sum(entry.callcount for entry in watch.getstats()), result


def _first(model: nn.Module, batch: Any) -> torch.Tensor:
    return _loss(model, batch["x"])


def _operations(size: int) -> tuple[nn.Module, Any]:
    return _Chain(size // 2), {"x": torch.rand(8, 4)}


def _layers(size: int) -> tuple[nn.Module, Any]:
    layers = [nn.Linear(4, 4) for _ in range(size // 4)]
    return nn.Sequential(*layers), {"x": torch.rand(8, 4)}


def _strings(size: int) -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), {"x": torch.rand(10 * size, 4), "text": ["word"] * (10 * size)}


def _tensors(size: int) -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), {"x": torch.rand(8, 4), "more": [torch.rand(8) for _ in range(size)]}


@pytest.mark.parametrize("make", [_operations, _layers, _strings, _tensors])
def test_fit_and_a_step_call_as_much_for_each_of_what_there_is(
    make: Callable[[int], tuple[nn.Module, Any]],
) -> None:
    fits, steps = [], []
    for size in (100, 400):
        model, batch = make(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        calls, step = _calls(lambda: gf.fit(model, optimizer, _first, batch, memory="1 GiB"))  # noqa: B023
        fits.append(calls / size)
        for _ in range(3):
            step(batch)
        steps.append(_calls(lambda: step(batch))[0] / size)  # noqa: B023
    assert fits[1] < 1.1 * fits[0]
    assert steps[1] < 1.1 * steps[0]
