"""Batches of new shapes: served by arithmetic where a plan that is known holds, and planned for
where it may not.
"""

from __future__ import annotations

import copy
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
from gradfit.fitting.batch_shapes import (
    Shape,
    covers,
    growth,
    shape_of,
    shrinkage,
    tensors_of,
)
from gradfit.fitting.families import PlanningTime, _corner
from gradfit.fitting.step_profiles import StepProfiles
from gradfit.planning.api import bare_plan

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
    run = StepProfiles.measure

    def counting(self: StepProfiles, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return run(self, *args, **options)

    monkeypatch.setattr(StepProfiles, "measure", counting)
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


def test_a_state_is_read_back_after_a_longer_batch_without_a_budget() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, _loss, torch.rand(2, 3, 8), memory=None, planning_share=0)
    step(torch.rand(2, 4, 8))
    assert any(one.by_size and one.saved_bytes for one in step.known)  # reckoned with, not tested
    state = step.state_dict()
    step.load_state_dict(state)
    assert step.state_dict()["plans"] == state["plans"]


class _Cubic(nn.Module):
    """Makes and keeps more than the square of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(1)
        wide = x[:, :, None, None] * x[:, None, :, None] * x[:, None, None, :] * self.scale
        return torch.sin(wide).reshape(x.size(0), n**3)


@pytest.mark.parametrize("whole", [False, True])
def test_what_grows_faster_than_reckoned_with_is_noticed(profiled: list[int], whole: bool) -> None:
    """It is cut into smaller parts by arithmetic; what is not cut gets a plan of its own."""
    torch.manual_seed(0)
    model = _Cubic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = int(_peak(model, torch.rand(4, 24)) * (0.95 if whole else 0.8))
    step = gf.fit(
        model, optimizer, _loss, torch.rand(4, 8), memory=budget, planning_share=0,
        micro_batch="whole" if whole else None,
    )  # fmt: skip
    before = profiled[0]
    attempts = 0
    for length in (8, 12, 24, 24):
        batch = torch.rand(4, length)
        with gf.meter(model, optimizer, batch) as live:
            attempts = max(attempts, step(batch).attempts)
        assert live.peak_bytes <= budget
    assert attempts > 1 or whole
    assert (profiled[0] > before) is whole


def _half_of_what_long_ones_take(
    model: nn.Module, loss_fn: Any, longest: torch.Tensor
) -> tuple[int, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gf.meter(model, optimizer, longest) as live:
        static = live.current_bytes
        loss_fn(model, longest).backward()
    model.zero_grad()
    return (static + live.peak_bytes) // 2, optimizer


def test_longer_batches_are_cut_by_arithmetic_and_planned_for_when_there_is_time(
    profiled: list[int],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    budget, optimizer = _half_of_what_long_ones_take(model, _loss, torch.rand(8, 96, 16))
    step = gf.fit(model, optimizer, _loss, torch.rand(8, 32, 16), memory=budget, planning_share=0)
    assert step.plan.micro_batch == 8
    reference = copy.deepcopy(model).double()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    before = profiled[0]

    def train(length: int) -> gf.TrainResult:
        batch = torch.rand(8, length, 16)
        with gf.meter(model, optimizer, batch) as live:
            result = step(batch)
        assert live.peak_bytes <= budget
        plain.zero_grad()
        _loss(reference, batch.double()).backward()
        plain.step()
        return result

    for length in (48, 64, 96, 80, 96, 64):
        result = train(length)
        assert result.attempts == 1
        assert result.micro_batches > 1 or length < 96
    assert profiled[0] == before
    step._planner.time.share, step._planner.time.training_seconds = 1, 1e9
    for _ in range(3):
        train(96)
    assert profiled[0] == before + 1
    assert not step._planner.tested_plan(torch.rand(8, 96, 16), 8).by_size
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.double(), other, atol=1e-6)


class _TwoWays(nn.Module):
    """Rows that are all positive are run by other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bend = torch.tanh if bool((x > 0).all()) else torch.sin
        for layer in self.layers:
            x = bend(layer(x)) * 2
        return x


