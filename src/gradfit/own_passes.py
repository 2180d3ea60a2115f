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


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """What this thread does inside is the business of whoever starts it: no plain pass."""
    thread = threading.get_ident()
    outermost = thread not in OWN_PASSES
    begin_own_passes()
    try:
        yield
    finally:
        if outermost:
            OWN_PASSES.pop(thread, None)


def begin_own_passes() -> None:
    """From here on this thread's passes are nobody's micro-batches."""
    OWN_PASSES.setdefault(threading.get_ident(), NOBODY)


def end_own_passes() -> None:
    """From here on they may be somebody's again."""
    thread = threading.get_ident()
    if OWN_PASSES.get(thread) is NOBODY:
        del OWN_PASSES[thread]
