"""Where FSDP2's units begin and end: a replay must not cross there.

A unit's parameters exist while its forward runs, and again while its backward runs; between the two
they are sharded, and a replay that reads them would read freed memory. So what enters a unit and
what leaves it is kept: a value inside is then rebuilt from the unit's own input with the unit's own
parameters, in the unit's own backward.

Gathering them again is a write to where they were read, and none that changes anything: nobody
needs a copy of what lies there before, which is nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from gradfit._torch import graph_task_id, storage_key
from gradfit._torch_fsdp import gathered_into


def watch_units(keep: Callable[[torch.Tensor], None], refilled: set[int]) -> list[RemovableHandle]:
    """Call `keep` for every tensor that enters or leaves a unit in this thread, if there are units
    at all.

    The storages into which the units gather are put into `refilled`.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return []
    unit, thread = fsdp.FSDPModule, threading.get_ident()

    def keep_all(module: torch.nn.Module, nest: Any) -> None:
        if isinstance(module, unit) and threading.get_ident() == thread and graph_task_id() == -1:
            for tensor in _tensors(nest):
                keep(tensor)

    def after(module: torch.nn.Module, _: Any, results: Any) -> None:
        keep_all(module, results)
        if isinstance(module, unit):
            refilled.update(map(storage_key, gathered_into(module)))

    return [register_module_forward_pre_hook(keep_all), register_module_forward_hook(after)]


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from _tensors(item)
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from _tensors(item)
    elif hasattr(nest, "__dataclass_fields__"):
        yield from _tensors(vars(nest))
