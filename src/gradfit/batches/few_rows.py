"""Which rows of a batch a loss is measured on, and how they are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from gradfit.tree import leaves, map_tensors, pick_rows, repeat_rows, size_of_batch, split_batch

Cut = Callable[[Any, int], Iterable[Any]]
RowsAndParts = tuple[Any, Sequence[Any]]

_OTHER_ROWS = 4  # so many other groups of a batch's rows, where its loss cannot be read


def count_measured_rows(part: Any, split: Cut | None) -> int:
    return size_of_batch(part) if split is None else sum(1 for _ in split(part, 1))


def choose_rows(batch: Any, split: Cut | None, most: int) -> Iterator[RowsAndParts]:
    """A few rows, whole and in unequal parts, cut in two ways, each when it is asked for: a batch
    may hold thousands of tensors.
    """
    total = count_measured_rows(batch, split)
    if total == 1 and split is None:
        batch, total = repeat_rows(batch, 3), 3
    rows = max(2, min(most, total))
    whole = next(_cut(batch, split, rows, total))
    for size in sorted({rows - 1, (rows + 1) // 2}, reverse=True):
        yield whole, list(_cut(whole, split, size, rows))


def _cut(batch: Any, split: Cut | None, size: int, rows: int) -> Iterator[Any]:
    """The parts of a batch of so many rows."""
    return split_batch(batch, size, rows) if split is None else iter(split(batch, size))


def rows_for_gradients(batch: Any, split: Cut | None, most: int) -> RowsAndParts | None:
    """A few rows and unequal parts of them, one of the rows in both: words that are in two parts
    may count otherwise than in one. None if there is no room for two rows.
    """
    if most < 2:
        return None
    total = count_measured_rows(batch, split)
    rows = max(2, min(most, 3 if total == 1 and split is None else total))
    if split is not None:
        whole = next(iter(split(batch, rows)))
    else:
        order = [*range(rows - 1), 0] if rows > 2 else [0, 1]
        whole = pick_rows(batch, [row % total for row in order])
    return whole, list(_cut(whole, split, (rows + 1) // 2, rows))


def other_rows(batch: Any, split: Cut | None, rows: int) -> list[RowsAndParts]:
    """Some more groups of rows from all over the batch, each with its parts."""
    total = count_measured_rows(batch, split)
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
