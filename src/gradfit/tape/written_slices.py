"""A saved slice of a storage that is written slice by slice: rebuilt whole, retained as the slice
alone.

RNN cells on the CPU compute all gates of a step side by side in one storage and activate them in
place, one after the other: to the tape that is a new version of the whole storage per gate, of
which autograd saves one slice. Retaining each version whole would take more than plain autograd,
which has one storage for all of them.

So a saved slice that is exactly what a write has written becomes a value of its own, the *part*:
made from the whole by one copy, right after the write, before the next one takes place in the same
memory. A slice that later writes did not touch is the part that an earlier one made.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gradfit.tape.operators import OpInfo
from gradfit.tape.values import Geometry, TapeValue, new_operation, new_value

_LINE = 64  # elements: memory is as well aligned after so many, whatever their size
CUT = OpInfo(copies=True)


def is_small_slice(tensor: torch.Tensor) -> bool:
    """Whether a tensor is at most half of what its storage holds."""
    return 2 * tensor.nbytes <= tensor.untyped_storage().nbytes()


def part_of(value: TapeValue, geometry: Geometry) -> TapeValue | None:
    """The part that is this slice of a value's storage; None if nobody wrote just this."""
    while _writes_one_storage(value):
        if value.geometry == geometry:
            return _part(value)
        if not _are_apart(value.geometry, geometry) or value.op is None:
            return None
        value = value.op.written[0]
    return None


def _part(whole: TapeValue) -> TapeValue:
    part = None if whole.part is None else whole.part()
    return _cut(whole) if part is None else part


def _writes_one_storage(value: TapeValue) -> bool:
    """Whether a value is the only one that its operation has written, and not evictable."""
    op = value.op
    return value.position == -1 and op is not None and len(op.written) == 1 and not value.evictable


def _cut(whole: TapeValue) -> TapeValue:
    op = whole.op
    if op is None:
        raise RuntimeError("gradfit: a part of what nothing on the tape has written")
    size, _, _, dtype = whole.geometry
    # Recorded operations have even numbers: this one runs right after the write.
    cutting = new_operation(op.index + 1, _compact, CUT, [whole], {}, [whole])
    part = new_value(whole.key, (size, _contiguous(size), 0, dtype), whole.segment, cutting)
    cutting.outputs = (weakref.ref(part),)
    whole.users = [weakref.ref(cutting), *(whole.users or ())]
    whole.rare_facts().part = weakref.ref(part)
    return part


def whole_of(value: TapeValue) -> TapeValue | None:
    """What a value is a part of, if it is one."""
    return value.op.inputs[0] if value.op is not None and value.op.info is CUT else None


def spread(part: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A part as the slice that it was, strides and alignment included: kernels may round
    differently otherwise.
    """
    size, stride, offset, dtype = geometry
    first = int(offset) % _LINE
    memory = torch.empty(first + _span(size, stride), dtype=dtype, device=part.device)
    return memory.as_strided(size, stride, first).copy_(part)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _contiguous(size: torch.Size) -> tuple[int, ...]:
    strides, expected = [], 1
    for length in reversed(size):
        strides.append(expected)
        expected *= max(length, 1)
    return tuple(reversed(strides))


def _span(size: Any, stride: Any) -> int:
    """From the first element to the last, gaps included."""
    if 0 in size:
        return 0
    return 1 + int(sum((length - 1) * step for length, step in zip(size, stride, strict=True)))


def _are_apart(one: Geometry, other: Geometry) -> bool:
    """Whether two slices certainly have no element in common: one ends before the other, or they
    are columns apart.
    """
    if one[3] is not other[3]:
        return False  # offsets are counted in elements
    if _are_disjoint((one[2], _ends(one)), (other[2], _ends(other))):
        return True
    row = max((step for _, step in _steps(one)), default=0)
    first, second = _columns(one, row), _columns(other, row)
    if first is None or second is None:
        return False
    return _are_disjoint(first, second)


def _are_disjoint(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one range ends before the other begins."""
    return one[1] <= other[0] or other[1] <= one[0]


def _steps(geometry: Geometry) -> list[tuple[int, int]]:
    """Length and stride of the dimensions in which a slice has more than one element."""
    return [(length, step) for length, step in zip(*geometry[:2], strict=True) if length > 1]


def _ends(geometry: Geometry) -> int:
    size, stride, offset, _ = geometry
    return int(offset) + _span(size, stride)


def _columns(geometry: Geometry, row: int) -> tuple[int, int] | None:
    """First and last column of a slice of rows that are `row` elements apart; None if it does not
    stay within rows.
    """
    if row == 0:
        return None
    within_rows = [(length, step) for length, step in _steps(geometry) if step % row]
    first = int(geometry[2]) % row
    end = first + 1 + int(sum((length - 1) * step for length, step in within_rows))
    return (first, end) if end <= row else None
