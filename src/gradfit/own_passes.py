"""Backward passes that are somebody's own business: no accumulator takes them for its
micro-batches.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

OWN_PASSES: dict[int, object] = {}
"""Threads that run a backward pass which a window has started, and its `token`; the window puts
them here itself. Threads in a trial have `NOBODY`: see `owner_of`.
"""
NOBODY = object()


class NobodysPasses:
    """While one lives, the passes of the thread that made it are nobody's micro-batches.

    They end with it, and not by a call: Ctrl-C can keep any call from being made, and then no
    accumulator of this thread would ever count a pass again.
    """

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        thread = threading.get_ident()
        living = [one for one in _living.get(thread, ()) if one() is not None]
        _living[thread] = [*living, weakref.ref(self)]
        OWN_PASSES.setdefault(thread, NOBODY)


_living: dict[int, list[weakref.ref[NobodysPasses]]] = {}  # by thread


def owner_of(thread: int) -> object | None:
    """Whose passes a thread runs: a window's token, `NOBODY`, or None if they may be anybody's."""
    owner = OWN_PASSES.get(thread)
    if owner is NOBODY and not any(one() is not None for one in _living.get(thread, ())):
        end_trials(thread)
        return None
    return owner


def end_trials(thread: int) -> None:
    """From here on a thread's passes may be somebody's again."""
    _living.pop(thread, None)
    if OWN_PASSES.get(thread) is NOBODY:
        del OWN_PASSES[thread]


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """What this thread does inside is the business of whoever starts it: no plain pass."""
    here = NobodysPasses()
    try:
        yield
    finally:
        del here
