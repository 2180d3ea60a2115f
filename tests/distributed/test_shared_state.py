"""Saved in the middle of a window at one world size, resumed at another: as if it had never been
stopped.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_jobs import Net, full, largest_difference, wrap
from distributed_pool import Pool
from torch import nn

import gradfit as gf
from gradfit.distributed import state

MICRO_BATCHES = 16  # in a window, whoever computes them


def micro_batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1 + number % 4, 4, generator=generator, dtype=torch.float64)


def build(how: str, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    inner = Net().double()
    model = inner if how == "alone" else wrap(inner, how, size)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def contribute(acc: gf.GradientAccumulator, model: nn.Module, number: int, terms: bool) -> None:
    out = model(micro_batch(number))
    if terms:
        acc.backward(
            terms={"a": (out.square().sum(), out.numel()), "b": (out.exp().sum(), 1 + number % 3)}
        )
    else:
        acc.backward(out.square().mean(), weight=len(out))


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [full(p).clone() for p in model.parameters()]


def first_half(
    rank: int, size: int, how: str, path: str, terms: bool, through: str
) -> list[torch.Tensor]:
    """Eight micro-batches, unevenly over the ranks, then a state, then the other eight without a
    stop.
    """
    model, optimizer = build(how, size)
    acc = gf.GradientAccumulator(optimizer, steps=MICRO_BATCHES // size)
    for number in range(8):
        if (number * number) % size == rank:
            contribute(acc, model, number, terms)
    if through == "state":
        state.save(acc, path)
    else:
        dcp.save({"acc": acc}, checkpoint_id=path)
    for number in range(8, MICRO_BATCHES):
        if number % size == rank:
            contribute(acc, model, number, terms)
    assert acc.flush().stepped
    return parameters(model)


def second_half(
    rank: int, size: int, how: str, path: str, terms: bool, through: str
) -> list[torch.Tensor]:
    """A new process takes the window up and ends it."""
    model, optimizer = build(how, size)
    acc = gf.GradientAccumulator(optimizer, steps=MICRO_BATCHES // size)
    if through == "state":
        state.load(acc, path)
    else:
        dcp.load({"acc": acc}, checkpoint_id=path)
    assert acc.current_step == 8 // size
    for number in range(8, MICRO_BATCHES):
        if number % size == rank:
            contribute(acc, model, number, terms)
            result = acc.step()
    assert result.stepped, result
    assert result.micro_batches == MICRO_BATCHES
    return parameters(model)


def never_stopped(terms: bool) -> list[torch.Tensor]:
    model, optimizer = build("alone", 1)
    acc = gf.GradientAccumulator(optimizer, steps=MICRO_BATCHES)
    for number in range(MICRO_BATCHES):
        contribute(acc, model, number, terms)
    assert acc.step().stepped
    return parameters(model)


def agree(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all((a - b).abs().max() < 1e-12 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_saved_at_four_resumed_at_two_and_at_one(
    four: Pool, pair: Pool, tmp_path: Path, how: str, terms: bool
) -> None:
    path, expected = str(tmp_path / "window"), never_stopped(terms)
    for answer in four.run(first_half, how, path, terms, "state"):
        assert agree(answer, expected)
    for answer in pair.run(second_half, how, path, terms, "state"):
        assert agree(answer, expected)
    assert agree(second_half(0, 1, "alone", path, terms, "state"), expected)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp"), ("hsdp", "ddp")]
)
def test_it_is_a_stateful_of_torch(
    four: Pool, pair: Pool, tmp_path: Path, saved: str, loaded: str
) -> None:
    path, expected = str(tmp_path / "window"), never_stopped(False)
    four.run(first_half, saved, path, False, "dcp")
    for answer in pair.run(second_half, loaded, path, False, "dcp"):
        assert agree(answer, expected)


def test_a_state_of_which_half_was_loaded_is_refused(tmp_path: Path) -> None:
    model, optimizer = build("alone", 1)
    acc = gf.GradientAccumulator(optimizer, steps=4)
    contribute(acc, model, 0, False)
    whole = state.share(acc)
    del whole["tensors"]["grad.3"]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gf.StateError, match="not all of it was loaded"):
        acc.load_state_dict(whole)
    assert acc.current_step == 1
    assert largest_difference(model, _like(model, before)) == 0


def _like(model: nn.Module, content: dict[str, Any]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(content)
    return other
