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
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from gradfit._torch_distributed import local_part
from gradfit.planning.allocator import (
    AllOnPaper,
    CachingAllocator,
    ExpandableAllocator,
    rounded,
)
from gradfit.profiling.meter import tensors_in
from gradfit.units import NO_BUDGET

Events = list[tuple[int, int, int]]
# Names of what is on paper alone; storages have positive ones.
_BESIDE, _STATES, _COPIES, _TEMPORARIES = -1, -(1 << 40), -(2 << 40), -(3 << 40)
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class UpdateSizes:
    """What an update allocates: (bytes, device) of each parameter and state, and the totals."""

    parameters: Sequence[tuple[int, int]]
    states: Sequence[tuple[int, int]]
    waiting_bytes: int  # of state that the first update makes
    burst_bytes: int  # of temporaries

    @staticmethod
    def of(model: torch.nn.Module, optimizer: Any, waiting: int, burst: int) -> UpdateSizes:
        trained = [local_part(p) for p in model.parameters() if p.requires_grad]
        states = tensors_in(list(getattr(optimizer, "state", {}).values()))
        return UpdateSizes(
            sorted(((t.nbytes, t.get_device()) for t in trained), reverse=True),
            [(t.nbytes, t.get_device()) for t in states],
            waiting,
            burst,
        )

    def new_states(self) -> list[tuple[int, int]]:
        """As large as the parameters they belong to, as often as the bytes go."""
        return _pieces(self.parameters, self.waiting_bytes)

    def temporaries(self) -> list[tuple[int, int]]:
        return _pieces(self.parameters, self.burst_bytes)

    def copies(self) -> list[tuple[int, int]]:
        """What an update copies to go back to."""
        return [*self.parameters, *self.states, *self.new_states()]


def _pieces(sizes: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """So many bytes in pieces of these sizes, over and over, the last one smaller."""
    pieces: list[tuple[int, int]] = []
    for nbytes, device in cycle([one for one in sizes if one[0]]):
        if total <= 0:
            break
        pieces.append((min(nbytes, total), device))
        total -= nbytes
    return pieces


class ReservedMemory:
    """The allocators of a model's devices, where they say what they have reserved.

    Args:
        devices: with an index each.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted(devices, key=lambda device: device.index)
        self._resident: int | None = None  # rounded bytes of model and optimizer, once final

    def segments(self) -> dict[int, list[Mapping[str, Any]]] | None:
        """What each device has reserved now; None where its backend does not say, or caches
        nothing.
        """
        by_device: dict[int, list[Mapping[str, Any]]] = {}
        for device in self._devices:
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
        return any((kind, index) == (device.type, device.index) for device in self._devices)

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
        if len(self._devices) != 1 or budget_bytes >= NO_BUDGET:
            return None
        return self._devices[0] if _has_cap(self._devices[0]) else None

    def _rounded_resident(self, resident: Callable[[], Any], *, final: bool) -> int:
        if self._resident is not None:
            return self._resident
        own = self.rounded_bytes(resident())
        self._resident = own if final else None
        return own


class TrialRecord:
    """Writes down what a trial allocates and frees, and follows it on paper.

    Args:
        memory: where it runs.
    """

    def __init__(self, memory: ReservedMemory) -> None:
        self.events: Events | None = None  # for the trial's meters; None where it is of no use
        self._memory = memory
        self._before: dict[int, list[Mapping[str, Any]]] | None = None
        self._own_bytes = 0
        self.begun = False

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
        self.events = []
        if self._before:
            first = next(iter(self._before))
            self.events += _named([(nbytes, first) for nbytes in beside], _BESIDE)

    @property
    def is_followed(self) -> bool:
        """Whether an allocator says what it has reserved."""
        return self._memory.segments() is not None

    def reserved_bytes(self, update: UpdateSizes, *, copied: bool) -> int:
        """The most bytes reserved in two steps, without what others hold; 0 if it is not known.

        Args:
            update: what the update allocates.
            copied: whether a copy to go back to is made first.
        """
        if self._before is None or self.events is None:
            return 0
        allocators = {index: _on_paper(segments) for index, segments in self._before.items()}
        others = sum(one.allocated_bytes for one in allocators.values()) - self._own_bytes
        paper = AllOnPaper(allocators)
        states = _named(update.new_states(), _STATES)
        copies = _named(update.copies(), _COPIES) if copied else []
        temporaries = _named(update.temporaries(), _TEMPORARIES)
        for new_states in (states, []):
            paper.follow(self.events)
            paper.follow(copies)
            paper.follow([*new_states, *temporaries])
            paper.free(keep={name for name, *_ in states})
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


def _named(sizes: Iterable[tuple[int, int]], first: int) -> Events:
    """Allocations of these sizes, with names that no storage has: counting down from `first`."""
    return [(first - place, nbytes, device) for place, (nbytes, device) in enumerate(sizes)]
