"""Values that are moved out of the device's memory and back, beside computation: to the host for an
accelerator, to a file on the CPU.

A value that goes out is held until `IN_FLIGHT` others have begun to go out after it, or until all
that the plan moves out has: then computation waits for its copy, if it must, and lets go of it. On
the way back, while one value is used another is fetched: of those that nobody has asked for, the
one that went out last. So what is in memory, and when, is decided by counting, and not by what
copies take: the peak is the same in every pass, and the simulator's (`planning/simulate.py`,
rule 7).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch

from gradfit.devices import devices_of, wait_for
from gradfit.errors import OffloadError
from gradfit.interrupts import when_gone
from gradfit.planning.simulate import IN_FLIGHT
from gradfit.recompute.copying_thread import Copy, begin_copy
from gradfit.units import format_bytes


class Store:
    """Takes tensors that fill their storage out, and gives back functions that bring them in again.

    On the CPU they go to an unnamed temporary file, which is closed, and so removed, with the last
    thing that reads from it.
    """

    def __init__(self) -> None:
        self._ways: dict[torch.device, _Way] = {}

    def put(self, tensor: torch.Tensor) -> MovedValue:
        """Copy out; what is returned makes the same tensor when it is called, layout included. The
        tensor may be let go of at once, but not be written to before `before_write`.
        """
        device = tensor.device
        if device not in self._ways:
            self._ways[device] = _Way(_Files() if device.type == "cpu" else _Host(device))
        return self._ways[device].put(tensor)

    def finish(self) -> None:
        """Wait for all that goes out, and let go of it."""
        for way in self._ways.values():
            way.finish()


class _Copied(Protocol):
    """What went out."""

    def wait(self) -> None:
        """Until its copy is made, as whoever frees what was copied must."""
        ...

    def fetch(self) -> _Fetched:
        """Begin to bring it back."""
        ...


class _Fetched(Protocol):
    """What is coming back."""

    def arrived(self) -> torch.Tensor:
        """The tensor, when it is there."""
        ...


class _Carrier(Protocol):
    def send(self, tensor: torch.Tensor) -> _Copied:
        """Begin to copy out. The caller holds the tensor until it has waited."""
        ...


class _Leaving(NamedTuple):
    tensor: torch.Tensor
    copied: _Copied


class _Coming(NamedTuple):
    """What is fetched ahead, and for which value."""

    fetched: _Fetched
    owner: weakref.ref[MovedValue]


class _Way:
    """Out of one device's memory and back, with few values on it at a time."""

    def __init__(self, carrier: _Carrier) -> None:
        self._carrier = carrier
        self._leaving: deque[_Leaving] = deque()
        self._went_out: list[weakref.ref[MovedValue]] = []  # that nobody has asked for
        self._coming: _Coming | None = None
        self._lock = threading.RLock()  # a backward pass may run in another thread

    def put(self, tensor: torch.Tensor) -> MovedValue:
        with self._lock:
            while len(self._leaving) >= IN_FLIGHT:
                self._let_go()
            held = tensor.detach()
            leaving = _Leaving(held, self._carrier.send(held))
            self._leaving.append(leaving)
            value = MovedValue(self, leaving.copied)
            self._went_out.append(weakref.ref(value))
            return value

    def finish(self) -> None:
        with self._lock:
            while self._leaving:
                self._let_go()

    def _let_go(self) -> None:
        """Of what has been going out for the longest time."""
        self._leaving[0].copied.wait()
        self._leaving.popleft()

    def bring_back(self, value: MovedValue) -> torch.Tensor:
        """The value in a tensor of its own; another one is on its way then."""
        with self._lock:
            self.finish()
            value.was_asked_for = True
            fetched = self._take_coming(value)
            tensor = (value.copied.fetch() if fetched is None else fetched).arrived()
            self._fetch_ahead()
            return tensor

    def _take_coming(self, value: MovedValue) -> _Fetched | None:
        """The value, if it was fetched ahead. What was for one that nobody can ask for any more is
        let go.
        """
        coming = self._coming
        owner = None if coming is None else coming.owner()
        if coming is None or (owner is not None and owner is not value):
            return None
        self._coming = None
        if owner is None:
            coming.fetched.arrived()  # else somebody would still write to its memory
        return None if owner is None else coming.fetched

    def _fetch_ahead(self) -> None:
        """Begin to fetch the value that went out last, of those that nobody has asked for in a
        first backward pass.
        """
        while self._coming is None and self._went_out:
            reference = self._went_out.pop()
            value = reference()
            if value is not None and not value.was_asked_for:
                self._coming = _Coming(value.copied.fetch(), reference)


class MovedValue:
    """A value that went out; called, it is brought back."""

    def __init__(self, way: _Way, copied: _Copied) -> None:
        self._way, self.copied = way, copied
        self.was_asked_for = False

    def __call__(self) -> torch.Tensor:
        return self._way.bring_back(self)

    def before_write(self) -> None:
        """Somebody is about to write to the tensor that it was copied from."""
        self._way.finish()


# -------------------------------------------------------------------------------------- to the host


