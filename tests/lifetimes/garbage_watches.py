"""Storages that die by their reference count, watched by twelve who are garbage in a cycle by then.

CPython before 3.12 allocates, and may collect, while it tells several weak references of one
object; the collector is switched on just before, so that it does.
"""

from __future__ import annotations

import gc

import torch

from gradfit.profiling.meter import Meter

died = 0
for _ in range(200):
    gc.disable()
    tensor = torch.zeros(4)
    meters = [Meter() for _ in range(12)]
    for meter in meters:
        meter.watch(tensor)
        meter.cycle = meters  # type: ignore[attr-defined]
    del meter, meters
    gc.enable()
    del tensor
    died += 1
print(died)
