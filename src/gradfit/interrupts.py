"""Ctrl-C can come between any two lines of Python. Some of them belong together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class uninterrupted:  # noqa: N801  (as torch.no_grad)
    """A context for a few short steps of which either all or none must happen: Ctrl-C waits until
    it ends.

    What the signal would have done then happens there, so `__exit__` may raise `KeyboardInterrupt`.
    Only the main thread runs signal handlers; in others this does nothing. An interrupt that comes
    while a destructor runs cannot be kept: Python itself drops what a destructor raises.

    >>> with uninterrupted():
    ...     done = "all of it"
    """

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came = False
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # neither ignored nor left to the system
                self._handler = handler
                signal.signal(signal.SIGINT, self._wait)

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._came = True
