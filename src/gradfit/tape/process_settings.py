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
import weakref
from collections.abc import Callable

from gradfit._torch_compile import (
    leave_compiled_functions_alone,
    listen_to_compiled_functions,
)
from gradfit._torch_listen import thread_settings
from gradfit.interrupts import when_gone

_WAITS_FOR = 100_000  # new objects
_lock = threading.RLock()  # a tape may die while one is being made
_patience: weakref.ref[_Patience] | None = None
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


class _Patience:
    """As long as somebody holds one, the collector waits."""

    __slots__ = ("__weakref__",)


def collector_waits() -> object:
    """Hold the collector back, as long as what this gives is held."""
    global _patience, _threshold
    with _lock:
        patience = None if _patience is None else _patience()
        if patience is None:
            patience = _Patience()
            _patience = weakref.ref(patience)
            when_gone(patience, _collector_goes_on)
            if _threshold is None and 0 < gc.get_threshold()[0] < _WAITS_FOR:
                _threshold = gc.get_threshold()
                gc.set_threshold(_WAITS_FOR, *_threshold[1:])
        return patience


def _collector_goes_on() -> None:
    """The collector is as it was, unless somebody else has set it since, or holds it by now."""
    global _threshold
    with _lock:
        if (_patience is None or _patience() is None) and _threshold is not None:
            if gc.get_threshold()[0] == _WAITS_FOR:
                gc.set_threshold(*_threshold)
            _threshold = None
