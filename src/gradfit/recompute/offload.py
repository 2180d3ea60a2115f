"""Values that are moved out of the device's memory and back: to the host for an accelerator, to a
file on the CPU.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

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
        self._hosts: dict[torch.device, _HostStore] = {}

    def put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy out; the returned function makes the same tensor, layout included."""
        device = tensor.device
        if device.type == "cpu":
            return self._to_file(tensor)
        if device not in self._hosts:
            self._hosts[device] = _HostStore(device)
        return self._hosts[device].put(tensor)

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


class _HostStore:
    """Values of one device in pinned memory of the host, copied there and back beside computation.

    A value is copied within the device first, in the order of its stream, so that whoever made it
    may write over it or free it at once; that copy goes out on a stream of its own. It is there
    until the next value goes out, or the first comes back: then computation waits for it. On the
    way back, while one value is used the one that went out before it is fetched. So one value more
    than those in use is on the device at a time, at the same places of every pass, whatever the
    copies take.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._went_out: list[weakref.ref[_OnHost]] = []
        self._leaving: _Moving | None = None
        self._coming: _Fetched | None = None

    def put(self, tensor: torch.Tensor) -> _OnHost:
        """Copy out; nobody waits for it but the next one."""
        self._leaving = None
        there = tensor.detach().clone(memory_format=torch.preserve_format)
        host = torch.empty_like(there, device="cpu", pin_memory=True)
        self._leaving = _Moving(there, host, there, _stream_of(self._device, "out"))
        value = _OnHost(self, len(self._went_out), host, self._leaving.done)
        self._went_out.append(weakref.ref(value))
        return value

    def bring_back(self, value: _OnHost) -> torch.Tensor:
        """The value on the device; the one before it is on its way then."""
        self._leaving = None
        tensor = self._take_fetched(value)
        if tensor is None:
            torch.accelerator.current_stream(self._device).wait_event(value.went_out)
            tensor = self._empty_like(value.host).copy_(value.host, non_blocking=True)
        value.was_brought_back(tensor)
        self._fetch_before(value.place)
        return tensor

    def _take_fetched(self, value: _OnHost) -> torch.Tensor | None:
        """The value, if it was fetched ahead. What was for one that nobody can ask for any more is
        let go.
        """
        owner = None if self._coming is None else self._coming.owner()
        if owner is not None and owner is not value:
            return None
        coming, self._coming = self._coming, None
        return None if coming is None or owner is None else coming.moving.arrived()

    def _fetch_before(self, place: int) -> None:
        """Begin to fetch the last value that went out before this one and is not there, if no other
        was fetched ahead.
        """
        while self._went_out and self._went_out[-1]() is None:
            self._went_out.pop()
        if self._coming is not None:
            return
        for reference in reversed(self._went_out[:place]):
            value = reference()
            if value is not None and not value.is_there:
                stream = _stream_of(self._device, "back")
                stream.wait_event(value.went_out)
                tensor = self._empty_like(value.host)
                moving = _Moving(tensor, tensor, value.host, stream)
                self._coming = _Fetched(moving, reference)
                return

    def _empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self._device, pin_memory=False)


class _OnHost:
    """A value that went out; called, it is brought back."""

    def __init__(
        self, store: _HostStore, place: int, host: torch.Tensor, went_out: torch.Event
    ) -> None:
        self._store = store
        self.place, self.host, self.went_out = place, host, went_out
        self._there: weakref.ref[torch.Tensor] | None = None

    @property
    def is_there(self) -> bool:
        """Whether what was brought back is still on the device."""
        return self._there is not None and self._there() is not None

    def was_brought_back(self, tensor: torch.Tensor) -> None:
        self._there = weakref.ref(tensor)

    def __call__(self) -> torch.Tensor:
        return self._store.bring_back(self)


class _Moving:
    """A copy on another stream, from or to a `tensor` of the device.

    The copy waits for what the stream of computation has done so far. When the tensor is let go,
    wherever that is, that stream waits for the copy: its memory may be used again.
    """

    def __init__(
        self, tensor: torch.Tensor, to: torch.Tensor, source: torch.Tensor, stream: torch.Stream
    ) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._computing = torch.accelerator.current_stream(tensor.device)
        self.done = torch.Event(tensor.device)
        ready = torch.Event(tensor.device)
        ready.record(self._computing)
        stream.wait_event(ready)
        with stream:
            to.copy_(source, non_blocking=True)
        self.done.record(stream)

    def arrived(self) -> torch.Tensor:
        """The tensor, for the current stream, which waits for it."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        torch.accelerator.current_stream(tensor.device).wait_event(self.done)
        return tensor

    def __del__(self) -> None:
        if self._tensor is not None:
            self._computing.wait_event(self.done)


class _Fetched(NamedTuple):
    """What is fetched ahead, and for which value."""

    moving: _Moving
    owner: weakref.ref[_OnHost]


_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def _stream_of(device: torch.device, direction: str) -> torch.Stream:
    """One for each way: a bus carries both at once."""
    key = device, direction
    if key not in _streams:
        _streams[key] = torch.Stream(device)
    return _streams[key]


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
