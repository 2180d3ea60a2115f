"""Which memory a budget is about, and what is asked of an accelerator: to wait, to let go of its cache, a cap."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def counted_device(model: torch.nn.Module) -> torch.device | None:
    """The kind of device whose memory is the model's budget; None on the CPU, where every tensor counts.

    With a model on an accelerator, what is on the host (offloaded values, a batch that the loss moves) is not counted.
    """
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return torch.device(parameter.device.type)
    return None


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The accelerators of this machine that these tensors are on; fake ones may be on others."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return set() if here is None else {tensor.device for tensor in tensors if tensor.device.type == here.type}


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until these devices have done all that they were given: `synchronize()` alone waits for the current one."""
    for device in devices:
        torch.accelerator.synchronize(device)


def free_cached_memory() -> None:
    """After memory ran out: collect what nobody refers to, and let accelerators give back what they keep for reuse."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """What is free on an accelerator and what it has in all, in bytes; None if its backend does not say."""
    counters = getattr(torch.get_device_module(device), "mem_get_info", None)
    try:
        free, total = torch.accelerator.get_memory_info(device) if counters is None else counters(device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return int(free), int(total)


@contextlib.contextmanager
def capped_at(nbytes: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Inside, the allocators of these devices reserve no more than `nbytes` each, where the backend can cap them."""
    before: list[tuple[Any, torch.device, float]] = []
    try:
        for device in devices:
            module, memory = torch.get_device_module(device), memory_of(device)
            cap = getattr(module, "set_per_process_memory_fraction", None)
            present = getattr(module, "get_per_process_memory_fraction", None)
            if cap is not None and present is not None and memory is not None and nbytes < memory[1]:
                before.append((cap, device, present(device)))
                cap((nbytes + 0.5) / memory[1], device)  # torch rounds down
        yield
    finally:
        for cap, device, fraction in before:
            cap(fraction, device)
