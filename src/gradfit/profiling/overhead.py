"""What the tape costs on this machine, per operation: measured once, on operations that take no
time of their own.

A plan for small tensors is a plan for Python: recomputing a layer norm of a few kilobytes costs
what the interpreter takes to ask for it, and a small micro-batch is recorded as slowly as a large
one. Without these numbers the planner would choose many small micro-batches and pay for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from gradfit.choices import KEEP, REBUILD, Choice
from gradfit.profiling.clock import seconds_now
from gradfit.tape.decisions import ALL_KEPT, TapeDecision
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Segment

_LINKS, _OPERATIONS_PER_LINK, _ROUNDS = 30, 3, 5


class Overhead(NamedTuple):
    """Seconds per operation, beside the operation's own."""

    record: float  # in the forward, to be listened to and written down
    replay: float  # in the backward, to be run again


class _Always:
    """Decides the same for every operation."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        return ALL_KEPT if self._choice is KEEP else TapeDecision((self._choice,) * len(results))


@functools.cache
def tape_overhead() -> Overhead:
    """The tape's own seconds; the least of several rounds."""
    operations = _LINKS * _OPERATIONS_PER_LINK
    x = torch.ones(2, 4, device="cpu", dtype=torch.float32, requires_grad=True)
    parameters = (torch.nn.Parameter(x.new_zeros(4, 4)), torch.nn.Parameter(x.new_zeros(4)))
    plain = kept = dropped = (float("inf"), float("inf"))
    for _ in range(_ROUNDS):
        plain = _least(plain, _passes(None, x, *parameters))
        kept = _least(kept, _passes(KEEP, x, *parameters))
        dropped = _least(dropped, _passes(REBUILD, x, *parameters))
    record = max(kept[0], dropped[0]) - plain[0]
    # the operations themselves, and Python's call of each, are in `plain`
    replay = dropped[1] - kept[1] - plain[0]
    return Overhead(max(0.0, record) / operations, max(0.0, replay) / operations)


def _passes(
    choice: Choice | None, x: torch.Tensor, *parameters: torch.Tensor
) -> tuple[float, float]:
    """Seconds of a forward and a backward of a chain of short operations, each of which saves what
    it reads.
    """
    with torch.enable_grad():
        started = seconds_now()
        if choice is None:
            out = _chain(x, *parameters)
        else:
            with Recorder(Segment(None), _Always(choice)):
                out = _chain(x, *parameters)
        middle = seconds_now()
        torch.autograd.grad(out.sum(), (x, *parameters))
        return middle - started, seconds_now() - middle


def _chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Operations as models have them: with parameters, with one input, with two."""
    for _ in range(_LINKS):
        # starts no threads, as gelu does
        x = x + torch.sin(torch.nn.functional.linear(x, weight, bias))
    return x


def _least(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), min(first[1], second[1])
