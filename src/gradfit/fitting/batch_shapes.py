"""What of a batch a plan depends on: the sizes of its tensors, and by how much those of another are
larger.

Where the rows are dim 0 of every tensor, a shape is without them. What only `split=` can cut has
all sizes in it; and lists inside of such a batch hold a tensor for each row (boxes of an image,
sentences of a document), whose sizes are others in every batch. A model takes as much for such a
list as for its tensors together, or for each by itself, at most with the square of either: so a
list counts by how many tensors it has, by what they have together, and by their largest sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from gradfit._torch import type_of
from gradfit.tree import leaves, leaves_and_lists

# of each tensor or list of a batch
Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
PartShape = tuple[tuple[int, ...], ...]  # of each tensor of a micro-batch
_shape = operator.attrgetter("shape")
_DEPTH = 3  # objects inside of objects, as a Geometric batch has its store
_Find = Callable[[Any], Iterator[Any]]


def shape_of(batch: Any, *, rows: bool = False) -> Shape:
    """What a plan depends on beside the number of rows; with them, and with lists of tensors as
    one, where it is not dim 0 that is cut (`split=`).

    >>> shape_of({"x": torch.zeros(8, 3)})
    (((3,), torch.float32),)
    >>> boxes = [torch.zeros(2, 4), torch.zeros(0, 4)]
    >>> shape_of({"x": torch.zeros(2, 3), "boxes": boxes}, rows=True)
    (((2, 3), torch.float32), ((2, 8, 8, 2, 4), torch.float32))
    """
    if not rows:
        tensors = tensors_of(batch)
        shapes = [*map(_shape, tensors)]
        sizes = {shape: tuple(shape[1:]) for shape in set(shapes)}  # of thousands most are alike
        return tuple(zip(map(sizes.__getitem__, shapes), map(type_of, tensors), strict=True))
    return tuple(chain.from_iterable(map(_shapes_of_entry, _entries(batch))))


def _entries(batch: Any) -> list[Any]:
    """What a batch holds: tensors, and lists, whose tensors are each row's. Of one that is a list
    itself the items are its fields, as of a tuple; or rows, where none of them is a tensor.
    """
    if isinstance(batch, list | tuple) and not _is_list_of_rows(batch):
        return [*chain.from_iterable(map(leaves_and_lists, batch))]
    return _found_in(batch, leaves_and_lists)


def _is_list_of_rows(batch: Any) -> bool:
    return type(batch) is list and not any(isinstance(item, torch.Tensor) for item in batch)


def _shapes_of_entry(entry: Any) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(entry, torch.Tensor):
        yield tuple(entry.shape), entry.dtype
        return
    kinds: dict[Any, list[tuple[int, ...]]] = {}
    for tensor in leaves(entry):
        kinds.setdefault((tensor.dtype, tensor.dim()), []).append(tuple(tensor.shape))
    for (dtype, _), shapes in kinds.items():
        yield _sizes_together(shapes), dtype


def _sizes_together(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """How many tensors; their elements, and the root of these numbers' squares, which grows with
    what is made for the pairs of each one's; the largest size along each dimension.
    """
    elements = [*map(math.prod, shapes)]
    root = math.ceil(math.hypot(*elements))
    return len(shapes), sum(elements), root, *map(max, zip(*shapes, strict=True))


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch; of an object that only `split=` can cut, those that it and what it
    holds have.
    """
    return _found_in(batch, leaves)


def _found_in(batch: Any, find: _Find) -> list[Any]:
    return list(find(batch)) or _found_inside(batch, find)


def _found_inside(holder: Any, find: _Find) -> list[Any]:
    """What is nearest to the surface first."""
    found: list[Any] = []
    holders = [holder]
    for _ in range(_DEPTH):
        held = [(field, list(find(field))) for field in chain.from_iterable(map(_fields, holders))]
        found += chain.from_iterable(inside for _, inside in held)
        holders = [field for field, inside in held if not inside and not callable(field)]
    return found


def _fields(holder: Any) -> list[Any]:
    return (
        list(holder.values())
        if isinstance(holder, Mapping)
        else list(getattr(holder, "__dict__", {}).values())
    )


def part_shape(part: Any) -> PartShape:
    """By which a step remembers the micro-batches that left their plan."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(part))


def covers(large: Shape, small: Shape) -> bool:
    """Whether every tensor of the one shape is at least as large as the other's: then so are all
    activations.
    """
    return _are_of_one_kind(large, small) and all(
        all(x >= y for x, y in zip(a, b, strict=True))
        for (a, _), (b, _) in zip(large, small, strict=True)
    )


def _are_of_one_kind(one: Shape, other: Shape) -> bool:
    """Whether there are as many tensors, of the same types, with as many dimensions."""
    return [(len(sizes), dtype) for sizes, dtype in one] == [
        (len(sizes), dtype) for sizes, dtype in other
    ]


def growth(before: Shape, new: Shape) -> float:
    """By how much the one shape is larger than the other where it is most; infinite if it is of
    another kind.
    """
    if not _are_of_one_kind(before, new):
        return math.inf
    sizes = chain.from_iterable(
        zip(old, grown, strict=True) for (old, _), (grown, _) in zip(before, new, strict=True)
    )
    return max((_times_as_large(old, size) for old, size in sizes), default=1.0)


def shrinkage(before: Shape, new: Shape) -> float:
    """How many times a batch of the one shape is as large as a smaller one, at least: along each
    size in which they differ, and in all it holds.
    """
    if not covers(before, new):
        return 1.0
    sizes = chain.from_iterable(
        zip(old, shrunk, strict=True) for (old, _), (shrunk, _) in zip(before, new, strict=True)
    )
    along_each = min((old / max(1, size) for old, size in sizes if old != size), default=1.0)
    return max(1.0, min(along_each, _elements(before) / max(1, _elements(new))))


def _elements(shape: Shape) -> int:
    return sum(math.prod(sizes) for sizes, _ in shape)


def _times_as_large(old: int, size: int) -> float:
    """At least once."""
    if size <= old:
        return 1.0
    return size / old if old else math.inf
