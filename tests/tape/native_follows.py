"""A forward that follows its plan, by both cores in one process: `python
tests/tape/native_follows.py`.

They must come to the same operation, save as much, say the same where it is another forward, and
give the same gradients; the native core without asking Python what becomes of an operation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit._torch_native import core
from gradfit.recompute.follow_plan import (
    Diverged,
    PlanFollower,
    Script,
    UnrecordedRest,
    recording,
)


class Net(nn.Module):
    """With masks, writes, several results, constants and a buffer that it counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.another = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            h = F.gelu(up(self.norm(x)) + torch.ones(64))
            x = x + F.dropout(down(h.mul(2).relu_()), 0.1)
            x = torch.cos(x) if self.another else torch.sin(x)
        return self.batch_norm(x)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


asked: list[int] = []
decide = PlanFollower.decide


def counted(self: PlanFollower, func: Any, results: list[torch.Tensor], *call: Any) -> Any:
    asked[-1] += 1
    return decide(self, func, results, *call)


def run(
    model: nn.Module, batch: torch.Tensor, script: Script, rest: UnrecordedRest | None
) -> tuple[Any, ...]:
    """What it came to, and the gradients, or what it said where it left its plan."""
    torch.manual_seed(3)
    model.zero_grad()
    asked.append(0)
    around, follower = recording(script, rest)
    try:
        with around:
            loss = loss_fn(model, batch)
    except Diverged as left:
        return str(left), left.operation, left.name
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return follower.operation, follower.value, follower.rest, *gradients


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def main() -> None:
    PlanFollower.decide = counted  # type: ignore[method-assign]
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(8, 16)
    profile = gf.profile(model, loss_fn, batch)
    kept = gf.plan(profile, memory="1 GiB")
    for rebuilt in ("gelu", "native_layer_norm", "sin", "bernoulli"):
        actions = [
            "rebuild" if value.operation is not None
            and rebuilt in profile.operations[value.operation].name else action
            for value, action in zip(profile.values, kept.actions, strict=True)
        ]  # fmt: skip
        plan = dataclasses.replace(kept, actions=tuple(actions))
        script = Script(plan, [round(value.nbytes.at(8)) for value in profile.values])
        assert "rebuild" in plan.actions, rebuilt
        core().enable(False)
        rest = run(model, batch, script, None)[2]  # the first, which all later ones expect
        for change in ("nothing", "another operation", "more rows", "more saved"):
            model.another = change == "another operation"
            rows = torch.randn(9, 16) if change == "more rows" else batch
            expected = rest
            if change == "more saved":
                expected = UnrecordedRest(rest.saved_bytes - 1, rest.saves, rest.last_rebuilt)
            found = []
            for native in (False, True):
                core().enable(native)
                torch.manual_seed(4)
                found.append(run(model, rows, script, expected))
            assert same(*found), (rebuilt, change, [one[:3] for one in found])
            assert (len(found[0]) == 3) == (change != "nothing"), (rebuilt, change, found[0][:3])
            if change == "nothing":
                assert asked[-1] < asked[-2] / 3, asked[-2:]


if __name__ == "__main__":
    main()
