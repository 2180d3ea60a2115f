"""Ctrl-C as a wish: the first lets the micro-batch finish and the state be saved, the second ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from gradfit.cli.console import note


class StopSignal:
    """Listens for SIGINT and SIGTERM once it is armed; `asked()` says whether one came."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def arm(self) -> None:
        """From now on a signal is a wish; only the main thread can listen."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)

    def asked(self) -> bool:
        return self._asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        note("Stopping after this micro-batch; once more to stop at once.")
