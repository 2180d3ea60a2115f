"""Backward passes from several threads lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradfit as gf


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


@pytest.mark.parametrize("kind", ["weighted", "plain", "isolate", "terms", "micro_batch", "bf16"])
def test_many_threads(kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float64
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    isolate = kind in ("isolate", "micro_batch")
    threads, each = 8, 12
    acc = gf.GradientAccumulator(
        torch.optim.SGD(model.parameters(), lr=0.0),
        steps=threads * each,
        isolate=isolate,
        dtype=torch.float32 if kind == "bf16" else None,
    )
    parts = [
        [torch.randn(1 + (i * each + j) % 5, 6, dtype=dtype) for j in range(each)]
        for i in range(threads)
    ]

    def work(index: int) -> None:
        for part in parts[index]:
            if kind == "micro_batch":
                with acc.micro_batch(weight=len(part)):
                    acc.backward(model(part).square().mean())
                continue
            loss = model(part).square().mean()
            if kind == "plain":
                loss.backward()
            elif kind == "terms":
                acc.backward(
                    terms={
                        "x": (loss * len(part), len(part)),
                        "y": (model(part).sum(), 2 * len(part)),
                    }
                )
            else:
                acc.backward(loss, weight=len(part))

    in_threads(threads, work)
    assert acc.current_step == threads * each
    assert acc.is_ready
    got = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    model.zero_grad()
    reference = model.double()
    for p in reference.parameters():
        p.grad = None
        p.grad_dtype = torch.float64
    flat = [part.double() for row in parts for part in row]
    if kind == "plain":
        loss = torch.stack([reference(part).square().mean() for part in flat]).mean()
    else:
        loss = reference(torch.cat(flat)).square().mean()
        if kind == "terms":
            loss = loss + reference(torch.cat(flat)).mean() / 2
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]
    )
    torch.testing.assert_close(
        got,
        expected,
        rtol=2e-2 if kind == "bf16" else 1e-10,
        atol=1e-3 if kind == "bf16" else 1e-12,
    )


def test_step_after_threads() -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    acc = gf.GradientAccumulator(torch.optim.SGD([w], lr=1.0), steps=4)
    in_threads(4, lambda index: acc.backward((w * index).sum(), weight=index + 1))
    result = acc.step()
    assert (result.stepped, result.weight) == (True, 10)
    assert w.item() == pytest.approx(-(0 + 2 + 6 + 12) / 10)
