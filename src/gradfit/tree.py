"""Batches as nests of tensors: how many rows, how to cut them along dim 0, how to join what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gradfit.errors import MisuseError


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
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from leaves(getattr(nest, field.name))


def size_of_batch(batch: Any) -> int:
    """The rows of a batch: the size of dim 0, on which all its tensors must agree.

    >>> size_of_batch({"x": torch.zeros(6, 2), "y": torch.zeros(6)})
    6
    """
    sizes = {tensor.size(0) for tensor in leaves(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = f"sizes {sorted(sizes)} along dim 0" if sizes else "no tensor with a dim 0"
        raise MisuseError(f"The batch cannot be split: it has {found}. Pass split=, a function (batch, size) -> parts.")
    return sizes.pop()


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """Parts of at most `size` rows, as views; what is not a tensor goes into each part as it is.

    >>> [part.tolist() for part in split_batch(torch.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    total = size_of_batch(batch)
    for start in range(0, total, size):
        rows = slice(start, start + size)
        yield map_tensors(batch, lambda tensor, rows=rows: tensor[rows] if tensor.dim() else tensor)  # type: ignore[misc]


def repeat_rows(batch: Any, rows: int) -> Any:
    """A batch of `rows` rows, the given ones over and over; the batch itself if it has as many.

    >>> repeat_rows(torch.arange(3), 7).tolist()
    [0, 1, 2, 0, 1, 2, 0]
    """
    have = size_of_batch(batch)
    if have == rows:
        return batch
    index = torch.arange(rows) % have
    return map_tensors(batch, lambda tensor: tensor[index.to(tensor.device)] if tensor.dim() else tensor)


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
