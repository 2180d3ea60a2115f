"""The clock that operations are timed by."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

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


class Timed(Protocol):
    """What gets the seconds of its operations."""

    seconds: float


class EventClock:
    """Times the operations of an accelerator by its own events, which nobody waits for before
    `read`.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[Any, Any] | None = None
        self._taken: list[tuple[Timed, Any, Any]] = []
        self._event()  # a backend may have none that tell the time

    @staticmethod
    def of(devices: Iterable[torch.device]) -> EventClock | None:
        """A clock where there is one accelerator, whose events tell the time; else None."""
        accelerators = list(devices)
        if len(accelerators) != 1:  # events of one device say nothing of another's order
            return None
        try:
            return EventClock(accelerators[0])
        except (RuntimeError, NotImplementedError):
            return None

    def _event(self) -> Any:
        return torch.Event(self._device, enable_timing=True)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation between two events."""
        stream = torch.accelerator.current_stream(self._device)
        start, end = self._event(), self._event()
        start.record(stream)
        out = func(*args, **kwargs)
        end.record(stream)
        self._last = start, end
        return out

    def charge(self, item: Timed) -> None:
        """The operation that ran last is this one's."""
        if self._last is not None:
            self._taken.append((item, *self._last))
            self._last = None

    def read(self) -> None:
        """Wait for the device, once, and give each its seconds."""
        if self._taken:
            torch.accelerator.synchronize(self._device)
        for item, start, end in self._taken:
            item.seconds += start.elapsed_time(end) / 1000
        self._taken.clear()
