"""The clock that operations are timed by."""

from __future__ import annotations

import threading
import time

import torch

_LONG_SECONDS = 2e-4  # what takes less was not interrupted for long
_SHORTEST_SECONDS = 1e-6  # no operation of torch takes less


def seconds_now() -> float:
    """Now, in seconds, to be taken off a later now.

    On one thread of the CPU it is the thread's own time: what other processes take is not what an
    operation costs. With several threads, and on accelerators, only the clock on the wall sees all
    of the work.
    """
    return time.thread_time() if _is_alone() else time.perf_counter()


def _is_alone() -> bool:
    return torch.get_num_threads() == 1 and not torch.accelerator.is_available()


class OperationClock:
    """The same for thousands of short operations, one after the other.

    A thread's own time is read by a system call, which takes longer than a short operation; the
    clock on the wall is not. So operations are timed by the wall, and only after what seems long,
    an operation or a gap between two, is the thread asked how much of that it did not run.
    """

    def __init__(self) -> None:
        self._alone = _is_alone()
        self._look()

    def _look(self) -> None:
        self._thread = threading.get_ident()
        self._wall, self._own = time.perf_counter(), time.thread_time()
        self._ended = self._wall

    def start(self) -> float:
        """Just before an operation: the time to give to `since`."""
        now = time.perf_counter()
        if self._alone and (
            now - self._ended > _LONG_SECONDS or threading.get_ident() != self._thread
        ):
            self._look()
            now = self._wall
        return now

    def since(self, started: float) -> float:
        """The seconds an operation took that has just ended."""
        self._ended = time.perf_counter()
        seconds = self._ended - started
        if not self._alone or seconds <= _LONG_SECONDS:
            return seconds
        wall, own = self._wall, self._own
        self._look()
        waited = max(0.0, (self._wall - wall) - (self._own - own))
        # some of that may have been before it, so that more than all of its time would go
        return max(seconds - waited, _SHORTEST_SECONDS)
