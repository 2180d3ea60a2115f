"""How the evictor chooses: with little work for each choice, and never under the hands of a
replay.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

import gradfit as gf
from gradfit.recompute.evict import Evictor, Online


def peak(count: int) -> int:
    x = torch.ones(64, requires_grad=True)
    with gf.meter(x) as live:
        chain(x, count).backward()
    return live.peak_bytes


def chain(x: torch.Tensor, count: int) -> torch.Tensor:
    h = x
    for _ in range(count):
        h = h.sin()
    return h.sum()


def test_what_is_looked_at_grows_with_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = [0]
    cost = Evictor._cost

    def counting(self: Evictor, *args: Any) -> float:
        looked[0] += 1
        return cost(self, *args)

    monkeypatch.setattr(Evictor, "_cost", counting)
    for count in (60, 120, 240):
        looked[0] = 0
        x = torch.ones(64, requires_grad=True)
        limit = int(0.6 * peak(count))
        with gf.meter(x) as live, Online(limit) as online:
            chain(x, count)
        assert live.peak_bytes <= limit
        assert online.evictor.evictions > count / 4
        assert looked[0] < 12 * online.evictor.evictions, count


def test_nothing_is_dropped_while_a_replay_holds_the_tape() -> None:
    x = torch.ones(64, requires_grad=True)
    with Online(1 << 20) as online:
        loss = chain(x, 4)
        evictor = online.evictor
        tape = online._recorder.tape
        done = threading.Event()

        def evict() -> None:
            evictor._evict(10**6, ())
            done.set()

        thread = threading.Thread(target=evict)
        with tape.lock:
            thread.start()
            assert not done.wait(0.2)
            assert evictor.evictions == 0
        thread.join()
        assert evictor.evictions > 0
        loss.backward()
    assert torch.equal(x.grad, gradient())


def gradient() -> torch.Tensor:
    x = torch.ones(64, requires_grad=True)
    (found,) = torch.autograd.grad(chain(x, 4), x)
    return found


def test_what_a_sweep_has_still_to_read_is_not_taken_for_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It frees nothing: it was counted as freed, and a budget refused with much left to drop."""
    monkeypatch.setattr(Evictor, "_price", lambda evictor, value, now: -value.op.index)
    layers = [[nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)]] * 6
    torch.manual_seed(0)
    model = nn.Sequential(*(copy.deepcopy(one) for row in layers for one in row))
    batch = torch.randn(512, 32)

    def both_passes() -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    with gf.meter(model, batch) as live:
        wanted = both_passes()
    there = sum(one.nbytes for one in (*model.parameters(), *wanted, batch) if one is not None)
    for part in (0.4, 0.5, 0.6, 0.7):
        with Online(int(there + part * (live.peak_bytes - there))):
            torch.testing.assert_close(both_passes(), wanted, rtol=0, atol=0)
