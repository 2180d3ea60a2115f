"""Bytes that a watched run says a step takes: with everything kept, and with everything dropped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from gradfit.profiling.trace import Trace


def plain_bytes(trace: Trace) -> int:
    """The most that is live at once when everything is kept until the last node that asks for
    it.
    """
    forward = len(trace.operations) + 1
    change = [0] * (forward + len(trace.nodes) + 1)
    for first, end, size in _plain_lives(trace, forward):
        change[first] += size
        change[end + 1] -= size
    inside = [op.workspace_bytes for op in trace.operations]  # as a loss in tiles has it
    beside = [*inside, 0, *(node.peak_bytes for node in trace.nodes)]
    return max(live + other for live, other in zip(accumulate(change), beside, strict=False))


def _plain_lives(trace: Trace, forward: int) -> Iterable[tuple[int, int, int]]:
    """The first and the last step of each storage's life, and its bytes."""
    last = _last_needs(trace, forward)
    lives: dict[int, tuple[int, int, int]] = {}
    for number, value in enumerate(trace.values):
        if value.operation is not None:
            first, end, size = lives.get(value.storage, (value.operation, 0, 0))
            end = max(end, value.dies, last.get(number, 0))
            lives[value.storage] = (first, end, max(size, value.nbytes))
    return lives.values()


def _last_needs(trace: Trace, forward: int) -> dict[int, int]:
    """By value: the step, after so many of the forward, of the last node that needs it."""
    return {
        value: forward + index for index, node in enumerate(trace.nodes) for value in node.needs
    }


def working_bytes(trace: Trace) -> int:
    """The most that was live at once when everything was dropped: forward working set, and
    gradients in flight.
    """
    in_flight = max((node.peak_bytes for node in trace.nodes), default=0)
    return _forward_working_bytes(trace) + max(0, in_flight - trace.gathered_peak_bytes)


def _forward_working_bytes(trace: Trace) -> int:
    change = [0] * (len(trace.operations) + 2)
    external = {value.storage for value in trace.values if value.operation is None}
    for value in trace.values:
        if value.operation is not None and value.storage not in external:
            change[value.operation] += value.nbytes
            change[value.dies + 1] -= value.nbytes
    return max(0, *accumulate(change))
