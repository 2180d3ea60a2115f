"""Which tensors accumulate: a mark on each, counted, that goes when the tensor goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradfit.errors import MisuseError

_holders = WeakTensorKeyDictionary()  # tensor → the windows that hold it, weakly
_enabled = WeakTensorKeyDictionary()  # tensors marked by hand


def mark(window: object, tensors: Iterable[Tensor]) -> None:
    """A window takes these tensors in."""
    for tensor in tensors:
        if tensor not in _holders:
            _holders[tensor] = weakref.WeakSet()
        _holders[tensor].add(window)


def unmark(window: object, tensors: Iterable[Tensor]) -> None:
    """A window lets these tensors go."""
    for tensor in tensors:
        if tensor in _holders:
            _holders[tensor].discard(window)


def enable_grad_accumulation(tensor: Tensor) -> None:
    """Say that gradients of this tensor add up over micro-batches; it will require one from now on.

    An `AccumulationContext` or a `GradientAccumulator` says so for its tensors by itself.

    >>> import torch
    >>> w = torch.zeros(2, requires_grad=True)
    >>> enable_grad_accumulation(w); has_grad_accumulation(w)
    True
    >>> disable_grad_accumulation(w); has_grad_accumulation(w)
    False
    """
    if not isinstance(tensor, Tensor):
        raise MisuseError(f"tensor is a {type(tensor).__name__}. Pass a parameter.")
    if not tensor.is_leaf or not (tensor.is_floating_point() or tensor.is_complex()):
        kind = "not a leaf" if not tensor.is_leaf else f"of type {tensor.dtype}"
        raise MisuseError(f"tensor is {kind}: nothing accumulates in it. Pass a parameter.")
    tensor.requires_grad_()
    _enabled[tensor] = True


def disable_grad_accumulation(tensor: Tensor) -> None:
    """Take the mark away, and what was accumulated with it; a tensor that a window holds stays in that window."""
    if tensor in _enabled:
        del _enabled[tensor]
        if not has_grad_accumulation(tensor):
            tensor.grad = None


def has_grad_accumulation(tensor: Tensor) -> bool:
    """Whether this tensor accumulates: marked by hand, or held by a window."""
    return tensor in _enabled or (tensor in _holders and len(_holders[tensor]) > 0)
