"""An audit follows the plan it is given, and looks at the scopes that are in the code."""

from __future__ import annotations

import torch
from torch import nn

import gradfit as gf


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().mean()
    return result


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))
            for _ in range(8)
        )
    )


def test_every_value_that_the_plan_drops_is_compared() -> None:
    model, batch = network(), torch.randn(16, 32)
    found = gf.profile(model, loss_fn, batch)
    plan = gf.plan(found, memory=int(gf.plan(found, memory="1 GiB").peak_bytes * 0.75))
    report = gf.audit(model, loss_fn, batch, plan=plan)
    assert report.identical
    assert report.notes == ()  # it would say that the plan is for another input
    assert report.compared["activation"] >= plan.saved_values - plan.kept_values > 0


def test_scopes_in_the_code_are_compared_with_the_same_code_without_them() -> None:
    model, batch = network(), torch.randn(16, 32)
    scope = gf.CheckpointScope("all")

    def scoped(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with scope:
            return loss_fn(model, batch)

    report = gf.audit(model, scoped, batch)
    assert report.identical
    freed = scope.stats.freed_bytes
    loss_fn(model, batch).backward()
    assert freed == scope.stats.freed_bytes > 0  # the scope was at work in one run, and only there


def test_a_function_under_a_scope() -> None:
    function = gf.CheckpointScope("function")(lambda x, y: (x * y).exp().sin())
    report = gf.audit(function, batch=(torch.randn(4, requires_grad=True), torch.randn(4)))
    assert report.identical
    assert report.compared["gradient"] == 1
