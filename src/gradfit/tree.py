"""Batches as nests of tensors: how many rows, how to cut them along dim 0, how to join what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gradfit.errors import MisuseError

_UNCUT = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Something in a batch that every part gets as it is."""

    content: Any


def whole(content: Any) -> Whole:
    """Mark an entry of a batch that goes to every part uncut: `loss_fn` is given `content` itself.

    Args:
        content: anything: a table that all rows use, a list of names, a size.

    >>> [unmarked(part)["names"] for part in split_batch({"x": torch.arange(3), "names": whole(["a", "b"])}, 2)]
    [['a', 'b'], ['a', 'b']]
    """
    return Whole(content)


def leaves(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nest, in a fixed order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from leaves(item)
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item)
    elif isinstance(nest, Whole):
        yield from leaves(nest.content)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from leaves(getattr(nest, field.name))


class _Entry(NamedTuple):
    """Something in a batch that has rows."""

    name: str
    rows: int
    is_tensor: bool


def size_of_batch(batch: Any, name: str = "The batch") -> int:
    """The rows of a batch: the size of dim 0, on which all its tensors and lists must agree.

    >>> size_of_batch({"x": torch.zeros(6, 2), "text": ["a", "b", "c", "d", "e", "f"]})
    6
    """
    sparse = next((tensor.layout for tensor in leaves(batch) if tensor.layout in _UNCUT), None)
    if sparse is not None:
        raise MisuseError(
            f"{name} cannot be split: it has a {sparse} tensor. Pass split=, a function (batch, size) -> parts."
        )
    entries = list(_entries(batch, ""))
    tensors = [entry for entry in entries if entry.is_tensor]
    if not tensors:
        raise MisuseError(
            f"{name} cannot be split: it has no tensor with a dim 0. Pass split=, a function (batch, size) -> parts."
        )
    rows = tensors[0].rows
    for entry in (*tensors, *entries):
        if entry.rows != rows:
            what = f"size {entry.rows} along dim 0" if entry.is_tensor else f"length {entry.rows}"
            raise MisuseError(
                f"{name} cannot be split: {entry.name} has {what}, {tensors[0].name} has {rows} rows. Pass "
                f"gf.whole(…) as {entry.name} if every part is to get all of it, or split=, a function "
                "(batch, size) -> parts."
            )
    return rows


def _entries(nest: Any, name: str) -> Iterator[_Entry]:
    """What has rows, by name: tensors, arrays, and lists that are no containers of tensors."""
    if isinstance(nest, torch.Tensor | np.ndarray):
        if nest.ndim:
            yield _Entry(name or "it", nest.shape[0], isinstance(nest, torch.Tensor))
    elif isinstance(nest, Whole):
        return
    elif isinstance(nest, Mapping):
        for key, item in nest.items():
            yield from _entries(item, f"{name}[{key!r}]")
    elif _is_row_list(nest):
        yield _Entry(name or "it", len(nest), False)
    elif isinstance(nest, list | tuple):
        for position, item in enumerate(nest):
            yield from _entries(item, f"{name}[{position}]")
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from _entries(getattr(nest, field.name), f"{name}.{field.name}")


def _is_row_list(nest: Any) -> bool:
    """A list or tuple with one item a row: one that holds no tensors, arrays or marks."""
    if not isinstance(nest, list | tuple) or hasattr(nest, "_fields"):
        return False
    return not any(_holds_rows(item) for item in nest)


