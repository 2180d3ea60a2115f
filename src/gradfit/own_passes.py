"""Backward passes that are somebody's own business: no accumulator takes them for its
micro-batches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

OWN_PASSES: dict[int, object] = {}
"""Threads that run a backward pass which a window has started, and its `token`; the window puts
them here itself. Threads in a trial have `NOBODY`.
"""
NOBODY = object()


_trials: dict[int, set[int]] = {}  # by thread: the `NobodysPasses` that live


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """What this thread does inside is the business of whoever starts it: no plain pass."""
    thread = threading.get_ident()
    outermost = thread not in OWN_PASSES
    OWN_PASSES.setdefault(thread, NOBODY)
    try:
        yield
    finally:
        if outermost:
            OWN_PASSES.pop(thread, None)


class NobodysPasses:
    """While one lives, the passes of the thread that made it are nobody's micro-batches.

    They end with it, and not by a call alone: Ctrl-C can keep any call from being made, and then no
    accumulator of this thread would ever count a pass again.
    """

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        _trials.setdefault(self._thread, set()).add(id(self))
        OWN_PASSES.setdefault(self._thread, NOBODY)

    def __del__(self) -> None:
        living = _trials.get(self._thread)
        if living is not None:
            living.discard(id(self))
            if not living:
                _end(self._thread)


def end_trials() -> None:
    """From here on the passes of this thread may be somebody's again."""
    _end(threading.get_ident())


def _end(thread: int) -> None:
    _trials.pop(thread, None)
    if OWN_PASSES.get(thread) is NOBODY:
        del OWN_PASSES[thread]
