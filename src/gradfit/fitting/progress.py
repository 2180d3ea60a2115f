"""Tells what `fit` is doing while it measures, plans and tries out: to a function, or on a
terminal, if it takes longer than two seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[str, float], object]
_PATIENCE = 2.0  # seconds in which nothing is shown


class ProgressReport:
    """What is being done, and since when.

    Args:
        on_progress: called with what begins and the seconds so far; None shows it on a terminal.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self._on_progress = on_progress
        self._started: float | None = None
        self._is_shown = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the making of a plan; one inside of another is part of it."""
        if self._started is not None:
            yield
            return
        self._started = time.perf_counter()
        try:
            yield
        finally:
            self._started = None
            self._clear()

    def begin(self, doing: str) -> None:
        """Something begins."""
        if self._started is None:
            return
        seconds = time.perf_counter() - self._started
        if self._on_progress is not None:
            self._on_progress(doing, seconds)
        elif seconds > _PATIENCE and sys.stderr.isatty():
            self._show(f"gradfit: {doing} ({seconds:.0f} s)")

    def _show(self, text: str) -> None:
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)  # over what was there
        self._is_shown = True

    def _clear(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False
