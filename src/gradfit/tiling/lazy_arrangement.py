"""The rows of lazy logits in another arrangement: views, slices, indices, transposes.

They are made by arranging the hidden states, which have the same rows, and whatever else has them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gradfit.tiling.expression import Projection, Rows
from gradfit.tiling.lazy import LazyLogits, handlers
from gradfit.tiling.lazy_handlers import (
    bound,
    broadcasts_to,
    from_front,
    handles,
    one_by_one,
    rows_back,
)

_NO_KWARGS: dict[str, Any] = {}


@handles("view", "reshape")
def _view(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    sizes = one_by_one(() if kwargs else args[1:])
    if not lazy.has_words_last or not _keeps_words(lazy, sizes):
        return NotImplemented
    # `reshape` also where `view` was called: hidden states may lie otherwise than logits would.
    origin = (torch.reshape, (lazy, sizes), _NO_KWARGS)
    return lazy.arrange(
        lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1]), origin, is_view=True
    )


def _keeps_words(lazy: LazyLogits, sizes: tuple[Any, ...]) -> bool:
    """Whether a view of these sizes has the words as its last dimension."""
    are_numbers = bool(sizes) and all(isinstance(size, int) for size in sizes)
    if not are_numbers or not lazy.numel():
        return False
    words = lazy.shape[-1]
    if sizes[-1] == -1:
        return bool(math.prod(sizes[:-1]) * words == lazy.numel())
    return bool(sizes[-1] == words)


@handles("flatten")
def _flatten(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    first, last = bound(("start_dim", "end_dim"), args, kwargs, (0, -1))
    first, last = from_front(first, lazy.dim()), from_front(last, lazy.dim())
    if last >= lazy.dim() - 1 or not lazy.has_words_last:
        return NotImplemented
    origin = (torch.flatten, (lazy, first, last), _NO_KWARGS)
    return lazy.arrange(lambda hidden: hidden.flatten(first, last), origin, is_view=True)


@handles("contiguous", "to_dense")
def _same(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 or kwargs:
        return NotImplemented
    return lazy


@handles("view_as", "expand_as", "alias")
def _itself(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and (not isinstance(args[1], Tensor) or args[1].shape != lazy.shape):
        return NotImplemented
    return lazy


@handles("broadcast_tensors")
def _broadcast(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    shape = lazy.shape
    are_within = all(broadcasts_to(each.shape, shape) for each in args)
    if not are_within or any(isinstance(each, LazyLogits) and each.shape != shape for each in args):
        return NotImplemented
    return tuple(each if isinstance(each, LazyLogits) else each.expand(shape) for each in args)


@handles("clone")
def _clone(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if not lazy.has_words_last:
        return NotImplemented
    return lazy.arrange(lambda hidden: hidden, (torch.clone, (lazy,), {}), is_view=False)


@handles("detach")
def _detach(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return lazy.detached((torch.detach, (lazy,), {}))


# ------------------------------------------------------------------------------------------ indices


@handles("__getitem__")
def _getitem(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    items = _one_for_each(args[1], lazy.dim())
    if items is None or not lazy.has_words_last:
        return NotImplemented
    *rows, words = items
    if isinstance(words, slice):
        return _row_index(lazy, rows, words)
    return _picked_words(lazy, rows, words) if isinstance(words, Tensor) else NotImplemented


def _one_for_each(index: Any, dims: int) -> list[Any] | None:
    """The index with one item for each dimension, that of the words last (a mask is for several),
    and None where it adds one. None if it is none that is known here.
    """
    items = [_as_tensor(item) for item in (index if isinstance(index, tuple) else [index])]
    if not all(map(_is_simple, items)) or sum(item is Ellipsis for item in items) > 1:
        return None
    missing = dims - sum(map(_dims_used, items))
    if missing < 0:
        return None  # torch says what is wrong
    at = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * missing
    return None if items[-1] is None or _is_mask(items[-1]) else items


def _as_tensor(item: Any) -> Any:
    is_list = isinstance(item, list) and item and all(isinstance(each, int) for each in item)
    return torch.tensor(item) if is_list else item


def _is_simple(item: Any) -> bool:
    """Not an array or a list of lists, whose rules are many, nor a single truth."""
    if isinstance(item, Tensor):
        is_truth = item.dtype is torch.bool and not item.dim()
        return item.dtype in (torch.int64, torch.int32, torch.bool) and not is_truth
    is_number = isinstance(item, int) and not isinstance(item, bool)
    return item is None or item is Ellipsis or is_number or isinstance(item, slice)


def _dims_used(item: Any) -> int:
    """How many dimensions an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return int(item.dim()) if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool


