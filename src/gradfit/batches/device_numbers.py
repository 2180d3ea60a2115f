"""Numbers on accelerators that are looked at later, all of them at once.

Reading a number makes the host wait for its device. So numbers are collected, and read in one copy
at the end. Each is a tensor of its own, for which a device's allocator hands out 512 bytes: if many
are waiting they are sent to pinned memory of the host, for which nobody waits. So however many
parts a batch has, their numbers take the memory of a few. Whoever has more to launch before they
are looked at sends them all: then only what was launched before is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_WAITING = 32


class NumberPlace(NamedTuple):
    """Where a number is found once all are read."""

    device: torch.device
    position: int


class DeviceNumbers:
    """Takes scalars, wherever they are, and reads them in one copy per device."""

    def __init__(self) -> None:
        self._queues: dict[torch.device, _Queue] = {}
        self._numbers: dict[torch.device, list[float]] = {}

    def add(self, value: Any, most: int | None = MOST_WAITING) -> Any:
        """Take a scalar; gives what `of` makes a number of. Nothing is read from an accelerator.
        If `most` are waiting, they are sent before.
        """
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu":
            return value.item()
        return NumberPlace(value.device, self._queue_of(value).add(value, most))

    def add_together(self, values: Iterable[Any]) -> list[Any]:
        """Take several that are there at once: they go to the host together, however many."""
        return [self.add(value, most=None) for value in values]

    def _queue_of(self, value: Tensor) -> _Queue:
        queue = self._queues.get(value.device)
        if queue is None:
            queue = self._queues[value.device] = _Queue()
        return queue

    def send(self) -> None:
        """Let all that were added go to the host, where no more will be: nobody waits for what is
        launched after this.
        """
        for queue in self._queues.values():
            queue.send()

    def read(self) -> None:
        """Wait for all that were added."""
        self._numbers = {device: queue.read() for device, queue in self._queues.items()}

    def of(self, value: Any) -> float:
        """The number, of what `add` gave."""
        if isinstance(value, NumberPlace):
            return self._numbers[value.device][value.position]
        return float(value)


class _Queue:
    """The numbers of one device, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._sent: list[tuple[list[int], Tensor]] = []  # which places they go to, and they
        self._arrived: torch.Event | None = None  # where all were sent
        self._count = 0

    def add(self, value: Tensor, most: int | None = MOST_WAITING) -> int:
        if most is not None and len(self._waiting) >= most:
            self._send_waiting()
        # A norm of each parameter comes here: what is a plain scalar by now is taken as it is.
        is_plain = not value.requires_grad and not value.dim()
        self._waiting.append(value if is_plain else value.detach().reshape(()))
        self._count += 1
        return self._count - 1

    def send(self) -> None:
        if self._waiting:
            device = self._send_waiting()
            self._arrived = torch.Event(device)
            self._arrived.record(torch.accelerator.current_stream(device))

    def _send_waiting(self) -> torch.device:
        places, numbers = self._together()
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._sent.append((places, host.copy_(numbers, non_blocking=True)))
        return numbers.device

    def read(self) -> list[float]:
        result = [0.0] * self._count
        if self._waiting:
            places, numbers = self._together()
            # which waits: copies of the same stream that were begun before have come, too
            self._sent.append((places, numbers.cpu()))
        elif self._arrived is not None:
            self._arrived.synchronize()
        for wanted, host in self._sent:
            for place, number in zip(wanted, host.tolist(), strict=True):
                result[place] = float(number)
        return result

    def _together(self) -> tuple[list[int], Tensor]:
        """All that wait, as one vector, and which places they go to; those of one type go together:
        each call is a kernel.
        """
        first = self._count - len(self._waiting)
        kinds: dict[torch.dtype, list[int]] = {}
        for place, one in enumerate(self._waiting):
            kinds.setdefault(one.dtype, []).append(place)
        vector = _in_one_vector([[self._waiting[i] for i in kind] for kind in kinds.values()])
        self._waiting = []
        return [first + place for place in chain.from_iterable(kinds.values())], vector


def _in_one_vector(kinds: Sequence[list[Tensor]]) -> Tensor:
    """In double precision if they are of several types: that holds every float32 and every
    count.
    """
    with torch.no_grad():
        if len(kinds) == 1:
            return torch.stack(kinds[0])
        return torch.cat([torch.stack(kind).to(widest_on(kind[0].device)) for kind in kinds])


def widest_on(device: torch.device) -> torch.dtype:
    """The widest numbers that it has; Apple's devices have no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64
