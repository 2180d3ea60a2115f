"""Values that are moved out of the device's memory and back: to the host for an accelerator, to a
file on the CPU.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from gradfit.devices import devices_of, wait_for


class Store:
    """Takes tensors that fill their storage out, and gives back functions that bring them in again.

    On the CPU they go to an unnamed temporary file, which is closed, and so removed, with the last
    thing that reads from it.
    """

    def __init__(self) -> None:
        self._file: _File | None = None
        self._end = 0

    def put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy out; the returned function makes the same tensor, layout included."""
        return _to_host(tensor) if tensor.device.type != "cpu" else self._to_file(tensor)

    def _to_file(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._file is None:
            self._file = _File()
        file, position = self._file, self._end
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        _write_all(file.descriptor, _bytes_of(tensor), position)
        self._end += tensor.nbytes

        def load() -> torch.Tensor:
            result = torch.empty_strided(size, stride, dtype=dtype)
            _read_all(file.descriptor, _bytes_of(result), position)
            return result

        return load


def _to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """To pinned memory, in the order of the stream that made the tensor: nobody waits, and its
    memory is free at once.

    A stream of its own would copy while the device computes, but hold the tensor's memory until it
    has.
    """
    device = tensor.device
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.Event(device)
    copied.record(torch.accelerator.current_stream(device))

    def load() -> torch.Tensor:
        # a backward pass may run on another stream
        torch.accelerator.current_stream(device).wait_event(copied)
        return torch.empty_like(host, device=device, pin_memory=False).copy_(
            host, non_blocking=True
        )

    return load


class _File:
    """An unnamed temporary file that is closed when nobody refers to it any more."""

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(prefix="gradfit-")  # noqa: SIM115 - closed below
        self.descriptor = file.fileno()
        self._close = weakref.finalize(self, file.close)


def measure_bandwidth(device: torch.device, nbytes: int = 16 << 20) -> float:
    """Bytes per second out and back, the slower of the two."""
    content = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    devices = devices_of([content])
    slowest = float("inf")
    for _ in range(2):
        wait_for(devices)
        started = time.perf_counter()
        load = Store().put(content)
        wait_for(devices)
        middle = time.perf_counter()
        load()
        wait_for(devices)
        slowest = min(slowest, max(middle - started, time.perf_counter() - middle))
    return nbytes / slowest


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _read_all(descriptor: int, target: memoryview, position: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], position)
        if not count:
            raise OSError("gradfit: an offloaded activation's file ended early")
        target, position = target[count:], position + count
