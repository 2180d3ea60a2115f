"""What is set for the whole process while anything records, or while a tape lives.

Python's garbage collector is held back while there is a tape. A tape is thousands of small objects
that all die in the backward pass, by reference counting. Collections in between find nothing, and
move the tape into the oldest generation, where it makes Python look through everything there is,
again and again. So a collection waits for a hundred thousand objects instead of seven hundred:
cycles in the user's own code are still found, a little later.

Functions compiled by torch.compile are called in a way that tells those who listen of each graph,
as of one operation: see `_torch_compile.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

from gradfit._torch_compile import (
    leave_compiled_functions_alone,
    listen_to_compiled_functions,
)
from gradfit._torch_listen import thread_settings

_PATIENCE = 100_000
_lock = threading.RLock()  # a tape may die while one is being counted
_tapes: set[int] = set()
_threshold: tuple[int, int, int] | None = None
_recordings: dict[int, int] = {}  # by the recorder's id: the thread that it records


def recording_begins(recorder: object) -> None:
    """In this thread or another."""
    with _lock:
        _recordings[id(recorder)] = threading.get_ident()
        listen_to_compiled_functions()


def recording_ends(recorder: object) -> None:
    """After the last one, compiled functions are called as before. May be called twice: an
    interrupt can come at any time.
    """
    _end([id(recorder)])


def _end(recorders: list[int]) -> None:
    with _lock:
        for recorder in recorders:
            _recordings.pop(recorder, None)
        if not _recordings:
            leave_compiled_functions_alone()


def _recordings_here() -> set[int]:
    if not _recordings:
        return set()
    here = threading.get_ident()
    with _lock:
        return {recorder for recorder, thread in _recordings.items() if thread == here}


def _as_now() -> Callable[[], None]:
    """Ends what this thread begins to record from now on, and Ctrl-C keeps from ending by
    itself.
    """
    before = _recordings_here()

    def take_back() -> None:
        if begun := _recordings_here() - before:
            _end(list(begun))

    return take_back


thread_settings.append(_as_now)


def tape_begins(tape: object) -> None:
    """Hold the collector back."""
    global _threshold
    with _lock:
        _tapes.add(id(tape))
        if _threshold is None and 0 < gc.get_threshold()[0] < _PATIENCE:
            _threshold = gc.get_threshold()
            gc.set_threshold(_PATIENCE, *_threshold[1:])


def tape_ends(tape: object) -> None:
    """After the last one the collector is as it was, unless somebody else has set it since.

    May be called twice, as `recording_ends`.
    """
    global _threshold
    with _lock:
        _tapes.discard(id(tape))
        if not _tapes and _threshold is not None:
            if gc.get_threshold()[0] == _PATIENCE:
                gc.set_threshold(*_threshold)
            _threshold = None
