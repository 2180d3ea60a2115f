"""The seconds of watched runs: the least of several, and how many there need be.

A machine is never alone, so that less is nearer to the truth; but what takes long, or has many
operations, of which those alike measure each other, is measured fewer times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gradfit import _torch_distributed as distributed
from gradfit.profiling.trace import Trace, TracedNode, TracedOp

_Timed = TracedOp | TracedNode
MOST_ROUNDS = 5
_ENOUGH_SECONDS, _ENOUGH_OPERATIONS = 0.03, 1000
_ENOUGH_ALIKE = 8  # operations that do the same on the same sizes, on average


def forward_seconds(trace: Trace) -> float:
    """Of all of its operations."""
    return sum(op.seconds for op in trace.operations)


def rounds(seconds: float, trace: Trace) -> int:
    """How often to measure what takes so many seconds each time."""
    by_operations = max(2, _ENOUGH_OPERATIONS // max(1, len(trace.operations)))
    if distributed.is_running():  # all ranks must run the same, and each has its own clock
        return min(MOST_ROUNDS, by_operations)
    by_seconds = math.ceil(_ENOUGH_SECONDS / max(seconds, 1e-9))
    return min(MOST_ROUNDS, by_seconds, by_operations)


def rounds_of_alike(trace: Trace) -> int:
    """How often to measure operations that measure each other."""
    groups = sum(1 for _ in _alike(trace))
    items = len(trace.operations) + len(trace.nodes)
    return math.ceil(_ENOUGH_ALIKE * groups / max(1, items))


def least_seconds(first: Trace, second: Trace) -> Trace:
    """The shorter of two measurements, operation by operation, where the two runs did the same."""
    _keep_shorter(first.operations, second.operations)
    _keep_shorter(first.nodes, second.nodes)
    return second


def _keep_shorter(first: Sequence[_Timed], second: Sequence[_Timed]) -> None:
    if _names(first) == _names(second):
        for old, new in zip(first, second, strict=True):
            new.seconds = min(new.seconds, old.seconds)


def _names(items: Sequence[_Timed]) -> list[str]:
    return [one.name for one in items]


def pool_alike(trace: Trace) -> None:
    """Give operations that do the same on the same sizes the same seconds: the blocks of a model
    measure each other.
    """
    for group in _alike(trace):
        # The lower quartile: what disturbs a measurement makes it longer, never shorter.
        usual = sorted(item.seconds for item in group)[(len(group) - 1) // 4]
        for item in group:
            item.seconds = usual


def _alike(trace: Trace) -> Iterable[list[_Timed]]:
    groups: dict[Any, list[_Timed]] = {}
    for op in trace.operations:
        key = (op.name, *_sizes(trace, (*op.inputs, *op.outputs)))
        groups.setdefault(key, []).append(op)
    for node in trace.nodes:
        taken = node.peak_bytes - node.before_bytes
        groups.setdefault((node.name, taken, *_sizes(trace, node.needs)), []).append(node)
    return groups.values()


def _sizes(trace: Trace, values: Sequence[int]) -> list[int]:
    return [trace.values[value].nbytes for value in values]
