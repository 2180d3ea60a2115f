"""Python's garbage collector, held back while a forward pass is recorded.

A tape is tens of thousands of small objects that all die in the backward pass, by reference counting. Collections in
between find nothing, and move the tape into the oldest generation, where it makes Python look through everything there
is, again and again. So while something records, a collection waits for a hundred thousand objects instead of seven
hundred: cycles in the user's own code are still found, a little later.
"""

from __future__ import annotations

import gc
import threading

_PATIENCE = 100_000
_lock = threading.Lock()
_recordings = 0
_before: tuple[int, int, int] | None = None


def hold_back() -> None:
    """A recording begins."""
    global _recordings, _before
    with _lock:
        _recordings += 1
        if _recordings == 1 and 0 < gc.get_threshold()[0] < _PATIENCE:
            _before = gc.get_threshold()
            gc.set_threshold(_PATIENCE, *_before[1:])


def let_go() -> None:
    """A recording ends; after the last one the collector is as it was, unless somebody else has set it since."""
    global _recordings, _before
    with _lock:
        _recordings -= 1
        if _recordings == 0 and _before is not None:
            if gc.get_threshold()[0] == _PATIENCE:
                gc.set_threshold(*_before)
            _before = None
