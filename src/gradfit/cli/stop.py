"""Ctrl-C as a wish: the first lets the micro-batch finish and the state be saved, the second ends
at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from gradfit.cli.console import note


class StopSignal:
    """Listens for SIGINT and SIGTERM once it is armed; `asked()` says whether one came.

    Before that Ctrl-C interrupts as usual. Python loses an interrupt that comes in a destructor:
    `arm` then raises it.
    """

    def __init__(self) -> None:
        self._asked = self._interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def arm(self) -> None:
        """From now on a signal is a wish; only the main thread can listen."""
        if self._interrupted:
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._hear)
                self._before.setdefault(number, before)

    def asked(self) -> bool:
        return self._asked

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        note("Stopping after this micro-batch; once more to stop at once.")
