"""How a function of torch finds what is done for it on lazy logits, and how such a handler reads
its arguments.

Each handler gets the lazy tensor that came first and the call as it was; `NotImplemented` means
that in this form the numbers are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit.tiling.expression import Constant, Rows
from gradfit.tiling.lazy import Handler, LazyLogits, handlers


def functions_named(*names: str) -> Iterator[Any]:
    """Every function of torch that has one of these names."""
    for name in names:
        # `Tensor.softmax`, `torch.softmax` and `F.softmax` are three objects, and handlers are
        # looked up by object.
        for place in (Tensor, torch, F, torch.special):
            function = getattr(place, name, None)
            if callable(function):
                yield function


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for every function of torch that has one of these names."""

    def register(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(functions_named(*names), handler))
        return handler

    return register


def bound(names: tuple[str, ...], args: Any, kwargs: Any, defaults: tuple[Any, ...]) -> list[Any]:
    """The arguments after the first one, by position or name."""
    by_position = dict(zip(names, args[1:], strict=False))
    given = dict(zip(names, defaults, strict=True)) | by_position | kwargs
    return [given[name] for name in names]


def one_by_one(items: Any) -> tuple[Any, ...]:
    """Sizes or dimensions, which torch takes as single arguments and as one list, too."""
    is_list = len(items) == 1 and isinstance(items[0], tuple | list)
    return tuple(items[0] if is_list else items)


def from_front(dim: int, dims: int) -> int:
    """A dimension counted from the front; one that there is not is torch's error."""
    if not -dims <= dim < dims:
        expected = f"[{-dims}, {dims - 1}]"
        raise IndexError(
            f"Dimension out of range (expected to be in range of {expected}, but got {dim})"
        )
    return dim % dims


def over_words(lazy: LazyLogits, dim: Any) -> bool:
    """Whether this is the dimension of the words."""
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and from_front(dim, lazy.dim()) == lazy.class_dim


class Refused:
    """Stands for an argument that cannot be cut into tiles."""


def has_refused(operands: Any) -> bool:
    """Whether one of these positional and keyword arguments is `Refused`."""
    args, kwargs = operands
    return any(item is Refused for item in (*args, *kwargs.values()))


def operand(lazy: LazyLogits, item: Any) -> Any:
    """An argument as an expression has it."""
    if isinstance(item, LazyLogits):
        return item.expression if _is_alike(item, lazy) else Refused
    if not isinstance(item, Tensor):
        return item
    if not item.dim():
        return Constant(item)
    if item.device != lazy.device or not lazy.has_words_last:
        return Refused
    return _tensor_operand(lazy, item)


def _is_alike(one: LazyLogits, other: LazyLogits) -> bool:
    """Whether they have the same rows and words, in the same places."""
    return one.shape == other.shape and one.class_dim == other.class_dim


def _tensor_operand(lazy: LazyLogits, item: Tensor) -> Any:
    last = item.shape[-1]
    if last not in (1, lazy.shape[-1]) or item.dim() > lazy.dim():
        return Refused
    if item.numel() == last:
        return Constant(item.reshape(last))
    lead = lazy.lead
    if last == 1 and broadcasts_to(item.shape[:-1], lead):
        item = item.expand(*lead, 1)  # one number for each row is not worth a question
    if tuple(item.shape[:-1]) != lead:
        return Refused
    return Rows(item.contiguous(), lead=len(lead))


def broadcasts_to(shape: Any, other: Any) -> bool:
    """Whether a tensor of this shape can be expanded to the other.

    >>> broadcasts_to((2, 1), (3, 2, 5)), broadcasts_to((4,), (3, 2, 5))
    (True, False)
    """
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(one in (1, size) for one, size in pairs)


def rows_back(lazy: LazyLogits, results: tuple[Tensor, ...]) -> list[Tensor]:
    """Results with the flat rows first, in the shape of the rows; what is left of the words is in
    their place.
    """
    return [_row_back(lazy, each) for each in results]


def _row_back(lazy: LazyLogits, result: Tensor) -> Tensor:
    shaped = result.reshape((*lazy.lead, *result.shape[1:]))
    return shaped.movedim(-1, lazy.class_dim) if result.dim() > 1 else shaped
