"""Cuts a recorded forward into segments, so that all of it is rebuilt once in little memory.

While a segment's values are there, so are those that lead into it from the segments before. Known
whole, a forward shows where few do: between the blocks of a network. The quotas that are tried are
halved each time, and the cuts of the least peak are taken (Chen et al., "Training Deep Nets with
Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod

from gradfit.tape.values import Segment, TapeOperation, TapeValue

_HALVINGS = 12


def assign_segments(saved: Iterable[TapeValue], around: Segment) -> int:
    """Give each value that is to be rebuilt its segment.

    Args:
        saved: the values that backward will ask for.
        around: the segment around all; what leads from one into another belongs to it.

    Returns:
        The bytes that rebuilding takes, at its peak and by estimate. 0 if nothing is rebuilt.
    """
    forward = _Forward(saved)
    if not forward.values:
        return 0
    cuts = min(forward.candidates(), key=forward.peak_bytes)
    segments = [Segment(around) for _ in range(len(cuts) + 1)]
    for value, made, last in forward.values:
        first = segments[bisect_right(cuts, made)]
        value.segment = first if segments[bisect_right(cuts, last)] is first else around
    return forward.peak_bytes(cuts)


class _Forward:
    """The operations that backward's values are made by, numbered, and how many bytes there are
    where.
    """

    def __init__(self, saved: Iterable[TapeValue]) -> None:
        found = _to_rebuild(saved)
        operations = sorted({_maker(value) for value in found}, key=lambda op: op.index)
        place = {op: at for at, op in enumerate(operations)}
        last = {value: place[_maker(value)] for value in found}
        for at, op in enumerate(operations):
            for value in op.inputs:
                if value in last:
                    last[value] = at
        # each with the operation that makes it and the last one that reads it
        self.values = [(value, place[_maker(value)], last[value]) for value in found]
        count = len(operations)
        self._saved = [0] * count  # bytes that each makes and backward asks for
        change = [0] * (count + 1)
        for value, made, end in self.values:
            size = _bytes_of(value)
            self._saved[made] += size if value.handles else 0
            change[made + 1] += size
            change[end + 1 if end < count else count] -= size
        # bytes that lead over the border before each
        self._crossing = list(accumulate(change))
        self._sums = [0, *accumulate(self._saved)]

    def candidates(self) -> Iterable[tuple[int, ...]]:
        """Ways to cut, each as the first operations of all segments but the first."""
        quota = float(self._sums[-1])
        for _ in range(_HALVINGS):
            yield self._cut(quota)
            quota /= 2

    def _cut(self, quota: float) -> tuple[int, ...]:
        """Segments that ask for between half the quota and all of it, cut where the least leads
        over.
        """
        cuts, begin, best = [], 0, 0
        for at in range(1, len(self._saved)):
            if self._sums[at] - self._sums[begin] >= quota / 2 and (
                best <= begin or self._crossing[at] <= self._crossing[best]
            ):
                best = at
            if self._sums[at + 1] - self._sums[begin] > quota and best > begin:
                cuts.append(best)
                begin = best
        return tuple(cuts)

    def peak_bytes(self, cuts: Sequence[int]) -> int:
        """The most of: what leads into a segment from all before it, and what it makes."""
        leading = [0] * (len(cuts) + 2)
        for value, made, last in self.values:
            segment = bisect_right(cuts, made)
            if bisect_right(cuts, last) != segment:
                leading[segment + 1] += _bytes_of(value)
        bounds = [0, *cuts, len(self._saved)]
        inside = [self._sums[end] - self._sums[begin] for begin, end in pairwise(bounds)]
        return max(before + own for before, own in zip(accumulate(leading), inside, strict=False))


def _to_rebuild(saved: Iterable[TapeValue]) -> list[TapeValue]:
    """These and all that they are made from, as far as it is not there."""
    found: dict[TapeValue, None] = {}
    stack = list(saved)
    while stack:
        value = stack.pop()
        if value.op is None or value.tensor is not None or value in found:
            continue
        found[value] = None
        stack.extend(value.op.inputs)
    return list(found)


def _maker(value: TapeValue) -> TapeOperation:
    assert value.op is not None
    return value.op


def _bytes_of(value: TapeValue) -> int:
    size, _, _, dtype = value.geometry
    return prod(size) * dtype.itemsize
