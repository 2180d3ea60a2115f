"""What a device's caching allocator reserves for a step, followed on paper, and the cap that holds
it to the budget.

A process on a device is charged for the segments that its allocator has reserved. So where a
backend says what they are (`memory_snapshot`, as CUDA's), a budget is about them. A trial writes
down what is allocated and freed; that sequence is followed twice, with the update after each, from
where the device's allocator is: the second step finds the memory as the first has left it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gradfit._torch_memory_history import RequestHistory, Requests
from gradfit.fitting.update_requests import UpdateOnDevice, named
from gradfit.planning.allocator import (
    AllOnPaper,
    CachingAllocator,
    ExpandableAllocator,
    rounded,
)
from gradfit.profiling.meter import tensors_in
from gradfit.units import NO_BUDGET

# Names of what is on paper alone; what was asked for has positive ones.
_BESIDE, _COPIES = -1, -(2 << 40)
_NOTHING = contextlib.nullcontext()


class ReservedMemory:
    """The allocators of a model's devices, where they say what they have reserved.

    Args:
        devices: with an index each.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = sorted(devices, key=lambda device: device.index)
        self._resident: int | None = None  # rounded bytes of model and optimizer, once final

    def segments(self) -> dict[int, list[Mapping[str, Any]]] | None:
        """What each device has reserved now; None where its backend does not say, or caches
        nothing.
        """
        by_device: dict[int, list[Mapping[str, Any]]] = {}
        for device in self.devices:
            segments = [one for one in _snapshot_of(device) if one["device"] == device.index]
            if not segments:
                return None
            by_device[device.index] = segments
        return by_device or None

    def rounded_bytes(self, *nest: Any) -> int:
        """What the tensors of a nest take of the allocators' blocks, each storage once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors_in(nest)
            if self._is_on_one(tensor)
        }
        return sum(rounded(nbytes) for nbytes in storages.values() if nbytes)

    def _is_on_one(self, tensor: torch.Tensor) -> bool:
        """Whether it is on one of the model's devices."""
        kind, index = tensor.device.type, tensor.device.index
        return any((kind, index) == (device.type, device.index) for device in self.devices)

    def capped(
        self, budget_bytes: int, batch: Any, resident: Callable[[], Any], *, final: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, no device reserves more than the budget, beside what others hold on it.

        Where the backend has such a cap and tells it (`get_per_process_memory_fraction`), and says
        what it has reserved. The cap that was there before is set again afterwards; a lower one
        stays.

        Args:
            budget_bytes: for all devices of the model together; there is one cap for each.
            batch: of the step.
            resident: gives model, optimizer, and copies of a step's own.
            final: whether they hold by now all that they will hold, so that they need not be asked
                again.
        """
        device = self._capped_device(budget_bytes)
        if device is None:
            return _NOTHING
        return self._capped(device, budget_bytes, batch, resident, final=final)

    @contextlib.contextmanager
    def _capped(
        self,
        device: torch.device,
        budget_bytes: int,
        batch: Any,
        resident: Callable[[], Any],
        *,
        final: bool,
    ) -> Iterator[None]:
        stats = torch.accelerator.memory_stats(device)
        if not stats["reserved_bytes.all.current"]:  # nothing is cached
            yield
            return
        module = torch.get_device_module(device)
        own = self._rounded_resident(resident, final=final) + self.rounded_bytes(batch)
        others = max(0, stats["allocated_bytes.all.current"] - own)
        total = torch.accelerator.get_memory_info(device)[1]
        before = module.get_per_process_memory_fraction(device)
        cap = min(1.0, before, math.nextafter((budget_bytes + others) / total, 2.0))
        if stats["reserved_bytes.all.current"] > cap * total:
            torch.accelerator.empty_cache()
        module.set_per_process_memory_fraction(cap, device)
        try:
            yield
        finally:
            module.set_per_process_memory_fraction(before, device)

    def _capped_device(self, budget_bytes: int) -> torch.device | None:
        """The one device that a cap can hold to the budget."""
        if len(self.devices) != 1 or budget_bytes >= NO_BUDGET:
            return None
        return self.devices[0] if _has_cap(self.devices[0]) else None

    def _rounded_resident(self, resident: Callable[[], Any], *, final: bool) -> int:
        if self._resident is not None:
            return self._resident
        own = self.rounded_bytes(resident())
        self._resident = own if final else None
        return own


class TrialRecord:
    """Writes down what a trial asks its devices' allocators for, and follows it on paper. A
    context; it need not begin.

    Args:
        memory: where it runs.
    """

    def __init__(self, memory: ReservedMemory) -> None:
        self.events: Requests | None = None  # for the trial's meters; None where it is of no use
        self._memory = memory
        self._beside: Requests = []
        self._before: dict[int, list[Mapping[str, Any]]] | None = None
        self._own_bytes = 0
        self._at_reading: int | None = None  # so many requests come before it
        self._history = RequestHistory(memory.devices)
        self.begun = False

    def __enter__(self) -> TrialRecord:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self, *resident: Any, beside: Iterable[int]) -> None:
        """Before the first pass, which begins with an empty cache.

        Args:
            resident: model, optimizer, batch, and copies that a step has, too.
            beside: bytes of each tensor that a step holds and the trial does not.
        """
        self.begun = True
        if self._memory.segments() is None:
            return
        torch.accelerator.empty_cache()
        self._before = self._memory.segments()
        self._own_bytes = self._memory.rounded_bytes(*resident)
        if self._before:
            first = next(iter(self._before))
            self._beside = named([(nbytes, first) for nbytes in beside], _BESIDE)
        self.events = [*self._beside]
        self._history.begin()

    @property
    def is_followed(self) -> bool:
        """Whether an allocator says what it has reserved."""
        return self._memory.segments() is not None

    def reading(self) -> None:
        """The passes are over; what is freed from now on is what a step holds until its numbers are
        read, when its update was launched.
        """
        self._at_reading = len(self._beside) + self._history.so_far()

    def end(self) -> None:
        """What the allocators say has in it what meters do not see: what
        kernels take inside of operations.
        """
        requests = self._history.end()
        if requests is not None:
            self.events = [*self._beside, *requests]

    def reserved_bytes(self, update: UpdateOnDevice, *, copied: bool) -> int:
        """The most bytes reserved in two steps, without what others hold; 0 if it is not known.

        Args:
            update: what the update asks for.
            copied: whether a copy to go back to is made first.
        """
        if self._before is None or self.events is None:
            return 0
        allocators = {index: _on_paper(segments) for index, segments in self._before.items()}
        others = sum(one.allocated_bytes for one in allocators.values()) - self._own_bytes
        paper = AllOnPaper(allocators)
        for number in range(2):
            paper.follow(self.events[: self._at_reading])
            paper.follow(named(update.copies(number), _COPIES) if copied else [])
            paper.follow(update.of_norm(number))
            paper.follow(self.events[self._at_reading :] if self._at_reading is not None else [])
            paper.follow(update.requests(number))
            paper.free(keep=update.stays)
        return paper.peak_reserved_bytes - max(0, others)


def _snapshot_of(device: torch.device) -> list[Mapping[str, Any]]:
    """The segments of all devices of its kind; none where nobody says."""
    snapshot = getattr(torch.get_device_module(device), "memory_snapshot", None)
    try:
        return [] if snapshot is None else list(snapshot())
    except RuntimeError:  # CUDA's other backend, cudaMallocAsync, has none
        return []


def _has_cap(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    wanted = ("memory_snapshot", "get_per_process_memory_fraction")
    return all(hasattr(module, name) for name in (*wanted, "set_per_process_memory_fraction"))


def _on_paper(segments: Sequence[Mapping[str, Any]]) -> CachingAllocator:
    expandable = any(segment.get("is_expandable") for segment in segments)
    allocator = ExpandableAllocator() if expandable else CachingAllocator()
    allocator.load(segments)
    return allocator
