"""Ctrl-C, or another signal, can come between any two lines of Python. Some of them belong
together.
"""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

# Whose handlers, if they are Python's, may raise anything.
_NUMBERS = [
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if (number := getattr(signal, name, None)) is not None  # not all are on Windows
]


class uninterrupted:  # noqa: N801  (as torch.no_grad)
    """A context for a few short steps of which either all or none must happen: Ctrl-C, and any
    other signal that the user has a handler for, waits until it ends.

    What the signal would have done then happens there, so `__exit__` may raise `KeyboardInterrupt`.
    Only the main thread runs signal handlers; in others this does nothing. What is raised in a
    destructor, Python itself drops: see `when_gone`.

    >>> with uninterrupted():
    ...     done = "all of it"
    """

    __slots__ = ("_came", "_handlers")

    def __enter__(self) -> None:
        self._came: list[int] = []
        self._handlers: list[tuple[int, Any]] = []
        if threading.current_thread() is threading.main_thread():
            try:
                self._hold_back()
            except BaseException:  # of a signal that was not held back yet
                self._put_back()
                raise

    def __exit__(self, *error: object) -> None:
        self._put_back()
        self._let_come()

    def _hold_back(self) -> None:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):  # neither ignored nor left to the system
                self._handlers.append((number, handler))
                signal.signal(number, self._wait)

    def _put_back(self) -> None:
        try:
            while self._handlers:
                signal.signal(*self._handlers[-1])
                self._handlers.pop()
        except BaseException:  # of a signal whose handler is back
            self._put_back()
            raise

    def _let_come(self) -> None:
        try:
            while self._came:
                signal.raise_signal(self._came.pop(0))
        finally:
            if self._came:
                self._let_come()

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)


_watches: dict[int, weakref.ref[Any]] = {}
_next_number = itertools.count().__next__


def when_gone(owner: object, work: Callable[[], object]) -> None:
    """Have `work()` called when `owner` dies; Ctrl-C that comes while it dies, comes afterwards.

    In a `__del__`, or in a function that a weak reference calls, it would be lost, and mostly at
    its first line: what comes while a graph's memory is given back is raised by the next Python
    that runs. A generator that goes on is inside of its `try` already.

    Args:
        owner: anything that weak references can refer to.
        work: may be called twice; must not hold the owner.
    """
    number = _next_number()
    steps = _works_when_sent(work, number)
    next(steps)
    _watches[number] = weakref.ref(owner, steps.send)


def _works_when_sent(work: Callable[[], object], number: int) -> Generator[None, object, None]:
    try:
        yield
        work()
    except GeneratorExit:  # the interpreter ends, and the owner lives
        return
    except BaseException as error:
        work()
        if not isinstance(error, KeyboardInterrupt):
            raise
        _thread.start_new_thread(_interrupt_soon, ())
    _watches.pop(number, None)
    yield


def _interrupt_soon() -> None:
    time.sleep(0.001)  # until the destructor has returned
    _thread.interrupt_main()
