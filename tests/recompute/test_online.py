"""Eviction while the forward runs: the limit holds with no profile, and no bit changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

import gradfit as gf
from gradfit.tree import leaves

sys.path.append(str(Path(__file__).parents[1] / "fitting"))
from train_models import MODELS, make

MB = 1024 * 1024


def run(name: str, limit_bytes: int | None) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients and buffers after one pass, and its peak."""
    model, batch, loss_fn = make(name)
    torch.manual_seed(3)
    with gf.meter(model, batch) as live:
        if limit_bytes is None:
            loss_fn(model, batch).backward()
        else:
            with gf.CheckpointManager(limit_bytes / MB, auto_checkpoint=True, memory_threshold=1.0):
                loss_fn(model, batch).backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return found | {key: buffer.clone() for key, buffer in model.named_buffers()}, live.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_held_and_exact_down_to_where_it_says_no(name: str) -> None:
    expected, high = run(name, None)
    _, batch, _ = make(name)
    given = sum(tensor.nbytes for tensor in leaves(batch))  # the caller's, counted when it is read
    held = 0
    for share in (0.95, 0.85, 0.75, 0.6, 0.45, 0.3):
        limit = int(high * share)
        try:
            found, peak = run(name, limit)
        except gf.BudgetInfeasible as error:
            refused = error
            break
        assert peak <= limit + given
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        held += 1
    assert held >= 1
    assert refused.min_bytes > limit


def test_a_model_is_counted_as_a_whole_from_its_first_operation() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)]
    model, x = nn.Sequential(*blocks), torch.randn(256, 64)
    with gf.meter(x, model) as live:
        model(x).square().mean().backward()
    high = live.peak_bytes
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    manager = gf.CheckpointManager(high / 2 / MB, auto_checkpoint=True, memory_threshold=1.0)
    with gf.meter(x, model) as live, manager:
        model(x).square().mean().backward()
    assert live.peak_bytes <= high / 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert not _global_forward_pre_hooks


def test_a_limit_that_cannot_be_held_is_an_error_with_numbers() -> None:
    model, batch, loss_fn = make("gpt2")
    manager = gf.CheckpointManager(max_memory_mb=0.05, auto_checkpoint=True)
    with pytest.raises(gf.BudgetInfeasible, match="the limit is 41 KiB") as caught, manager:
        loss_fn(model, batch).backward()
    assert caught.value.min_bytes > 0.04 * MB
    assert caught.value.breakdown["in use"] > 0
    loss_fn(model, batch).backward()  # the block is closed: nothing is limited any more


def test_without_a_limit_there_is_nothing_to_hold() -> None:
    with pytest.raises(gf.MisuseError, match="max_memory_mb"):
        gf.CheckpointManager(auto_checkpoint=True).__enter__()


def test_the_threshold_is_a_part_of_the_limit() -> None:
    _, high = run("gpt2", None)
    model, batch, loss_fn = make("gpt2")
    manager = gf.CheckpointManager(
        max_memory_mb=high / MB, auto_checkpoint=True, memory_threshold=0.8
    )
    assert manager.limit_bytes == int(high * 0.8)
    with gf.meter(model) as live, manager:
        loss_fn(model, batch).backward()
    assert live.peak_bytes <= manager.limit_bytes


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("share", [100.0, 1.0, 0.8, 0.6])
def test_gates_that_count_their_writes_for_themselves(kind: Any, share: float) -> None:
    """An RNN's cells write to the results of `unsafe_chunk`, each of which has its own counter."""

    def gradients(limit_bytes: float | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model, x = kind(6, 4, num_layers=2, dropout=0.3), torch.randn(7, 3, 6)
        with gf.meter(model, x) as live:
            if limit_bytes is None:
                model(x)[0].square().sum().backward()
            else:
                limit = limit_bytes / MB
                with gf.CheckpointManager(limit, auto_checkpoint=True, memory_threshold=1.0):
                    model(x)[0].square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], live.peak_bytes

    expected, high = gradients(None)
    try:
        found, peak = gradients(high * share)
    except gf.BudgetInfeasible:
        assert share < 1
        return
    assert peak <= high * share
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_transform_of_torch_func_is_refused_in_words() -> None:
    x = torch.randn(3, requires_grad=True)
    with (
        pytest.raises(gf.UnsupportedOp, match=r"torch\.func was used inside a CheckpointManager"),
        gf.CheckpointManager(1.0, auto_checkpoint=True),
    ):
        torch.func.jacrev(torch.tanh)(x).sum()
    x.sin().sum().backward()  # nothing of it is left
    assert x.grad is not None
    assert torch.equal(x.grad, x.cos())
