"""For what another thread does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()
