"""Batches of new shapes: served by arithmetic where a plan that is known holds, and planned for
where it may not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradfit as gf
from gradfit.fitting.families import PlanningTime, _corner
from gradfit.fitting.plan_search import Planner
from gradfit.fitting.tested_plan import Shape, covers, growth, shape_of, tensors_of

_dims = st.lists(st.integers(1, 40), min_size=2, max_size=2).map(tuple)


def _shape(dims: Any) -> Shape:
    return tuple((tuple(sizes), torch.float32) for sizes in dims)


@given(st.lists(_dims, min_size=2, max_size=2), st.lists(_dims, min_size=2, max_size=2))
def test_a_corner_covers_the_shape_it_was_made_for_and_is_not_much_larger(
    old: Any, new: Any
) -> None:
    known, shape = _shape(old), _shape(new)
    size = growth(known, shape)
    assert (size == 1.0) == covers(known, shape)
    corner = _corner([known, shape], known, size)
    assert covers(corner, known)
    assert covers(corner, shape)
    sizes = [n for sizes, _ in known for n in sizes]
    for before, after in zip(sizes, [n for sizes, _ in corner for n in sizes], strict=True):
        assert after <= math.ceil(before * size * 2**0.25) + 1


def test_another_kind_of_batch_has_no_growth() -> None:
    one = shape_of({"x": torch.zeros(2, 3)})
    assert growth(one, shape_of({"x": torch.zeros(2, 3), "y": torch.zeros(2)})) == math.inf
    assert growth(one, shape_of({"x": torch.zeros(2, 3, dtype=torch.float64)})) == math.inf


def test_tensors_are_found_in_objects_that_only_split_can_cut() -> None:
    class Store(dict[str, Any]):
        pass

    class Batch:
        def __init__(self) -> None:
            self.store = Store(x=torch.zeros(3, 2), edges=torch.zeros(2, 5))

    assert [tuple(tensor.shape) for tensor in tensors_of(Batch())] == [(3, 2), (2, 5)]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(3):
            h = torch.softmax(h @ h.transpose(1, 2) / 8, dim=-1) @ torch.tanh(h)
        return self.last(h)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    count = [0]
    run = Planner._profile

    def counting(self: Planner, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return run(self, *args, **options)

    monkeypatch.setattr(Planner, "_profile", counting)
    return count


def _peak(model: nn.Module, batch: torch.Tensor) -> int:
    with gf.meter(model, batch) as live:
        _loss(model, batch).backward()
    model.zero_grad()
    return live.peak_bytes


@pytest.mark.parametrize("room", [8.0, 1.2])
def test_many_lengths_hold_the_budget_with_few_plans(profiled: list[int], room: float) -> None:
    torch.manual_seed(0)
    model, reference = _Attention(), _Attention()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    longest = 64
    budget = int(_peak(model, torch.rand(8, longest, 8)) * room) + 65536
    step = gf.fit(model, optimizer, _loss, torch.rand(8, 16, 8), memory=budget)
    before = profiled[0]
    rng = random.Random(0)
    for _ in range(25):
        batch = torch.rand(8, rng.randint(8, longest), 8)
        with gf.meter(model, optimizer, batch) as live:
            step(batch)
        assert live.peak_bytes <= budget
        plain.zero_grad()
        _loss(reference, batch).backward()
        plain.step()
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-6)
    assert profiled[0] - before <= (0 if room > 2 else 3)
    assert len(step.known) <= 12


class _Cubic(nn.Module):
    """Makes and keeps more than the square of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(1)
        wide = x[:, :, None, None] * x[:, None, :, None] * x[:, None, None, :] * self.scale
        return torch.sin(wide).reshape(x.size(0), n**3)


def test_what_grows_faster_than_reckoned_with_is_noticed_and_planned_for(
    profiled: list[int],
) -> None:
    torch.manual_seed(0)
    model = _Cubic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(_peak(model, torch.rand(4, 24)) * 0.8)
    step = gf.fit(model, optimizer, _loss, torch.rand(4, 8), memory=budget, planning_share=0)
    before = profiled[0]
    for length in (8, 12, 24, 24):
        batch = torch.rand(4, length)
        with gf.meter(model, optimizer, batch) as live:
            step(batch)
        assert live.peak_bytes <= budget
    assert profiled[0] > before


def _split(batch: dict[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(batch["sizes"]), size):
        sizes = batch["sizes"][start : start + size]
        skipped = int(batch["sizes"][:start].sum())
        yield {"x": batch["x"][skipped : skipped + int(sizes.sum())], "sizes": sizes}


def _ragged_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"][None]).square().mean() * len(batch["sizes"]), len(batch["sizes"])


def test_split_batches_teach_as_others_do_and_are_counted_once(profiled: list[int]) -> None:
    torch.manual_seed(0)
    cuts = []

    def split(batch: Any, size: int) -> Iterator[Any]:
        cuts.append(size)
        return _split(batch, size)

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def ragged(rng: random.Random) -> dict[str, torch.Tensor]:
        sizes = torch.tensor([rng.randint(5, 60) for _ in range(6)])
        return {"x": torch.rand(int(sizes.sum()), 8), "sizes": sizes}

    rng = random.Random(0)
    sample = {"x": torch.rand(60, 8), "sizes": torch.full((6,), 10)}
    step = gf.fit(model, optimizer, _ragged_loss, sample, memory="2 MiB", split=split)
    before = profiled[0]
    for _ in range(10):
        cuts.clear()
        result = step(ragged(rng))
        assert result.peak_bytes <= 2 << 20
        assert cuts.count(1) <= 2  # the batch's rows, and its part's
    assert profiled[0] == before


def test_time_for_plans_is_a_share_of_the_time_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gradfit.fitting.families.time.perf_counter", lambda: now[0])
    spent = PlanningTime(0.1)
    before = spent.is_left
    begun = spent.begin_step()
    now[0] += 5
    with spent.planning():
        now[0] += 1
    spent.end_step(begun)
    assert (spent.training_seconds, spent.planning_seconds) == (5, 1)
    after = spent.is_left
    begun = spent.begin_step()
    now[0] += 5
    spent.end_step(begun)
    assert (before, after, spent.is_left) == (True, False, True)
