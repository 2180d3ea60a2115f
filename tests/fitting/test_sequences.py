"""A plan for each sequence of operations: batches of one shape that do different things each get
one of their own.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.fitting.step_profiles import StepProfiles
from gradfit.planning.api import beginning_like
from gradfit.recompute.follow_plan import Diverged, Script, recording

_ROWS, _WIDTH = 16, 32


class _Branching(nn.Module):
    """A mask that is all ones is dropped, as `transformers` does; then layers whose values are
    worth rebuilding.
    """

    def __init__(self, layers: int = 6, branch_at: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)])
        self.branch_at = branch_at

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        padded = not bool(mask.all())
        for place, layer in enumerate(self.layers):
            if padded and place >= self.branch_at:
                x = x * mask.unsqueeze(-1)
            x = torch.sin(torch.tanh(layer(x)))
        return x


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"], batch["mask"]).square().mean()


def _batch(*, padded: bool, seed: int = 0, length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(_ROWS, length)
    if padded:
        mask[:, -2:] = 0
    return {"x": torch.rand(_ROWS, length, _WIDTH, generator=generator), "mask": mask}


def _twins(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first, second = _Branching(**options), _Branching(**options)
    second.load_state_dict(first.state_dict())
    return first, second


def _budget(model: nn.Module) -> int:
    """Between what keeping everything takes and the least."""
    kept = gf.plan(gf.profile(model, _loss, _batch(padded=True)), memory="1 GiB")
    return kept.peak_bytes - kept.kept_bytes // 2 + 16384


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a planner has profiled."""
    count = [0]
    run = StepProfiles.measure

    def counting(self: StepProfiles, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return run(self, *args, **options)

    monkeypatch.setattr(StepProfiles, "measure", counting)
    return count


@pytest.mark.parametrize("branch_at", [0, 3])
def test_each_sequence_is_planned_once_and_then_switched_to(
    profiled: list[int], branch_at: int
) -> None:
    model, reference = _twins(branch_at=branch_at)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    budget = _budget(model)
    step = gf.fit(model, optimizer, _loss, _batch(padded=False), memory=budget, micro_batch="whole")
    assert not step.plan.keeps_everything
    rng = random.Random(0)
    after = 0
    for number in range(12):
        batch = _batch(padded=number == 0 or rng.random() < 0.5, seed=number)
        with gf.meter(model, optimizer, batch) as live:
            result = step(batch)
        assert live.peak_bytes <= budget
        assert result.online == ""
        plain.zero_grad()
        _loss(reference, batch).backward()
        plain.step()
        if number == 1:
            after = profiled[0]
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, other)
    assert profiled[0] == after  # nothing is profiled once both are known
    assert len({one.plan.operations for one in step.known}) == 2


@pytest.mark.parametrize("padded", [True, False])
def test_a_forward_goes_over_to_a_plan_that_begins_alike(padded: bool) -> None:
    model, reference = _twins(branch_at=3)
    batches = {True: _batch(padded=True), False: _batch(padded=False)}
    profiles = {kind: gf.profile(model, _loss, batch) for kind, batch in batches.items()}
    kept = gf.plan(profiles[not padded], memory="1 GiB")
    first = gf.plan(profiles[not padded], memory=kept.peak_bytes - kept.kept_bytes // 2)
    other = beginning_like(profiles[padded], gf.plan(profiles[padded], memory="1 GiB"), first)
    assert other is not None
    assert not other.keeps_everything
    sizes = [[1 << 30] * len(plan.actions) for plan in (first, other)]
    scripts = [Script(plan, size) for plan, size in zip((first, other), sizes, strict=True)]
    recorder, policy = recording(scripts[0], others=[(scripts[1], None)])
    with recorder:
        loss = _loss(model, batches[padded])
    loss.backward()
    assert policy.script is scripts[1]
    assert policy.diverged is None
    _loss(reference, batches[padded]).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_forward_does_not_go_over_to_a_plan_that_begins_otherwise() -> None:
    model, _ = _twins(branch_at=3)
    profiles = [gf.profile(model, _loss, _batch(padded=padded)) for padded in (False, True)]
    plans = [gf.plan(profile, memory="1 GiB") for profile in profiles]
    plans[0] = gf.plan(profiles[0], memory=plans[0].peak_bytes - plans[0].kept_bytes // 2)
    scripts = [Script(plan, [1 << 30] * len(plan.actions)) for plan in plans]
    recorder, _ = recording(scripts[0], others=[(scripts[1], None)])
    batch = _batch(padded=True)
    with pytest.raises(Diverged) as left, recorder:
        _loss(model, batch)
    assert left.value.operation is not None
    assert left.value.name == "aten.mul.Tensor"


def test_micro_batches_of_one_step_may_follow_different_plans(profiled: list[int]) -> None:
    model, reference = _twins()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    step = gf.fit(
        model, optimizer, _loss, _batch(padded=False), memory=_budget(model), micro_batch=4
    )
    profiles = 0
    for number in range(4):
        batch = _batch(padded=False, seed=number)
        batch["mask"][4:8, -1] = 0  # the second of four
        assert step(batch).online == ""
        plain.zero_grad()
        _loss(reference, batch).backward()
        plain.step()
        profiles = profiled[0] if number == 0 else profiles
    assert profiled[0] == profiles
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-6)


class _Restless(_Branching):
    """Does another thing in each call."""

    calls = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().forward(x, torch.ones_like(mask))
        for position in range(10):
            x = torch.sin(x) if (self.calls * 2654435761 >> position) & 1 else torch.tanh(x)
        return x


def test_what_does_another_thing_each_time_runs_online_and_that_is_said_once() -> None:
    torch.manual_seed(0)
    model = _Restless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = _budget(_Branching())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = gf.fit(
            model, optimizer, _loss, _batch(padded=False), memory=budget, micro_batch="whole"
        )
        results = [step(_batch(padded=False, seed=seed)) for seed in range(12)]
    assert "operation" in results[-1].online
    assert "online" in str(step.plan)
    assert sum("follow no plan" in str(one.message) for one in said) <= 1
    assert len(step.known) <= 10


class _OtherForOneRow(nn.Module):
    """A single row is run by other operations, as some of torch's kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(6)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if len(x) == 1:
                x = x.neg().neg()
            x = torch.sin(torch.tanh(x))
        return x


def test_a_last_part_of_one_row_has_a_plan_of_its_own(profiled: list[int]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    torch.manual_seed(0)
    model, reference = _OtherForOneRow(), _OtherForOneRow()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    batch = torch.rand(8, 64, _WIDTH, dtype=torch.float64)
    found = gf.profile(model, loss_fn, batch)
    kept = gf.plan(found, memory="1 GiB", batch_size=8, micro_batch=4)
    budget = kept.peak_bytes - kept.kept_bytes // 2 + 16384
    step = gf.fit(model, optimizer, loss_fn, batch, memory=budget, micro_batch=4)
    assert not step.plan.keeps_everything
    after = 0
    for number in range(4):
        batch = torch.rand(5, 64, _WIDTH, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with gf.meter(model, optimizer, batch) as live:
                result = step(batch)
        assert live.peak_bytes <= budget
        assert result.online == ""
        assert result.attempts == (2 if number == 0 else 1)
        plain.zero_grad()
        loss_fn(reference, batch).backward()
        plain.step()
        after = after or profiled[0]
    assert profiled[0] == after  # one profile of one row
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, other, rtol=1e-9, atol=1e-12)
