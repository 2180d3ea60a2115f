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
from collections.abc import Callable, Iterable, Iterator
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
    hooks = _UnitHooks(fsdp.FSDPModule, keep, refilled)
    return [
        register_module_forward_pre_hook(hooks.before),
        register_module_forward_hook(hooks.after),
    ]


class _UnitHooks:
    """What is called around the forwards of all modules."""

    def __init__(
        self, unit: type, keep: Callable[[torch.Tensor], None], refilled: set[int]
    ) -> None:
        self._unit, self._keep, self._refilled = unit, keep, refilled
        self._thread = threading.get_ident()

    def before(self, module: torch.nn.Module, nest: Any) -> None:
        if isinstance(module, self._unit) and self._is_recorded():
            for tensor in _tensors(nest):
                self._keep(tensor)

    def after(self, module: torch.nn.Module, _: Any, results: Any) -> None:
        self.before(module, results)
        if isinstance(module, self._unit):
            self._refilled.update(map(storage_key, gathered_into(module)))

    def _is_recorded(self) -> bool:
        """Whether this is the recorder's thread, and no backward pass."""
        return threading.get_ident() == self._thread and graph_task_id() == -1


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
        return
    for item in _items(nest):
        yield from _tensors(item)


def _items(nest: Any) -> Iterable[Any]:
    if isinstance(nest, dict):
        return nest.values()
    if isinstance(nest, list | tuple):
        return nest
    return _items(vars(nest)) if hasattr(nest, "__dataclass_fields__") else ()