def _holds_rows(nest: Any) -> bool:
    if isinstance(nest, torch.Tensor | np.ndarray | Whole):
        return True
    if isinstance(nest, Mapping):
        return any(map(_holds_rows, nest.values()))
    if isinstance(nest, list | tuple):
        return any(map(_holds_rows, nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return any(_holds_rows(getattr(nest, field.name)) for field in dataclasses.fields(nest))
    return False


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """Parts of at most `size` rows: tensors as views, lists with them; numbers and strings go into each as they are.

    >>> list(split_batch({"x": torch.arange(3), "text": ["a", "b", "c"]}, 2))
    [{'x': tensor([0, 1]), 'text': ['a', 'b']}, {'x': tensor([2]), 'text': ['c']}]
    """
    total = size_of_batch(batch)
    for start in range(0, total, size):
        yield take_rows(batch, slice(start, start + size))


def take_rows(nest: Any, rows: slice) -> Any:
    """These rows of a nest."""
    if isinstance(nest, torch.Tensor | np.ndarray):
        return nest[rows] if nest.ndim else nest
    if isinstance(nest, Whole):
        return nest
    if _is_row_list(nest):
        return nest[rows]
    return _map_many(nest, [nest], lambda parts: take_rows(parts[0], rows))


def unmarked(nest: Any) -> Any:
    """The nest as `loss_fn` is given it: without the marks of `whole`; the nest itself where there are none."""
    return _unmark(nest) if _holds_marks(nest) else nest


def _unmark(nest: Any) -> Any:
    if isinstance(nest, Whole):
        return nest.content
    if isinstance(nest, torch.Tensor) or _is_row_list(nest):
        return nest
    return _map_many(nest, [nest], lambda parts: _unmark(parts[0]))


def _holds_marks(nest: Any) -> bool:
    if isinstance(nest, Whole):
        return True
    if isinstance(nest, Mapping):
        return any(map(_holds_marks, nest.values()))
    if isinstance(nest, list | tuple):
        return any(_holds_marks(item) for item in nest if not isinstance(item, str | int | float | torch.Tensor))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return any(_holds_marks(getattr(nest, field.name)) for field in dataclasses.fields(nest))
    return False


def repeat_rows(batch: Any, rows: int) -> Any:
    """A batch of `rows` rows, the given ones over and over; the batch itself if it has as many.

    >>> repeat_rows(torch.arange(3), 7).tolist()
    [0, 1, 2, 0, 1, 2, 0]
    """
    have = size_of_batch(batch)
    if have == rows:
        return batch
    return _repeat(batch, [row % have for row in range(rows)])


def _repeat(nest: Any, order: list[int]) -> Any:
    if isinstance(nest, torch.Tensor):
        return nest[torch.tensor(order, device=nest.device)] if nest.dim() else nest
    if isinstance(nest, np.ndarray):
        return nest[order] if nest.ndim else nest
    if isinstance(nest, Whole):
        return nest
    if _is_row_list(nest):
        return type(nest)(nest[row] for row in order)
    return _map_many(nest, [nest], lambda parts: _repeat(parts[0], order))


def join_chunks(outputs: Sequence[Any], total: int) -> Any:
    """Outputs of the parts as the output of the whole: tensors joined along dim 0.

    >>> join_chunks([torch.zeros(2, 3), torch.ones(1, 3)], 3).shape
    torch.Size([3, 3])
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if any(output.dim() == 0 for output in outputs) or sum(output.size(0) for output in outputs) != total:
            shapes = [tuple(output.shape) for output in outputs[:3]]
            raise MisuseError(
                f"The chunks' outputs cannot be joined into {total} rows: their shapes are {shapes}… "
                "Return one row per row of the chunk; take means and sums outside of chunked()."
            )
        return torch.cat(list(outputs))
    return _map_many(first, outputs, lambda parts: join_chunks(parts, total))


def map_tensors(nest: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with each tensor replaced by `function(tensor)`.

    >>> map_tensors({"x": torch.ones(2), "name": "a"}, lambda tensor: tensor.sum().item())
    {'x': 2.0, 'name': 'a'}
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    return _map_many(nest, [nest], lambda parts: map_tensors(parts[0], function))


def _map_many(like: Any, nests: Sequence[Any], function: Any) -> Any:
    """Rebuild one level of a nest from the corresponding items of several."""
    if isinstance(like, Mapping):
        items = {key: function([nest[key] for nest in nests]) for key in like}
        if type(like) is dict:
            return items
        try:
            return type(like)(items)  # type: ignore[call-arg]  # BatchEncoding, OrderedDict, ModelOutput, …
        except TypeError:
            return type(like)(**items)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(function(list(parts)) for parts in zip(*nests, strict=True)))
    if isinstance(like, list | tuple):
        return type(like)(function(list(parts)) for parts in zip(*nests, strict=True))
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in dataclasses.fields(like)]
        return dataclasses.replace(like, **{n: function([getattr(nest, n) for nest in nests]) for n in names})
    return like
