"""What a loss scaler has scaled and unscaled: neither a plain backward pass nor a step by hand
says.

torch's `GradScaler` leaves no trace of its calls: the graph has given up what it saved by the time
that gradients arrive, and they are unscaled without a new version. So two methods are stood in for,
on that one object: `scale` leaves a mark on what it returns, `unscale_` counts.
"""

from __future__ import annotations

import collections
import contextlib
import types
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

_MARK = "_gradfit_scaled"


class _Observed:
    """A scaler's method that can be asked about; copies and pickles of the scaler have the plain
    one.
    """

    def __init__(self, scaler: Any, name: str) -> None:
        self._scaler = weakref.ref(scaler)  # which holds this
        self._name = name
        # by the identity of what it was called with
        self.calls: collections.Counter[int] = collections.Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self._scaler()), self._name)(self._scaler(), *args, **kwargs)
        if self._name == "scale":
            _mark(result)
        else:
            self.calls[id(args[0]) if args else 0] += 1
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_method, (self._scaler(), self._name)


def _plain_method(scaler: Any, name: str) -> Any:
    return types.MethodType(getattr(type(scaler), name), scaler)


def observe_scaler(scaler: Any) -> None:
    """From now on what this scaler scales and unscales can be told."""
    for name in ("scale", "unscale_"):
        if not isinstance(getattr(scaler, "__dict__", {}).get(name), _Observed):
            # without a `__dict__` of its own, or read-only
            with contextlib.suppress(AttributeError, TypeError):
                setattr(scaler, name, _Observed(scaler, name))


def is_scaled(roots: Iterable[object]) -> bool:
    """Whether all these roots of a backward pass came out of a scaler; what cannot carry a mark
    counts as scaled.
    """
    return all(isinstance(root, GradientEdge) or getattr(root, _MARK, False) for root in roots)


def times_unscaled(scaler: Any, optimizer: Any) -> int | None:
    """How often a scaler has unscaled an optimizer's gradients; None if that cannot be told."""
    method = getattr(scaler, "unscale_", None)
    return method.calls[id(optimizer)] if isinstance(method, _Observed) else None


def _mark(outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        setattr(outputs, _MARK, True)
    elif isinstance(outputs, list | tuple):
        for one in outputs:
            _mark(one)