def test_more_and_shorter_rows_are_not_cut_for_longer_ones_sake(profiled: list[int]) -> None:
    """As batches of a token budget: the first of a shape is run in the parts of longer ones."""
    torch.manual_seed(0)
    model, reference = _Attention(), _Attention()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    budget = _peak(model, torch.rand(8, 64, 8)) + 65536
    step = gf.fit(model, optimizer, _loss, torch.rand(8, 64, 8), memory=budget)
    before, parts = profiled[0], []
    for rows, length in [(8, 64), (64, 8), (32, 16), (64, 8), (32, 16), (60, 8), (8, 64), (8, 80)]:
        x = torch.rand(rows, length, 8)
        result = step(x)
        assert result.peak_bytes <= budget
        parts.append(result.micro_batches)
        plain.zero_grad()
        _loss(reference, x).backward()
        plain.step()
    # the last is longer than the sample: what was measured of that is still there to reckon with
    assert parts[1] >= 8
    assert parts[2] >= 4
    assert parts[3:7] == [1, 1, 1, 1]
    assert parts[7] > 1
    assert profiled[0] == before
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class _Wasteful(_Attention):
    """Takes far more for more than 20 rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 20:
            x = x + torch.zeros(len(x), 100_000).sum(1)[:, None, None]
        return super().forward(x)


def test_larger_parts_that_do_not_hold_are_not_tried_again() -> None:
    torch.manual_seed(0)
    model = _Wasteful()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = _peak(model, torch.rand(8, 64, 8)) + 65536
    step = gf.fit(model, optimizer, _loss, torch.rand(8, 64, 8), memory=budget)
    done = [step(torch.rand(64, 8, 8)) for _ in range(8)]
    assert all(result.peak_bytes <= budget for result in done)
    assert any(result.attempts > 1 for result in done)  # it was tried
    assert all(result.attempts == 1 for result in done[-3:])
    assert done[-1].micro_batches < done[0].micro_batches


def test_where_operations_differ_everything_is_kept_in_parts_until_there_is_time(
    profiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_halves(profile: Any, **options: Any) -> Any:  # which rebuilds, so that operations matter
        return bare_plan(profile, **(options | {"micro_batch": 4}))

    monkeypatch.setattr("gradfit.fitting.plans_on_paper.plan_for_fit", in_halves)
    torch.manual_seed(0)
    model = _TwoWays()
    one, other = torch.rand(8, 64, 16), -torch.rand(8, 64, 16)
    budget, optimizer = _half_of_what_long_ones_take(model, _loss, one)
    step = gf.fit(model, optimizer, _loss, one, memory=budget, planning_share=0)
    assert not step.plan.keeps_everything
    before, attempts = profiled[0], []
    for batch in (one, other, one, other):
        with gf.meter(model, optimizer, batch) as live:
            attempts.append(step(batch).attempts)
        assert live.peak_bytes <= budget
    assert attempts == [1, 2, 1, 1]
    assert profiled[0] == before


@given(st.lists(_dims, min_size=2, max_size=2), st.lists(_dims, min_size=2, max_size=2))
def test_a_batch_is_as_many_times_smaller_as_it_is_along_each_size_that_differs(
    old: Any, new: Any
) -> None:
    large, small = _shape(old), _shape(new)
    times = shrinkage(large, small)
    if not covers(large, small):
        assert times == 1.0
    for a, b in zip(sum(old, ()), sum(new, ()), strict=True):
        assert times == 1.0 or a == b or times <= a / b


def _that_rebuilds(
    model: nn.Module, longest: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> gf.TrainStep:
    """A step whose plan for the longest batches runs them whole, and rebuilds."""

    def whole(profile: Any, **options: Any) -> Any:
        return bare_plan(profile, **(options | {"micro_batch": len(longest)}))

    monkeypatch.setattr("gradfit.fitting.plans_on_paper.plan_for_fit", whole)
    half, optimizer = _half_of_what_long_ones_take(model, _loss, longest)
    budget = (half + _peak(model, longest)) // 2
    step = gf.fit(model, optimizer, _loss, longest, memory=budget, planning_share=0)
    assert not step.plan.keeps_everything
    assert step.plan.steps == 1
    return step


def test_shorter_batches_keep_everything_where_longer_ones_rebuild(
    profiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    reference = copy.deepcopy(model).double()
    step = _that_rebuilds(model, torch.rand(8, 96, 16), monkeypatch)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    before, kept = profiled[0], []
    for length in (96, 24, 96, 20, 90, 24):
        batch = torch.rand(8, length, 16)
        with gf.meter(model, step.optimizer, batch) as live:
            result = step(batch)
        assert live.peak_bytes <= step.budget_bytes
        assert (result.attempts, result.micro_batches) == (1, 1)
        kept.append(step.plan.keeps_everything)
        plain.zero_grad()
        _loss(reference, batch.double()).backward()
        plain.step()
    assert kept == [False, True, False, True, False, True]
    assert profiled[0] == before
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.double(), other, atol=1e-6)


class _AsLongAsEver(nn.Module):
    """Makes as much of a short batch as of a long one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean(1, keepdim=True).expand(-1, 96, -1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_shorter_batches_that_take_as_much_rebuild_as_longer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is begun that would pass the budget, and it is tried once."""
    torch.manual_seed(0)
    step = _that_rebuilds(_AsLongAsEver(), torch.rand(8, 96, 16), monkeypatch)
    attempts = []
    for _ in range(3):
        batch = torch.rand(8, 24, 16)
        with gf.meter(step.model, step.optimizer, batch) as live:
            attempts.append(step(batch).attempts)
        assert live.peak_bytes <= step.budget_bytes
        assert not step.plan.keeps_everything
    assert attempts == [2, 1, 1]


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
    before = spent.has_room_for(0)
    begun = spent.begin_step()
    now[0] += 5
    with spent.planning():
        now[0] += 1
    spent.end_step(begun)
    assert (spent.training_seconds, spent.planning_seconds) == (5, 1)
    after = spent.has_room_for(0)
    begun = spent.begin_step()
    now[0] += 5
    spent.end_step(begun)
    assert (before, after, spent.has_room_for(0)) == (True, False, True)


class _Boxes(nn.Module):
    """A number for each box, by its image and by the others of its image."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.box, self.last = nn.Linear(12, 16), nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, images: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        seen = self.image(images)
        each = [self.box(of_image) + seen[at] for at, of_image in enumerate(boxes)]
        near = [torch.softmax(h @ h.T, dim=-1) @ torch.tanh(h) for h in each]
        return self.last(torch.cat(near)).squeeze(1)


def _box_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    images, boxes = batch
    found = model(images, boxes)
    return found.square().sum(), len(found)


def _split_boxes(batch: Any, size: int) -> Iterator[Any]:
    images, boxes = batch
    for start in range(0, len(boxes), size):
        yield images[start : start + size], boxes[start : start + size]


def test_lists_of_rows_whose_sizes_are_always_new_share_plans(profiled: list[int]) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)

    def batch() -> Any:
        boxes = [torch.rand(rng.choice((0, 0, 1, 2, 3, 5, 9)), 4) for _ in range(12)]
        return torch.rand(12, 12), [*boxes, torch.rand(1, 4)][1:]

    batches = [batch() for _ in range(15)]
    model, reference = _Boxes(), _Boxes()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    budget = 64 << 10
    step = gf.fit(model, optimizer, _box_loss, batches[0], memory=budget, split=_split_boxes)
    before = profiled[0]
    for one in batches[1:]:
        with gf.meter(model, optimizer, one) as live:
            step(one)
        assert live.peak_bytes <= budget
    assert profiled[0] == before
    assert len(step.known) <= 4
    for one in batches[1:]:
        plain.zero_grad()
        total, count = _box_loss(reference, one)
        (total / count).backward()
        plain.step()
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-6)


def _of_lists(*sizes: int) -> Shape:
    return shape_of((torch.zeros(3), [torch.zeros(size, 4) for size in sizes]), rows=True)


def test_a_list_of_rows_grows_by_what_is_in_it_together() -> None:
    assert growth(_of_lists(0, 3, 3), _of_lists(3, 0, 3)) == 1.0
    assert growth(_of_lists(0, 3, 3), _of_lists(4, 4, 4)) == 2.0
    # as many elements, but more pairs of them
    assert not covers(_of_lists(3, 3, 3, 3), _of_lists(6, 6, 0, 0))
    assert not covers(_of_lists(6, 2, 2, 2), _of_lists(6, 6, 0, 0))
    nested = [{"box": torch.zeros(n, 4), "label": torch.zeros(n, dtype=torch.long)} for n in (2, 0)]
    assert len(shape_of({"x": torch.zeros(2), "targets": nested}, rows=True)) == 3
    assert len(shape_of(nested, rows=True)) == 2
    # a list of tensors is one of fields
    assert len(shape_of([torch.zeros(2), torch.zeros(2)], rows=True)) == 2
