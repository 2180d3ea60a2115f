"""Which tensors accumulate, and in whose window: marks that go when the tensor or the window goes.

Gradients of a tensor add up in one place, its `.grad`, so only one window at a time can fill there.
The window that was made or used last owns it; another one takes it over unless the owner is in the
middle of something.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradfit.arguments import read_tensor
from gradfit.errors import MisuseError


class Owner(Protocol):
    """A window, as far as ownership goes."""

    owns: bool
    """Its tensors are its own for now."""
    is_noted: bool
    """Its name stands at each of its tensors: it was the last one that claimed any of them."""

    @property
    def in_use(self) -> bool:
        """Whether it holds gradients that somebody still wants."""


_holders = WeakTensorKeyDictionary()  # tensor → the windows that hold it, weakly
_owners = WeakTensorKeyDictionary()  # tensor → the window that has claimed it last, weakly
_enabled = WeakTensorKeyDictionary()  # tensors marked by hand
_claiming = threading.RLock()


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
        if _owner_of(tensor) is window:
            del _owners[tensor]


def claim(window: Owner, tensors: Sequence[Tensor]) -> None:
    """Own these tensors from now on; MisuseError, before anything changes, if another window is
    filling there.
    """
    if window.is_noted:
        window.owns = True
        return
    with _claiming:
        if _another_in_use(window, tensors):
            gc.collect()  # it may be dead, in a reference cycle
            _require_no_other_in_use(window, tensors)
        reference = weakref.ref(window)
        for tensor in tensors:
            before = _owner_of(tensor)
            if before is not None and before is not window:
                before.is_noted = False
            _owners[tensor] = reference
        window.is_noted = window.owns = True


def _require_no_other_in_use(window: Owner, tensors: Sequence[Tensor]) -> None:
    at = _another_in_use(window, tensors)
    if at:
        raise MisuseError(
            f"The parameter at {at - 1}, of shape {tuple(tensors[at - 1].shape)}, is in the"
            " middle of another accumulator's window, and gradients of both would add up"
            " in one place. Call flush() or reset() on that one first, or use one"
            " accumulator for both."
        )


def disown(window: Owner) -> None:
    """Leave its tensors to whoever wants them. Its name stays at them, so that it costs next to
    nothing to claim them again.
    """
    window.owns = False


def belongs_to_another(window: Owner, tensors: Sequence[Tensor]) -> bool:
    """Whether any of these tensors was claimed by another window, which is still there, since this
    one claimed them.
    """
    if window.is_noted:
        return False
    return any(_other_owner(window, tensor) is not None for tensor in tensors)


def _owner_of(tensor: Tensor) -> Owner | None:
    owner: Owner | None = _owners[tensor]() if tensor in _owners else None
    return owner


def _other_owner(window: Owner, tensor: Tensor) -> Owner | None:
    owner = _owner_of(tensor)
    return None if owner is window or owner is None or not owner.owns else owner


def _another_in_use(window: Owner, tensors: Sequence[Tensor]) -> int:
    """The position, counted from 1, of the first tensor that another window is filling; 0 if there
    is none.
    """
    for position, tensor in enumerate(tensors, 1):
        owner = _other_owner(window, tensor)
        if owner is not None and owner.in_use:
            return position
    return 0


def enable_grad_accumulation(tensor: Tensor) -> None:
    """Say that gradients of this tensor add up over micro-batches; it will require one from now on.

    An `AccumulationContext` or a `GradientAccumulator` says so for its tensors by itself.

    Args:
        tensor: a leaf of floating point type.

    >>> import torch
    >>> w = torch.zeros(2, requires_grad=True)
    >>> enable_grad_accumulation(w); has_grad_accumulation(w)
    True
    >>> disable_grad_accumulation(w); has_grad_accumulation(w)
    False
    """
    read_tensor(tensor, "tensor", "a parameter")
    if not tensor.is_leaf or not (tensor.is_floating_point() or tensor.is_complex()):
        kind = "not a leaf" if not tensor.is_leaf else f"of type {tensor.dtype}"
        raise MisuseError(f"tensor is {kind}: nothing accumulates in it. Pass a parameter.")
    tensor.requires_grad_()
    _enabled[tensor] = True


def disable_grad_accumulation(tensor: Tensor) -> None:
    """Take the mark away, and what was accumulated with it; a tensor that a window holds stays in
    that window.

    Args:
        tensor: a leaf of floating point type.
    """
    if read_tensor(tensor, "tensor", "a parameter") in _enabled:
        del _enabled[tensor]
        if not has_grad_accumulation(tensor):
            tensor.grad = None


def has_grad_accumulation(tensor: Tensor) -> bool:
    """Whether this tensor accumulates: marked by hand, or held by a window.

    Args:
        tensor: any tensor.
    """
    read_tensor(tensor, "tensor", "a parameter")
    return tensor in _enabled or (tensor in _holders and len(_holders[tensor]) > 0)
