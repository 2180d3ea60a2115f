"""What caching allocators were asked for, in order, with what kernels take inside of operations:
private torch API, as in `_torch.py`.

`torch.cuda.memory._record_memory_history` and `_snapshot`, as torch 2.10 to 2.15 have them; another
backend has them under the same names, or says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Requests = list[tuple[int, int, int]]
_RECORD, _SNAPSHOT = "_record_memory_history", "_snapshot"


class RequestHistory:
    """Records what some devices of one kind are asked for, unless somebody else does already.

    Args:
        devices: with an index each.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._memory: Any = None  # what records, while it does

    def begin(self) -> None:
        """From now on."""
        memory = _memory_module(self._devices)
        if memory is None or any(memory._snapshot()["device_traces"]):
            return
        try:
            memory._record_memory_history("all", context=None, clear_history=True)
        except (TypeError, RuntimeError):  # not this version's
            return
        self._memory = memory

    def so_far(self) -> int:
        """How many requests there were."""
        return 0 if self._memory is None else len(self._requests())

    def end(self) -> Requests | None:
        """What was asked for, and nothing is recorded any more: (a block's address, its bytes, its
        device's index), and (address, -1, -1) when it is free again. None if it is not known.
        """
        if self._memory is None:
            return None
        requests = self._requests()
        self._memory._record_memory_history(None, clear_history=True)
        self._memory = None
        return requests

    def _requests(self) -> Requests:
        """Of one device after the other: they are independent, and so are their addresses."""
        traces = self._memory._snapshot()["device_traces"]
        return [
            one
            for device in self._devices
            for entry in traces[device.index]
            if (one := _request(entry, device.index)) is not None
        ]


def _memory_module(devices: Sequence[torch.device]) -> Any:
    """Where a backend says what its allocators were asked for; None if it does not."""
    if not devices:
        return None
    memory = getattr(torch.get_device_module(devices[0]), "memory", None)
    return memory if hasattr(memory, _RECORD) and hasattr(memory, _SNAPSHOT) else None


def _request(entry: Mapping[str, Any], device: int) -> tuple[int, int, int] | None:
    if entry["action"] == "alloc":
        return entry["addr"], entry["size"], device
    # from here on it may be handed out again: a stream that used it has come so far
    return (entry["addr"], -1, -1) if entry["action"] == "free_completed" else None
