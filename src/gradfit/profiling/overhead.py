"""What the tape itself costs on this machine, per operation: measured once, on operations that take no time of their own.

A plan for small tensors is a plan for Python: recomputing a layer norm of a few kilobytes costs what the interpreter
takes to ask for it, and a small micro-batch is recorded as slowly as a large one. Without these numbers the planner
would choose many small micro-batches and pay for it.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import torch

from gradfit.tape.graph import Segment
from gradfit.tape.policy import DROP, KEEP
from gradfit.tape.record import Recorder

_OPERATIONS, _ROUNDS = 100, 9


class Overhead(NamedTuple):
    """Seconds per operation, beside the operation's own."""

    record: float  # in the forward, to be listened to and written down
    replay: float  # in the backward, to be run again


class _Always:
    def __init__(self, choice: int) -> None:
        self.choice = choice

    def choose(self, func: Any, results: list[torch.Tensor]) -> list[int]:
        return [self.choice] * len(results)

    def offload(self, tensor: torch.Tensor) -> Any:
        raise RuntimeError("gradfit: nothing is offloaded here")


@functools.cache
def tape_overhead() -> Overhead:
    """The tape's own seconds; the least of several rounds."""
    x = torch.ones(8, requires_grad=True)
    plain = kept = dropped = (float("inf"), float("inf"))
    for _ in range(_ROUNDS):
        plain = _least(plain, _passes(x, None))
        kept = _least(kept, _passes(x, KEEP))
        dropped = _least(dropped, _passes(x, DROP))
    record = max(kept[0], dropped[0]) - plain[0]
    replay = dropped[1] - kept[1] - plain[0]  # the operations themselves, and Python's call of each, are in `plain`
    return Overhead(max(0.0, record) / _OPERATIONS, max(0.0, replay) / _OPERATIONS)


def _passes(x: torch.Tensor, choice: int | None) -> tuple[float, float]:
    """Seconds of a forward and a backward of a chain of short operations, each of which saves what it reads."""
    with torch.enable_grad():
        started = time.perf_counter()
        if choice is None:
            out = _chain(x)
        else:
            with Recorder(Segment(None), _Always(choice)):
                out = _chain(x)
        middle = time.perf_counter()
        torch.autograd.grad(out.sum(), x)
        return middle - started, time.perf_counter() - middle


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_OPERATIONS):
        x = torch.sin(x)
    return x


def _least(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), min(first[1], second[1])
