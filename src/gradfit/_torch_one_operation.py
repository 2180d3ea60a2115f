"""Functions that are one operation to whoever listens: private torch API, as in `_torch.py`.

A recorder hears of such a function with its arguments, and may run it again; what it does inside is
nobody's operation. It may write to memory without telling anybody, as generated code does, or run
backward passes of its own, of which a tape would be one with holes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradfit import _torch_listen as listen


class OneOperation:
    """An operator that is no operator of torch's: called with tensors, it returns a list of new
    ones.
    """

    tags: frozenset[Any] = frozenset()  # as every operator has
    mutated: tuple[int, ...] = ()  # the places of the arguments that it writes to
    info: Any = None  # how a recorder treats it: see `tape/operators.py`

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return False

    @property
    def can_run_again(self) -> bool:
        """Whether it does nothing but make its results of its arguments."""
        return True

    def __call__(self, *args: Any) -> Any:
        return self.heard(*args) if listen.is_heard() else self._run(*args)

    def _run(self, *args: Any) -> Any:
        """What it does, where nobody listens."""
        raise NotImplementedError

    def heard(self, *args: Any) -> Any:
        """Let those who listen run it; whoever counts bytes is told of what is made inside."""
        if _thread.ears is not None:
            return listen.heard(self, *args)
        _thread.ears = listen.who_counts()
        try:
            return listen.heard(self, *args)
        finally:
            _thread.ears = None


class _Ears(threading.local):
    ears: list[listen.ByteCounter] | None = None  # who counts bytes, while an operation is heard


_thread = _Ears()


class Telling:
    """A function that makes tensors, and tells of them."""

    __slots__ = ("_ears", "_function")

    def __init__(self, function: Any, ears: list[listen.ByteCounter]) -> None:
        self._function, self._ears = function, ears

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._function(*args, **kwargs)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                for ear in self._ears:
                    ear._made_inside(tensor)
        return out


@contextlib.contextmanager
def telling() -> Iterator[list[listen.ByteCounter]]:
    """Inside of an operation: whoever counts bytes is told which of torch's operators begins, and
    what it has made; these are also given.
    """
    ears = _thread.ears
    if not ears:
        yield []
        return

    def call(op: Any, args: Any, kwargs: Any) -> Any:
        for ear in ears:
            ear._begins_inside(op, args, kwargs)
        return op(*args, **kwargs)

    with listen.heard_by_one(Telling(call, ears)):
        yield ears


def _ears_of_thread() -> Callable[[], None]:
    def none_is_left() -> None:
        _thread.ears = None

    return none_is_left


listen.thread_settings.append(_ears_of_thread)
