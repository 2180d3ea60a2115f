"""The same ground for everyone who is timed: one thread, an allocator that keeps what it has,
ratios round by round.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # of glibc's mallopt
_EVERY = 4  # points between two runs of the reference


def one_thread() -> str:
    """One thread, and memory that glibc does not hand back to the system; returns what to say about
    it.

    By default large blocks are returned when they are freed, and faulted in again page by page when
    they are next asked for: up to a sixth of a step, more for whoever allocates more. An
    accelerator's caching allocator does not.
    """
    torch.set_num_threads(1)
    if platform.system() != "Linux":
        return "one thread"
    libc = ctypes.CDLL(None)
    set_all = [
        libc.mallopt(_MMAP, 32 << 20),
        libc.mallopt(_TRIM, (1 << 31) - 1),
        libc.mallopt(_TOP_PAD, 64 << 20),
    ]
    return "one thread, malloc keeps its memory" if all(set_all) else "one thread"


@dataclass
class Times:
    """One contestant's CPU seconds, and their ratios to the reference's that ran just before and
    after.
    """

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """The median over the rounds: what disturbs a round disturbs both sides of its ratio."""
        return statistics.median(self.ratios)


def race(
    reference: Callable[[], object], others: Sequence[Callable[[], object]], *, rounds: int
) -> list[Times]:
    """Time everyone in every round, in an order that turns round, with the reference every few
    runs; its own first.
    """
    times = [Times() for _ in range(len(others) + 1)]
    for number in range(-1, rounds):  # the first round warms up
        order = list(range(len(others)))
        order = order[::-1] if number % 2 else order
        before = _seconds(reference)
        for start in range(0, len(order), _EVERY):
            taken = [(place, _seconds(others[place])) for place in order[start : start + _EVERY]]
            after = _seconds(reference)
            if number >= 0:
                times[0].seconds.append(after)
                times[0].ratios.append(1.0)
                for place, seconds in taken:
                    times[place + 1].seconds.append(seconds)
                    times[place + 1].ratios.append(2 * seconds / (before + after))
            before = after
    return times


def _seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started
