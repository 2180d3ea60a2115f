"""What a user's loss or hooks do that a cut batch cannot follow: said, or refused in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gradfit as gf
from gradfit.fitting.trained_optimizer import check_members


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(12, 4), "y": torch.randint(0, 3, (12,)), "mask": torch.ones(12)}


def masked(model: Any, rows: Any) -> torch.Tensor:
    errors = model(rows["x"]).square().mean(1)
    return (errors * rows["mask"]).sum() / rows["mask"].sum()


def test_one_term_of_several_that_cannot_be_read_is_named() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows["x"]), rows["y"]) + F.relu(masked(model, rows))

    with pytest.warns(gf.ExactnessWarning, match=r"ReluBackward0.*cannot be read.*gf\.Loss"):
        gf.fit(model, optimizer, loss_fn, batch(), memory="64 MiB", micro_batch=3)


def test_terms_that_can_be_read_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, rows: Any) -> torch.Tensor:
        return F.cross_entropy(model(rows["x"]), rows["y"]) + masked(model, rows)

    gf.fit(model, optimizer, loss_fn, batch(), memory="64 MiB", micro_batch=3)
    assert not [one for one in recwarn if one.category is gf.ExactnessWarning]


def test_an_optimizer_that_steps_in_backward_is_refused_before_anything_is_run() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    with pytest.raises(gf.MisuseError, match=r"'weight' has a hook.*step\(batch\)"):
        gf.fit(model, optimizer, masked, batch(), memory="64 MiB")
    assert all(map(torch.equal, model.parameters(), before))


def test_gradfits_own_hooks_are_no_reason_to_refuse() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = gf.GradientAccumulator(optimizer, steps=2)
    check_members(model, optimizer)
    accumulator.close()
