"""Whether a number by which a sum was divided counts the items of that sum.

A sum over 8 rows that was divided by 8 is their mean; one that was divided by 7 may be anything:
the rows of all micro-batches together, a constant, 8 - 1. Nothing at the number itself tells, but
the graph behind the sum has what there is to count: how many rows its tensors have, and what was
multiplied in, left out or picked as a mask. Numbers of these kinds add up over micro-batches.

Of tensors, dim 0 is taken for the rows: (B, T, V) has B, B·T, B·V and B·T·V of something.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

_MOST_NODES = 100
_MOST_DIMS = 8
_LEAF = "torch::autograd::AccumulateGrad"
# Their results are some elements of their first argument, or sums of these.
_TAKES_SOME = {
    "GatherBackward0",
    "IndexBackward0",
    "IndexSelectBackward0",
    "MaskedSelectBackward0",
    "MeanBackward1",
    "NllLossBackward0",
    "NllLoss2DBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SumBackward1",
}


def counts_items(number: float, reduction: Any) -> float | None:
    """The items that a number counts; 0 if there are none, and the number is the least that it can
    be (`mask.sum().clamp(min=1)`); None if it is not known to count any. Of one row that is masked
    out, 1 may be either.

    Args:
        number: by which a sum was divided.
        reduction: autograd's node of that sum.

    >>> import torch
    >>> x = torch.ones(4, 3, requires_grad=True) * 2
    >>> [counts_items(number, x.sum().grad_fn) for number in (4, 12, 7)]
    [4, 12, None]
    >>> mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    >>> counts_items(2.0, (x.sum(1) * mask).sum().grad_fn)
    2.0
    """
    given = getattr(reduction, "item_count", None)  # a loss in tiles knows
    if given is not None and _is_same(float(given), number):
        return number
    is_of_elements = counts_elements(number, reduction)
    if is_of_elements and number > 1:
        return number
    is_empty = False
    for mask, copies in _masks(reduction):
        counted = _total(mask)
        if counted and (_is_same(counted, number) or _is_same(counted * copies, number)):
            return number
        is_empty = is_empty or not counted
    if is_empty:
        return None if is_of_elements and number else 0
    return number if is_of_elements else None


def counts_elements(number: float, reduction: Any) -> bool:
    """Whether tensors behind a sum have that many rows, or elements in some of their dimensions."""
    return float(number).is_integer() and any(
        number == one for shape in _shapes(reduction) for one in _numbers_of(shape)
    )


def _numbers_of(shape: tuple[int, ...]) -> Iterator[int]:
    """The products of dim 0 and some of the others."""
    others = shape[1:_MOST_DIMS]
    for number in range(len(others) + 1):
        for chosen in combinations(others, number):
            yield shape[0] * math.prod(chosen)


def _shapes(reduction: Any) -> Iterator[tuple[int, ...]]:
    for _, source, shape in _behind(reduction):
        if shape and source.name() != _LEAF:
            yield tuple(shape)


def _masks(reduction: Any) -> Iterator[tuple[Tensor, int]]:
    """What was multiplied in or chose elements on the way to a sum, where it has the rows of what
    came out; and how often each of its elements was used.
    """
    seen = set()
    for node, _, _ in _behind(reduction):
        mask_of = _MASKS.get(node.name())
        if mask_of is None or node in seen:
            continue
        seen.add(node)
        try:
            mask = mask_of(node)
        except RuntimeError:  # written over since, or the graph was freed
            continue
        shape = node._input_metadata[0].shape
        if mask is not None and _has_rows(mask, shape):
            yield mask, max(1, math.prod(shape)) // max(1, mask.numel())


def _has_rows(mask: Tensor, shape: Any) -> bool:
    """Whether a mask has the rows of a result; that of a loss may be one number already."""
    return not shape or (mask.dim() == len(shape) and mask.shape[0] == shape[0])


def _behind(reduction: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Each node, what made one of its arguments, and that one's shape, from a reduction backwards,
    as long as an operation has as many elements as its argument, or takes some of them.
    """
    reached, known = deque([reduction]), {reduction}
    while reached and len(known) < _MOST_NODES:
        node = reached.popleft()
        size = math.prod(node._input_metadata[0].shape)
        for place, (source, index) in enumerate(node.next_functions):
            if source is None:
                continue
            shape = source._input_metadata[index].shape
            takes_some = place == 0 and node.name() in _TAKES_SOME
            if node is reduction or takes_some or math.prod(shape) == size:
                yield node, source, shape
                if source not in known and source.name() != _LEAF:
                    known.add(source)
                    reached.append(source)


def _factor(node: Any) -> Tensor | None:
    """The argument of a product that is not trained."""
    first, second = (source is not None for source, _ in node.next_functions)
    if first and second:
        return None
    factor: Any = node._saved_other if first else node._saved_self
    return factor if isinstance(factor, Tensor) else None


def _vector(node: Any) -> Tensor | None:
    first, second = (source is not None for source, _ in node.next_functions)
    if first and second:
        return None
    return node._saved_tensor if first else node._saved_self  # type: ignore[no-any-return]


def _picked(node: Any) -> Tensor:
    """One for each element that was picked."""
    return torch.ones(node._input_metadata[0].shape, dtype=torch.bool)


def _labels(node: Any) -> Tensor:
    """What each label counts for: its class's weight, nothing if it is ignored."""
    target: Tensor = node._saved_target
    counts = target != _signed(node._saved_ignore_index)
    if node._saved_weight is None:
        return counts
    return node._saved_weight[torch.where(counts, target, 0)] * counts  # type: ignore[no-any-return]


def _signed(number: int) -> int:
    """torch gives a negative number as an unsigned one of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


_MASKS: dict[str, Callable[[Any], Tensor | None]] = {
    "MulBackward0": _factor,
    "DotBackward0": _vector,
    "IndexBackward0": _picked,
    "MaskedSelectBackward0": _picked,
    "WhereBackward0": lambda node: node._saved_condition,
    "MaskedFillBackward0": lambda node: ~node._saved_mask,
    "NllLossBackward0": _labels,
    "NllLoss2DBackward0": _labels,
    "BinaryCrossEntropyBackward0": lambda node: node._saved_weight,
    "BinaryCrossEntropyWithLogitsBackward0": lambda node: node._saved_weight,
}


@torch.no_grad()
def _total(mask: Tensor) -> float:
    if mask.is_complex():
        return math.nan
    return float(mask.sum(dtype=torch.float64 if mask.is_floating_point() else torch.int64))


def _is_same(counted: float, number: float) -> bool:
    """Equal if both are whole; sums of weights up to the order in which they were added."""
    if counted == number:
        return True
    is_whole = counted.is_integer() and float(number).is_integer()
    return not is_whole and math.isclose(counted, number, rel_tol=1e-5)
