"""The clock that operations are timed by."""

from __future__ import annotations

import time

import torch


def seconds_now() -> float:
    """Now, in seconds, to be taken off a later now.

    On one thread of the CPU it is the thread's own time: what other processes take is not what an operation costs.
    With several threads, and on accelerators, only the clock on the wall sees all of the work.
    """
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    return time.thread_time() if alone else time.perf_counter()
