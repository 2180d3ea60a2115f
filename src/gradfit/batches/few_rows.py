"""Which rows of a batch a loss is measured on, and how they are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from gradfit.batches.first_rows import FirstRows
from gradfit.tree import (
    leaves,
    map_tensors,
    pick_rows,
    repeat_rows,
    size_as_cut,
    size_of_batch,
    split_batch,
    take_rows,
)

Cut = Callable[[Any, int], Iterable[Any]]
RowsAndParts = tuple[Any, Sequence[Any]]

_OTHER_ROWS = 4  # so many other groups of a batch's rows, where its loss cannot be read


def count_measured_rows(part: Any, split: Cut | None) -> int:
    """Of what was cut from a batch."""
    return size_as_cut(part) if split is None else sum(1 for _ in split(part, 1))


def rows_of_batch(batch: Any, split: Cut | None) -> FirstRows:
    """What rows are measured of, where nobody has cut some of them before."""
    total = size_of_batch(batch) if split is None else sum(1 for _ in split(batch, 1))
    return FirstRows(batch, split, total)


def choose_rows(first: FirstRows, most: int) -> Iterator[RowsAndParts]:
    """A few rows, whole and in unequal parts, cut in two ways, each when it is asked for: a batch
    may hold thousands of tensors.
    """
    if first.total == 1 and first.split is None:
        first = FirstRows(repeat_rows(first.batch, 3), None, 3)
    rows = max(2, min(most, first.total))
    whole = first.of(rows)
    for size in sorted({rows - 1, (rows + 1) // 2}, reverse=True):
        yield whole, _parts(first, whole, size, [*range(rows)])


def _parts(first: FirstRows, whole: Any, size: int, order: list[int]) -> list[Any]:
    """Parts of a few rows, which are the batch's at these positions. Those that are its first ones
    may have been cut before.
    """
    if first.split is not None:
        return list(first.split(whole, size))
    parts = []
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        is_first = chosen == [*range(len(chosen))]
        rows = slice(start, start + size)
        parts.append(first.of(len(chosen)) if is_first else take_rows(whole, rows))
    return parts


def rows_for_gradients(first: FirstRows, most: int) -> RowsAndParts | None:
    """A few rows and unequal parts of them, one of the rows in both: words that are in two parts
    may count otherwise than in one. None if there is no room for two rows.
    """
    if most < 2:
        return None
    total, split = first.total, first.split
    rows = max(2, min(most, 3 if total == 1 and split is None else total))
    order = [row % total for row in ([*range(rows - 1), 0] if rows > 2 else [0, 1])]
    whole = pick_rows(first.batch, order) if split is None else first.of(rows)
    return whole, _parts(first, whole, (rows + 1) // 2, order)


def other_rows(first: FirstRows, rows: int) -> list[RowsAndParts]:
    """Some more groups of rows from all over the batch, each with its parts."""
    batch, split, total = first.batch, first.split, first.total
    if split is None:
        groups = _rows_far_apart(batch, rows, total)
    else:
        step = max(1, total // rows // _OTHER_ROWS)
        groups = list(islice(split(batch, rows), 1, None, step))
    cut = split or split_batch
    cuts = [(whole, list(cut(whole, (rows + 1) // 2))) for whole in groups[:_OTHER_ROWS]]
    return [(whole, parts) for whole, parts in cuts if len(parts) > 1]


def _rows_far_apart(batch: Any, rows: int, total: int) -> list[Any]:
    """Groups whose rows are far from each other, so that parts may be unlike, and the last rows."""
    apart = max(1, total // rows)
    starts = range(0, apart, max(1, apart // _OTHER_ROWS))
    orders = [list(range(start, total, apart))[:rows] for start in starts]
    orders = [*orders[: _OTHER_ROWS - 1], list(range(max(0, total - rows), total))]
    return [pick_rows(batch, order) for order in orders]


def could_be_sequence_first(batch: Any) -> bool:
    sizes = {tensor.size(1) for tensor in leaves(batch) if tensor.dim() > 1}
    return len(sizes) == 1 and max(sizes) > 1


def could_be_samples(batch: Any) -> bool:
    """Whether it is a list of nests, each perhaps a row."""
    return isinstance(batch, list) and len(batch) > 1


def cut_list(batch: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(batch), size):
        yield batch[start : start + size]


def cut_dim_1(nest: Any, size: int) -> Iterator[Any]:
    wide = next(tensor.size(1) for tensor in leaves(nest) if tensor.dim() > 1)
    for start in range(0, wide, size):
        yield map_tensors(nest, partial(_narrowed, cut=slice(start, start + size)))


def _narrowed(tensor: Tensor, cut: slice) -> Tensor:
    return tensor[:, cut] if tensor.dim() > 1 else tensor
