"""Work grows with what there is to do, not with its square: lines of gradfit that run are counted,
not seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradfit as gf
from gradfit.tape.values import TapeValue

_OURS = os.path.dirname(gf.__file__)


class Work:
    """Counts the lines of gradfit that run inside, and the comparisons of its values in C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._patch = 0, monkeypatch

    def __enter__(self) -> Work:
        self._patch.setattr(TapeValue, "__eq__", self._compare)
        self._patch.setattr(TapeValue, "__hash__", object.__hash__)
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._patch.undo()

    def _compare(self, other: object) -> bool:
        self.count += 1
        return self is other

    def _enter_function(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_OURS) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        self.count += 1
        return self._line


def assert_linear(
    program: Callable[[int], object], monkeypatch: pytest.MonkeyPatch, size: int = 100
) -> None:
    program(3)  # what is done once
    counts = []
    for count in (size, 2 * size):
        with Work(monkeypatch) as work:
            program(count)
        counts.append(work.count)
    assert counts[1] < 2.3 * counts[0], counts


def many_arguments(count: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with gf.CheckpointScope("s"):
        parts = [x * number for number in range(count)]
        loss = torch.cat(parts).exp().sum()
    loss.backward()


def many_results(count: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with gf.CheckpointScope("s"):
        parts = torch._foreach_exp([x * number for number in range(count)])
        loss = torch.stack(torch._foreach_sin(parts)).sum()
    loss.backward()


def many_writes(count: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with gf.CheckpointScope("s"):
        parts = [x * number for number in range(count)]
        with torch.no_grad():
            copies = [part.clone() for part in parts]
            torch._foreach_mul_(copies, 2.0)
        loss = (torch.stack(parts).exp() * torch.stack(copies).exp()).sum()
    loss.backward()


def readers(order: int) -> Callable[[int], None]:
    """One value that many read, and backward passes that come to the readers in one order or the
    other, twice.
    """

    def program(count: int) -> None:
        x = torch.ones(2, requires_grad=True)
        with gf.CheckpointScope("s"):
            h = x.exp()
            outputs = [(h * h + number).exp().exp() for number in range(count)]
        for output in outputs[::order] * 2:
            output.sum().backward(retain_graph=True)

    return program


def chain(count: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with gf.CheckpointScope("s"):
        h = x
        for _ in range(count):
            h = (h + 1).sin()
    for _ in range(3):
        h.sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (many_arguments, 300),
        (many_results, 100),
        (many_writes, 100),
        (readers(1), 100),
        (readers(-1), 100),
        (chain, 100),
    ],
    ids=[
        "cat",
        "foreach",
        "foreach writes",
        "readers, first to last",
        "readers, last to first",
        "chain",
    ],
)
def test_recording_and_replaying(
    program: Callable[[int], None], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_linear(program, monkeypatch, size)


def test_a_mean_of_many_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(count: int) -> None:
        accumulator = gf.DynamicBatchAccumulator(steps=1)
        accumulator.accumulate(
            gf.GradientMap({f"p{number}": torch.ones(1) for number in range(count)}), 2
        )
        accumulator.get_accumulated_gradient()

    assert_linear(program, monkeypatch)
