"""One budget, one effective batch: the micro-batch and plan that `gf.fit` chooses, against the best
made by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fair import race
from frontier_models import Case, language
from torch.utils.checkpoint import checkpoint

import gradfit as gf

_ROOMS = (16 << 20, 5 << 20)  # for activations, beside parameters, gradients and the batch


def plainly(blocks: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return blocks(x)


def every_block(blocks: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def joint(*, rows: int, rounds: int) -> list[str]:
    """The tables, for each budget."""
    return [line for room in _ROOMS for line in in_room(room, rows=rows, rounds=rounds)]


def in_room(room: int, *, rows: int, rounds: int) -> list[str]:
    """Seconds of an update, and the ratio of each to `gf.fit`'s."""
    torch.manual_seed(0)
    case = language("GPT-2", layers=12, width=128, rows=rows, length=32, causal=True)
    static = 2 * sum(p.nbytes for p in case.model.parameters()) + sum(
        t.nbytes for t in case.batch.values()
    )
    budget = static + room
    model = copy.deepcopy(case.model)
    step = gf.fit(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), case.loss, case.batch, memory=budget
    )
    step(case.batch)  # the first step with a plan is measured
    way = (
        "nothing" if step.plan.keeps_everything else f"{step.plan.actions.count('rebuild')} values"
    )
    names, others = [f"gradfit, micro-batch {step.plan.micro_batch}, {way} rebuilt"], []
    for name, runner in (("no recomputation", plainly), ("every block checkpointed", every_block)):
        other = Case(name, copy.deepcopy(case.model), case.batch)
        size = largest(other, runner, budget)
        names.append(f"{name}, micro-batch {size}")
        others.append(partial(by_hand, other, runner, size))
    first: Callable[[], Any] = partial(step, case.batch)
    lines = [f"Joint: one budget of {budget / 1e6:.1f} MB, {rows} rows per update"]
    for name, times in zip(names, race(first, others, rounds=rounds), strict=True):
        lines.append(f"  {name:44}{times.least:8.3f} s{times.ratio - 1:+9.1%}")
    return lines


def largest(case: Case, runner: Any, budget: int) -> int:
    """The largest micro-batch that stays within the budget."""
    low, high = 1, case.batch["x"].size(0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if by_hand(case, runner, middle, measured=True) <= budget
            else (low, middle - 1)
        )
    return low


def by_hand(case: Case, runner: Any, size: int, *, measured: bool = False) -> int:
    """One update in micro-batches of `size`; with `measured`, the peak of its first two."""
    case.model.runner = runner
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-3)
    total = case.batch["x"].size(0)
    live = gf.meter(case.model, case.batch) if measured else None
    if live is not None:
        live.__enter__()
    for start in range(0, min(total, 2 * size) if measured else total, size):
        part = {name: tensor[start : start + size] for name, tensor in case.batch.items()}
        loss = case.loss(case.model, part) * (part["x"].size(0) / total)
        loss.backward()
        del loss
    if live is not None:
        live.__exit__(None, None, None)
    else:
        optimizer.step()
    optimizer.zero_grad()
    return live.peak_bytes if live is not None else 0