def _row_index(lazy: LazyLogits, rows: list[Any], words: slice) -> Any:
    """Rows, and all their words or, of a projection alone, a slice of them."""
    whole = (*rows, slice(None))
    takes_all = words == slice(None)
    is_view = not any(isinstance(item, Tensor) for item in rows)
    if not takes_all and not (is_view and isinstance(lazy.expression, Projection)):
        return NotImplemented
    origin = (Tensor.__getitem__, (lazy, whole), _NO_KWARGS)
    taken = lazy.arrange(lambda hidden: hidden[whole], origin, is_view=is_view)
    if takes_all:
        return taken
    return taken.take_words(words, (Tensor.__getitem__, (taken, (..., words)), _NO_KWARGS))


def _picked_words(lazy: LazyLogits, rows: list[Any], words: Tensor) -> Any:
    """The same few words of all rows, `x[..., words]`, or a word of each, `x[rows, words]`."""
    words = words.to(lazy.device)  # indices may be on the CPU, and a list's are
    tensors = [item for item in rows if isinstance(item, Tensor)]
    if not tensors:
        few = 2 * words.numel() <= lazy.shape[-1] and words.dim() == 1
        return _same_words(_taken(lazy, rows), words) if few else NotImplemented
    if len(tensors) < len(rows):
        return NotImplemented
    if not any(map(_is_mask, rows)):
        *rows, words = torch.broadcast_tensors(*rows, words)  # type: ignore[no-untyped-call]
    taken = _taken(lazy, rows)
    return _word_of_each(taken, words) if words.shape == taken.lead else NotImplemented


def _taken(lazy: LazyLogits, rows: list[Any]) -> LazyLogits:
    index: Any = (*rows, slice(None))
    taken: Any = lazy[index]
    return taken  # type: ignore[no-any-return]


def _same_words(lazy: LazyLogits, words: Tensor) -> Tensor:
    found = lazy.reduce(torch.index_select, (lazy.expression, -1, words), {})
    return rows_back(lazy, found)[0]


def _word_of_each(lazy: LazyLogits, words: Tensor) -> Tensor:
    picked = Rows(words.long().unsqueeze(-1).contiguous(), lead=words.dim())
    found = lazy.reduce(torch.gather, (lazy.expression, -1, picked), {})
    return rows_back(lazy, found)[0].squeeze(-1)


# ------------------------------------------------------------------------------------ one dimension


_ARGUMENTS_BY_DIM = {
    "narrow": ("dim", "start", "length"),
    "select": ("dim", "index"),
    "unsqueeze": ("dim",),
    "squeeze": ("dim",),
    "unflatten": ("dim", "sizes"),
    "index_select": ("dim", "index"),
}


