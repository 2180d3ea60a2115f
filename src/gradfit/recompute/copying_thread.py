"""Copies that a thread makes beside computation: bytes of tensors to a file, and back.

There is one thread for the process. It begins with the first copy, takes them one by one, and ends
when there was none for a second. Whoever waits for a copy that has not begun makes it himself, so
that nobody ever waits for a thread that is not there: at the interpreter's exit, where no thread
can be started, or in a process that was forked.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
from collections.abc import Callable

_IDLE_SECONDS = 1.0


class Copy:
    """One copy: made once, by the thread or by whoever waits for it first.

    Args:
        make: what copies; it is let go of when it is done, with all that it refers to.
    """

    def __init__(self, make: Callable[[], None]) -> None:
        self._make: Callable[[], None] | None = make
        self._begun = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the copy, unless somebody has begun to."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            if self._make is not None:
                self._make()
        except BaseException as error:
            # Whoever waits is told; without frames, which hold what was to be copied.
            self._error = copy.copy(error)
        finally:
            self._make = None
            self._done.set()

    def wait(self) -> None:
        """Return when it is made; raises what went wrong."""
        self.run()
        self._done.wait()
        if self._error is not None:
            raise copy.copy(self._error)  # it gets frames, which hold the graph that holds this


class _CopyingThread:
    def __init__(self) -> None:
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()  # whether there is a thread
        self.copying = threading.Lock()  # held while it makes a copy

    def begin(self, one: Copy) -> None:
        """Have a copy made after those before it."""
        self._copies.put(one)
        with self._changing:
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gradfit-copies", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: whoever waits makes the copies
            self._thread = None
        except BaseException:  # an interrupt, perhaps before it began: another may begin beside it
            self._thread = None
            raise

    def _run(self) -> None:
        while True:
            try:
                one = self._copies.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._may_end():
                    return
                continue
            with self.copying:
                one.run()
            del one  # while it waits for the next

    def _may_end(self) -> bool:
        with self._changing:
            if not self._copies.empty():
                return False
            if self._thread is threading.current_thread():
                self._thread = None
            return True


_thread = _CopyingThread()


def begin_copy(make: Callable[[], None]) -> Copy:
    """A copy that is made beside what the caller does next.

    Args:
        make: what copies.
    """
    one = Copy(make)
    _thread.begin(one)
    return one


def _after_fork_in_child() -> None:
    global _thread
    _thread = _CopyingThread()  # what had not begun is made by whoever waits for it


if hasattr(os, "register_at_fork"):
    # No copy is half made in a child: it would wait for ever for the one who makes it.
    os.register_at_fork(
        before=lambda: _thread.copying.acquire(),
        after_in_parent=lambda: _thread.copying.release(),
        after_in_child=_after_fork_in_child,
    )
