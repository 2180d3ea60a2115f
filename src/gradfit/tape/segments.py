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
    forward.assign(cuts, around)
    return forward.peak_bytes(cuts)


class _Forward:
    """The operations that backward's values are made by, numbered, and how many bytes there are
    where.
    """

    def __init__(self, saved: Iterable[TapeValue]) -> None:
        values = _to_rebuild(saved)
        operations = sorted({_maker(value) for value in values}, key=lambda op: op.index)
        last = _last_readers(values, operations)
        place = {op: at for at, op in enumerate(operations)}
        # each with the operation that makes it and the last one that reads it
        self.values = [(value, place[_maker(value)], last[value]) for value in values]
        self._saved = self._saved_bytes(len(operations))
        self._crossing = self._bytes_that_cross(len(operations))
        self._sums = [0, *accumulate(self._saved)]

    def _saved_bytes(self, operations: int) -> list[int]:
        """By operation: the bytes that it makes and backward asks for."""
        saved = [0] * operations
        for value, made, _ in self.values:
            saved[made] += _bytes_of(value) if value.handles else 0
        return saved

    def _bytes_that_cross(self, operations: int) -> list[int]:
        """By operation: the bytes that lead over the border before it."""
        change = [0] * (operations + 1)
        for value, made, end in self.values:
            size = _bytes_of(value)
            change[made + 1] += size
            change[min(end + 1, operations)] -= size
        return list(accumulate(change))

    def assign(self, cuts: Sequence[int], around: Segment) -> None:
        """Give each value the segment that it is made and read in, or the one around all."""
        segments = [Segment(around) for _ in range(len(cuts) + 1)]
        for value, made, last in self.values:
            first = segments[bisect_right(cuts, made)]
            value.segment = first if segments[bisect_right(cuts, last)] is first else around

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
            if self._bytes_in(begin, at) >= quota / 2 and self._is_no_worse(at, best, begin):
                best = at
            if self._bytes_in(begin, at + 1) > quota and best > begin:
                cuts.append(best)
                begin = best
        return tuple(cuts)

    def _bytes_in(self, begin: int, end: int) -> int:
        return self._sums[end] - self._sums[begin]

    def _is_no_worse(self, at: int, best: int, begin: int) -> bool:
        """Whether to cut here, rather than at the best place so far, if there is one."""
        return best <= begin or self._crossing[at] <= self._crossing[best]

    def peak_bytes(self, cuts: Sequence[int]) -> int:
        """The most of: what leads into a segment from all before it, and what it makes."""
        bounds = [0, *cuts, len(self._saved)]
        inside = [self._bytes_in(begin, end) for begin, end in pairwise(bounds)]
        leading = accumulate(self._leading_bytes(cuts))
        return max(before + own for before, own in zip(leading, inside, strict=False))

    def _leading_bytes(self, cuts: Sequence[int]) -> list[int]:
        """By segment: the bytes that lead into it, or further, from the one before."""
        leading = [0] * (len(cuts) + 2)
        for value, made, last in self.values:
            segment = bisect_right(cuts, made)
            if bisect_right(cuts, last) != segment:
                leading[segment + 1] += _bytes_of(value)
        return leading


def _to_rebuild(saved: Iterable[TapeValue]) -> list[TapeValue]:
    """These and all that they are made from, as far as it is not there."""
    absent: dict[TapeValue, None] = {}
    stack = list(saved)
    while stack:
        value = stack.pop()
        if value.op is None or value.tensor is not None or value in absent:
            continue
        absent[value] = None
        stack.extend(value.op.inputs)
    return list(absent)


def _last_readers(
    values: Iterable[TapeValue], operations: Sequence[TapeOperation]
) -> dict[TapeValue, int]:
    """The place of the last operation that reads each value, or of the one that makes it."""
    place = {op: at for at, op in enumerate(operations)}
    last = {value: place[_maker(value)] for value in values}
    for at, op in enumerate(operations):
        last.update((value, at) for value in op.inputs if value in last)
    return last


def _maker(value: TapeValue) -> TapeOperation:
    assert value.op is not None
    return value.op


def _bytes_of(value: TapeValue) -> int:
    size, _, _, dtype = value.geometry
    return prod(size) * dtype.itemsize