class _Host:
    """Pinned memory of the host, with streams of its own there and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensor: torch.Tensor) -> _OnHost:
        return _OnHost(tensor)


class _OnHost:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._computing = torch.accelerator.current_stream(self._device)
        self._went_out = _copy_on(_stream_of(self._device, "out"), self._host, tensor)

    def wait(self) -> None:
        """The streams wait, and nobody else: of whoever may use the memory, or write to it."""
        self._computing.wait_event(self._went_out)
        torch.accelerator.current_stream(self._device).wait_event(self._went_out)

    def fetch(self) -> _FromHost:
        stream = _stream_of(self._device, "back")
        stream.wait_event(self._went_out)
        tensor = torch.empty_like(self._host, device=self._device, pin_memory=False)
        return _FromHost(tensor, self._host, stream)


class _FromHost:
    """A copy to a tensor of the device. If that is let go before it was asked for, the stream of
    computation waits: its memory may be used again.
    """

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.Stream) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._computing = torch.accelerator.current_stream(tensor.device)
        self._came = _copy_on(stream, tensor, host)

    def arrived(self) -> torch.Tensor:
        """The tensor, for the current stream, which waits for it."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        torch.accelerator.current_stream(tensor.device).wait_event(self._came)
        return tensor

    def __del__(self) -> None:
        if self._tensor is not None:
            self._computing.wait_event(self._came)


def _copy_on(stream: torch.Stream, to: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """Copy on a stream, after what the stream of computation has done so far; gives the end."""
    device = stream.device
    ready, done = torch.Event(device), torch.Event(device)
    ready.record(torch.accelerator.current_stream(device))
    stream.wait_event(ready)
    with stream:
        to.copy_(source, non_blocking=True)
    done.record(stream)
    return done


_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def _stream_of(device: torch.device, direction: str) -> torch.Stream:
    """One for each way: a bus carries both at once."""
    key = device, direction
    if key not in _streams:
        _streams[key] = torch.Stream(device)
    return _streams[key]


# ---------------------------------------------------------------------------------------- to a file


class _Files:
    """A file that a thread writes, and reads ahead.

    It is written by calls, and not mapped: on a disk that is full a call says so, and a mapping
    ends the process.
    """

    def __init__(self) -> None:
        self._file: _File | None = None
        self._end = 0

    def send(self, tensor: torch.Tensor) -> _InFile:
        if self._file is None:
            self._file = _File()
        position = self._end
        self._end += tensor.nbytes
        return _InFile(self._file, position, tensor)


class _InFile:
    def __init__(self, file: _File, position: int, tensor: torch.Tensor) -> None:
        self._file, self._position = file, position
        self._layout = tensor.size(), tensor.stride(), tensor.dtype
        content = _bytes_of(tensor)
        self._copy = begin_copy(lambda: _write_all(file, content, position))

    def wait(self) -> None:
        self._copy.wait()

    def fetch(self) -> _FromFile:
        self.wait()
        size, stride, dtype = self._layout
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        content, file, position = _bytes_of(tensor), self._file, self._position
        return _FromFile(tensor, begin_copy(lambda: _read_all(file, content, position)))


class _FromFile(NamedTuple):
    tensor: torch.Tensor
    copy: Copy

    def arrived(self) -> torch.Tensor:
        self.copy.wait()
        return self.tensor


class _File:
    """An unnamed temporary file that is closed when nobody refers to it any more."""

    def __init__(self) -> None:
        try:
            file = tempfile.TemporaryFile(prefix="gradfit-")  # noqa: SIM115 - closed below
        except OSError as error:
            raise _failed("No file could be made for what is offloaded", error) from error
        self.descriptor = file.fileno()
        when_gone(self, file.close)


def _write_all(file: _File, content: memoryview, position: int) -> None:
    try:
        while content:
            count = os.pwrite(file.descriptor, content, position)
            content, position = content[count:], position + count
    except OSError as error:
        raise _failed(_where("written", content, position), error) from error


def _read_all(file: _File, target: memoryview, position: int) -> None:
    try:
        while target:
            count = os.preadv(file.descriptor, [target], position)
            if not count:
                raise OSError("the file ended early")
            target, position = target[count:], position + count
    except OSError as error:
        raise _failed(_where("read back", target, position), error) from error


def _where(done: str, left: memoryview, position: int) -> str:
    at, size = format_bytes(position), format_bytes(left.nbytes)
    return f"{size} of what is offloaded could not be {done} at {at} of a temporary file"


def _failed(what: str, error: OSError) -> OffloadError:
    folder = tempfile.tempdir or "the folder for temporary files"
    return OffloadError(
        f"{what}: {error}. Make room in {folder}, set TMPDIR to a folder that has some before"
        " Python starts, or leave offload out."
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def measure_bandwidth(device: torch.device, nbytes: int = 16 << 20) -> float:
    """Bytes per second out and back, the slower of the two."""
    content = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    devices = devices_of([content])
    slowest = float("inf")
    for _ in range(2):
        wait_for(devices)
        store, started = Store(), time.perf_counter()
        load: Callable[[], torch.Tensor] = store.put(content)
        store.finish()
        wait_for(devices)
        middle = time.perf_counter()
        load()
        wait_for(devices)
        slowest = min(slowest, max(middle - started, time.perf_counter() - middle))
    return nbytes / slowest
