"""What a profile and a plan do grows as the model does: counted in operators and simulated
operations, not seconds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.planning.simulate import Simulator
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
    watched: list[int], memory: int | None
) -> None:
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