def _by_dim(name: str, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Functions of one dimension, which must not be that of the words."""
    names = _ARGUMENTS_BY_DIM[name]
    dim, *rest = bound(names, args, kwargs, (None,) * len(names))
    dims = lazy.dim() + (name == "unsqueeze")
    if set(kwargs) - set(names) or not _is_beside_words(dim, dims) or not lazy.has_words_last:
        return NotImplemented
    rest = [from_front(dim, dims), *rest]
    return _function_of_rows(lazy, getattr(torch, name), rest, is_view=name != "index_select")


def _function_of_rows(lazy: LazyLogits, function: Any, rest: list[Any], *, is_view: bool) -> Any:
    return lazy.arrange(
        lambda hidden: function(hidden, *rest), (function, (lazy, *rest), {}), is_view=is_view
    )


def _is_beside_words(dim: Any, dims: int) -> bool:
    """Whether a dimension is given, by its number, and is not the last."""
    return isinstance(dim, int) and from_front(dim, dims) != dims - 1


for _name in _ARGUMENTS_BY_DIM:
    handles(_name)(functools.partial(_by_dim, _name))


@handles("flip")
def _flip(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    dims = kwargs.get("dims", one_by_one(args[1:]))
    if not _are_beside_words(lazy, dims):
        return NotImplemented
    return _function_of_rows(lazy, torch.flip, [[*dims]], is_view=False)


@handles("roll")
def _roll(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    shifts, dims = bound(("shifts", "dims"), args, kwargs, (None, None))
    if not _are_beside_words(lazy, one_by_one((dims,))):
        return NotImplemented
    return _function_of_rows(lazy, torch.roll, [shifts, dims], is_view=False)


def _are_beside_words(lazy: LazyLogits, dims: Any) -> bool:
    are_beside = all(_is_beside_words(dim, lazy.dim()) for dim in dims)
    return bool(dims) and are_beside and lazy.has_words_last


# ----------------------------------------------------------------------------------- several pieces


def _pieces(name: str, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Split along rows: as many lazy views, with the bounds that torch gives the places."""
    names = {"unbind": ("dim",), "split": ("split_size", "dim"), "chunk": ("chunks", "dim")}
    wanted = names.get(name, ("indices_or_sections", "dim"))
    *how, dim = bound(wanted, args, _renamed(kwargs), (None,) * (len(wanted) - 1) + (0,))
    dims = lazy.dim()
    if not _is_beside_words(dim, dims) or not lazy.has_words_last:
        return NotImplemented
    dim = from_front(dim, dims)
    if name == "unbind":
        return tuple(torch.select(lazy, dim, at) for at in range(lazy.shape[dim]))
    places = getattr(torch, name)(torch.arange(lazy.shape[dim]), *how)
    begins = [int(each[0]) if len(each) else 0 for each in places]
    sizes = map(len, places)
    return tuple(
        torch.narrow(lazy, dim, begin, size) for begin, size in zip(begins, sizes, strict=True)
    )


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`torch.split` and `Tensor.split` call the same argument by two names."""
    return {
        "split_size" if name == "split_size_or_sections" else name: value
        for name, value in kwargs.items()
    }


for _name in ("split", "chunk", "unbind", "tensor_split"):
    handles(_name)(functools.partial(_pieces, _name))


# ------------------------------------------------------------------------------------------- orders


@handles("transpose", "swapaxes", "swapdims")
def _transpose(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 3:
        return NotImplemented
    first, second = (from_front(dim, lazy.dim()) for dim in args[1:])
    order = list(range(lazy.dim()))
    order[first], order[second] = order[second], order[first]
    return _reordered(lazy, order)


def _transposed_matrix(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return torch.transpose(lazy, -2, -1) if lazy.dim() >= 2 else NotImplemented


handlers[Tensor.mT.__get__] = _transposed_matrix  # type: ignore[attr-defined]


@handles("permute")
def _permuted(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    order = one_by_one(args[1:])
    if kwargs or len(order) != lazy.dim():
        return NotImplemented
    return _reordered(lazy, [from_front(dim, lazy.dim()) for dim in order])


@handles("movedim", "moveaxis")
def _movedim(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs or len(args) != 3 or not all(isinstance(dim, int) for dim in args[1:]):
        return NotImplemented
    source, destination = (from_front(dim, lazy.dim()) for dim in args[1:])
    order = list(range(lazy.dim()))
    order.insert(destination, order.pop(source))
    return _reordered(lazy, order)


def _reordered(lazy: LazyLogits, order: list[int]) -> Any:
    words = lazy.class_dim
    lead = [dim for dim in range(lazy.dim()) if dim != words]
    place = order.index(words)
    new_lead = [lead.index(dim) for dim in order if dim != words]
    origin = (torch.permute, (lazy, order), _NO_KWARGS)
    return lazy.arrange(
        lambda hidden: hidden.permute(*new_lead, hidden.dim() - 1),
        origin,
        is_view=True,
        class_dim=place,
    )
