"""An audit finds the operation that lies, says what micro-batches cannot be exact about, and leaves
no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from train_models import MODELS, make, same_state

import gradfit as gf


@pytest.fixture
def liar() -> Iterator[Any]:
    """An operator that says it is a function of its input, and is not: no two of its calls return
    the same.

    It has one of torch's own namespaces: what others write in Python is never replayed.
    """
    calls = 0
    with torch.library._scoped_library("mkl", "FRAGMENT"):

        @torch.library.custom_op("mkl::gradfit_tests_liar", mutates_args=())
        def lies(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * (1 + 0.01 * calls)

        lies.register_autograd(lambda ctx, gradient: gradient)
        yield lies


class Lying(nn.Module):
    def __init__(self, lies: Any) -> None:
        super().__init__()
        self.first, self.second, self.lies = nn.Linear(8, 8), nn.Linear(8, 8), lies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.lies(torch.relu(self.first(x)))))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_models_are_identical_and_as_they_were(name: str) -> None:
    model, batch, loss_fn = make(name)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradients = {}
    for parameter in model.parameters():
        parameter.grad = gradients[parameter] = torch.ones_like(parameter)
    report = gf.audit(model, loss_fn, batch)
    assert report
    assert report.identical
    assert report.differences == ()
    assert report.first_operation is None
    assert report.compared["gradient"] == sum(1 for p in model.parameters() if p.requires_grad)
    assert report.compared["activation"] > 10
    assert same_state(model, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is gradients[p] and bool((p.grad == 1).all()) for p in model.parameters())
    assert str(report).startswith("replay: bit-identical (")


def test_a_plan_is_audited_in_its_micro_batches() -> None:
    model, batch, loss_fn = make("gpt2")
    found = gf.profile(model, loss_fn, batch)
    plan = gf.plan(found, memory=int(gf.plan(found, memory="1 GiB").peak_bytes * 0.5), batch_size=8)
    report = gf.audit(model, loss_fn, batch, plan=plan)
    assert report.identical
    assert (report.micro_batch, report.micro_batches) == (plan.micro_batch, plan.steps)
    assert plan.steps > 1
    assert report.compared["output"] == plan.steps


def test_a_replay_that_lies_is_found_and_named(liar: Any) -> None:
    torch.manual_seed(0)
    model, batch = Lying(liar), torch.randn(4, 8)
    before = copy.deepcopy(model.state_dict())
    report = gf.audit(model, square, batch)
    assert not report
    assert report.first_operation is not None
    # Of what autograd saves, and so of what is compared, tanh's result is the first behind the lie.
    assert "tanh" in report.first_operation
    assert {difference.kind for difference in report.differences} >= {"gradient", "activation"}
    assert all(difference.largest > 0 for difference in report.differences)
    assert "DIFFERENT" in str(report)
    assert report.first_operation in str(report)
    assert same_state(model, before)


def test_a_lie_that_is_saved_is_named_itself(liar: Any) -> None:
    torch.manual_seed(0)

    class Saved(Lying):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.lies(self.first(x)))

    report = gf.audit(Saved(liar), square, torch.randn(4, 8))
    assert report.first_operation is not None
    assert "mkl.gradfit_tests_liar" in report.first_operation


def test_a_lie_that_is_not_replayed_is_found_in_the_forward() -> None:
    calls = 0

    @torch.library.custom_op("gradfit_tests::liar", mutates_args=())
    def lies(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    lies.register_autograd(lambda ctx, gradient: gradient)
    report = gf.audit(Lying(lies), square, torch.randn(4, 8))
    assert not report.identical
    assert report.first_operation is not None
    assert report.first_operation.startswith("gradfit_tests.liar")


class Counting(nn.Module):
    """State that is no attribute of a module: two runs from the same state are not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.calls += 1
        return self.linear(x) * self.own.calls


def test_hidden_state_is_told_apart_from_a_replay_that_differs() -> None:
    report = gf.audit(Counting(), square, torch.ones(3, 4))
    assert not report.identical
    assert report.first_operation is not None
    assert report.first_operation.startswith("aten.mul")
    assert any("the model itself gives different results" in note for note in report.notes)
    assert any(difference.kind == "output" for difference in report.differences)


def test_json_round_trip(liar: Any) -> None:
    good = gf.audit(nn.Linear(4, 1), square, torch.ones(3, 4))
    assert gf.AuditReport.from_json(good.to_json()) == good
    bad = gf.audit(Lying(liar), square, torch.randn(4, 8))
    assert gf.AuditReport.from_json(bad.to_json()) == bad


def split_plan(model: nn.Module, loss_fn: Any, batch: Any) -> gf.Plan:
    found = gf.profile(model, loss_fn, batch)
    plan = gf.plan(found, memory="1 GiB", batch_size=8, micro_batch=2, exact=False)
    assert plan.steps == 4
    return plan


def test_a_loss_that_couples_the_batch_is_noted() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(6, 6), torch.randn(8, 6)

    def contrastive(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = nn.functional.normalize(m(x), dim=1)
        return nn.functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))

    report = gf.audit(model, contrastive, batch, plan=split_plan(model, contrastive, batch))
    assert report.identical  # to plain PyTorch at the same split
    assert any("couples the batch" in note and "gf.chunked" in note for note in report.notes)
    report = gf.audit(model, square, batch, plan=split_plan(model, square, batch))
    assert report.notes == ()


def test_batch_norm_is_noted_where_the_batch_is_split() -> None:
    torch.manual_seed(0)
    model, batch = (
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)),
        torch.randn(8, 6),
    )
    before = copy.deepcopy(model.state_dict())
    report = gf.audit(model, square, batch, plan=split_plan(model, square, batch))
    assert report.identical
    assert report.compared["buffer"] == 3
    assert any("BatchNorm (1)" in note for note in report.notes)
    assert gf.audit(model, square, batch).notes == ()  # in one piece there is nothing to say
    assert same_state(model, before)


def test_functions_of_tensors() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    report = gf.audit(lambda a, b: torch.sin(a * b).exp(), batch=(x, y))
    assert report.identical
    assert report.compared["gradient"] == 1
    assert x.grad is None


def test_misuse() -> None:
    with pytest.raises(gf.MisuseError, match=r"model=3 .* or a function"):
        gf.audit(3, batch=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(gf.MisuseError, match="loss_fn"):
        gf.audit(nn.Linear(2, 2), batch=torch.ones(2, 2))
    with pytest.raises(gf.MisuseError, match="batch="):
        gf.audit(lambda x: x)
