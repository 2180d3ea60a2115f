"""Rows that only `split=` can count are counted where somebody must know, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.fitting import batch_shapes

Batch = dict[str, Tensor]


class Packed(nn.Module):
    """Sequences one after the other in one tensor; `owner` says whose each element is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.double()

    def forward(self, batch: Batch) -> Tensor:
        found = self.layers(batch["x"]).squeeze(1)
        return found.new_zeros(len(batch["y"])).index_add(0, batch["owner"], found)


def packed(sizes: list[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.rand(sum(sizes), 4, generator=generator, dtype=torch.float64),
        "owner": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        "y": torch.rand(len(sizes), generator=generator, dtype=torch.float64),
    }


class Splitter:
    """`split=` that notes the sizes it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, batch: Batch, size: int) -> Iterator[Batch]:
        self.asked.append(size)
        for start in range(0, len(batch["y"]), size):
            rows = (batch["owner"] >= start) & (batch["owner"] < start + size)
            yield {
                "x": batch["x"][rows],
                "owner": batch["owner"][rows] - start,
                "y": batch["y"][start : start + size],
            }


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch), batch["y"], reduction="sum"), len(batch["y"])


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch), batch["y"])


def unread(model: nn.Module, batch: Batch) -> Tensor:
    """A mean whose divisor nobody can read."""
    return torch.stack([(model(batch) - batch["y"]).square().mean()]).median()


LOSSES = {"sum and count": summed, "mean": mean, "unread": unread}


def fitted(loss_fn: Any, memory: str = "64 MiB") -> tuple[gf.TrainStep, Splitter, nn.Module]:
    split, model = Splitter(), Packed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, loss_fn, packed([5, 9, 7, 8]), memory, split=split)
    return step, split, model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_that_is_run_whole_is_exact_and_says_its_rows(name: str) -> None:
    step, split, model = fitted(LOSSES[name])
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, sizes in enumerate([[5, 9, 7, 8], [3, 8, 2, 1], [6, 2, 4], [2]]):
        batch = packed(sizes, number)
        split.asked.clear()
        result = step(batch)
        assert result.weight == len(sizes)
        assert result.micro_batches == 1
        if name != "unread":
            assert 1 not in split.asked
        optimizer.zero_grad()
        mean(plain, batch).backward()
        optimizer.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_cut_a_step() -> None:
    step, split, _ = fitted(summed)
    step(packed([5, 9, 7, 8]))
    split.asked.clear()
    step(packed([5, 9, 7, 8], seed=3))
    assert split.asked == [4]


def test_more_rows_in_tensors_that_are_no_larger() -> None:
    """Shapes do not say how many rows there are, so a cut is asked."""
    step, split, _ = fitted(summed)
    batch = packed([20, 1, 1, 1, 1, 1])
    batch["y"] = batch["y"][:4]

    def count(batch: Batch, size: int) -> Iterator[Batch]:
        split.asked.append(size)
        parts = list(range(0, int(batch["owner"].max()) + 1, size))
        for start in parts:
            rows = (batch["owner"] >= start) & (batch["owner"] < start + size)
            yield {"x": batch["x"][rows], "owner": batch["owner"][rows] * 0, "y": batch["y"][:1]}

    step._planner.step.runner.split = count
    split.asked.clear()
    step(batch)
    assert split.asked[0] == 4
    assert 1 in split.asked  # two parts of four: now they are counted


def test_where_the_batch_is_cut_its_rows_are_counted() -> None:
    step, split, _ = fitted(summed, "64 KiB")
    batch = packed([40, 60, 30, 50, 20, 10])
    split.asked.clear()
    result = step(batch)
    assert result.weight == 6
    assert result.micro_batches > 1
    assert 1 in split.asked


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", [[40, 60, 30, 50, 20, 10], [30, 60, 20, 40, 10], [9, 9]])
def test_a_batch_that_is_cut_is_cut_once_and_is_exact(name: str, sizes: list[int]) -> None:
    split, model = Splitter(), Packed()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    sample = packed([40, 60, 30, 50, 20, 10])
    step = gf.fit(model, optimizers[0], LOSSES[name], sample, "64 MiB", split=split, micro_batch=2)
    step(sample)
    split.asked.clear()
    result = step(packed(sizes, seed=3))
    assert (result.weight, result.micro_batches) == (len(sizes), -(-len(sizes) // 2))
    assert split.asked == ([2, 1] if name == "unread" else [2])  # its rows are what it weighs
    for batch in (sample, packed(sizes, seed=3)):
        optimizers[1].zero_grad()
        mean(plain, batch).backward()
        optimizers[1].step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_batch_without_rows_is_refused() -> None:
    step, _, _ = fitted(summed)
    empty = {name: tensor[:0] for name, tensor in packed([3]).items()}
    with pytest.raises(gf.MisuseError, match="nothing to train on"):
        step(empty)


def test_a_step_finds_the_shape_of_its_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of boxes was gone through twice: a tenth of a step of 2 ms."""
    step, _, _ = fitted(summed)
    for seed, sizes in enumerate([[5, 9, 7, 8], [3, 8, 2, 1], [3, 8, 2, 1]]):
        step(packed(sizes, seed))
    walks, walk = [], batch_shapes._entries

    def entries(batch: Any) -> list[Any]:
        walks.append(batch)
        return walk(batch)

    monkeypatch.setattr(batch_shapes, "_entries", entries)
    for sizes in ([5, 9, 7, 8], [4, 7, 2, 2], [6, 1]):
        batch = packed(sizes)
        step(batch)
        assert [one is batch for one in walks] == [True]
        walks.clear()
