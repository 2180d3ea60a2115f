"""Ctrl-C in one of the functions that work on a window."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


def callers_of(name: str) -> list[ModuleType]:
    """The modules of the room that have a function of that name, their own or another's."""
    room = [
        module for place, module in sys.modules.items() if place.startswith("gradfit.accumulate.")
    ]
    homes = [module for module in room if inspect.isfunction(getattr(module, name, None))]
    assert len(homes) > 1, f"{name} is called from no other file"
    return homes


@contextmanager
def interrupt_in(window: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """Inside, the first call of a function on this window is interrupted: before it does anything,
    or when it is done.
    """
    homes, waiting = callers_of(name), [True]
    original = getattr(homes[0], name)

    def interrupted(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not window or not waiting:
            return original(called, *args, **kwargs)
        waiting.clear()
        if after:
            original(called, *args, **kwargs)
        raise KeyboardInterrupt

    patches = [mock.patch.object(home, name, interrupted) for home in homes]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
