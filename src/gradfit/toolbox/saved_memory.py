"""What holds my memory? The bytes that autograd saved: by operation, by module, by source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradfit import records
from gradfit.toolbox.autograd_nodes import operation_name
from gradfit.toolbox.origin import Maker, Origin, OriginRecorder, find_origin
from gradfit.toolbox.saved_by_autograd import parameter_storages, saved_by, storage_of
from gradfit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class HeldTensor:
    """One storage that is alive because an operation saved it, and what making it again would cost.

    `rebuild_seconds` starts from everything else that is held; None if nobody watched it being
    made.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str = ""
    source: str = ""
    rebuild_seconds: float | None = None


@dataclass(frozen=True)
class MemoryStats:
    """What autograd holds: each storage once, under the first operation that saved it, parameters
    never.

    Attributes:
        tensors: what is held, with bytes, module, operation and source line.
    """

    tensors: tuple[HeldTensor, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(held.nbytes for held in self.tensors)

    @property
    def saved_memory_mb(self) -> float:
        """`saved_bytes` in units of 2**20 bytes."""
        return self.saved_bytes / 2**20

    @property
    def by_operation(self) -> dict[str, int]:
        """Bytes by operation, the largest first."""
        return self._by(lambda held: held.operation)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes by the module that was running, the largest first; "" for none."""
        return self._by(lambda held: held.module)

    @property
    def by_source_line(self) -> dict[str, int]:
        """Bytes by `file:line`, the largest first; "" where it was not recorded."""
        return self._by(lambda held: held.source)

    def _by(self, key: Callable[[HeldTensor], str]) -> dict[str, int]:
        total: dict[str, int] = {}
        for held in self.tensors:
            total[key(held)] = total.get(key(held), 0) + held.nbytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> MemoryStats:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        return records.from_json(MemoryStats, text)

    def __str__(self) -> str:
        lines = [f"autograd holds {format_bytes(self.saved_bytes)} in {len(self.tensors)} storages"]
        kinds: tuple[tuple[str, Callable[[HeldTensor], str]], ...] = (
            ("module", lambda held: held.module),
            ("operation", lambda held: held.operation),
            ("source line", lambda held: held.source),
        )
        for title, key in kinds:
            lines.append(f"\nby {title:<50} {'bytes':>10} {'share':>6}  to rebuild")
            lines += self._largest_by(key)
        return "\n".join(lines)

    def _largest_by(self, key: Callable[[HeldTensor], str]) -> Iterator[str]:
        """The lines of the twelve names that hold most, and how many more there are."""
        totals = self._by(key)
        for name, nbytes in list(totals.items())[:12]:
            cost = _rebuild_cost([held for held in self.tensors if key(held) == name])
            share = nbytes / max(1, self.saved_bytes)
            shown = _last_letters(name or "(none)", 52)
            yield f"{shown:<53} {format_bytes(nbytes):>10} {share:>6.1%}  {cost}"
        if len(totals) > 12:
            yield f"… {len(totals) - 12} more"


def _rebuild_cost(tensors: list[HeldTensor]) -> str:
    """The seconds to make all of these again, if each of them was watched being made."""
    seconds = [held.rebuild_seconds for held in tensors if held.rebuild_seconds is not None]
    return format_seconds(sum(seconds)) if len(seconds) == len(tensors) else "not recorded"


def _last_letters(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]


def measure(nodes: list[Node], recorder: OriginRecorder | None) -> MemoryStats:
    """Add up what these nodes (first operation first) hold; of a recording, only what was made in
    it.
    """
    counted = parameter_storages(nodes)  # which are there anyway
    held: dict[int, HeldTensor] = {}
    for node in nodes:
        for tensor, storage, nbytes in _storages_held_by(node):
            if storage not in counted and _was_made_in(recorder, storage):
                counted.add(storage)
                held[storage] = _describe(node, tensor, nbytes, find_origin(recorder, node))
    if recorder is not None:
        _add_rebuild_seconds(held, {storage: recorder.makers[storage] for storage in held})
    return MemoryStats(tuple(held.values()))


def _storages_held_by(node: Node) -> Iterator[tuple[Tensor, int, int]]:
    """Each tensor that the node saved, with its storage and the bytes of that."""
    for _, tensor in saved_by(node):
        yield tensor, *storage_of(tensor)


def _was_made_in(recorder: OriginRecorder | None, storage: int) -> bool:
    """Whether a recording saw the storage being made; without a recording all count."""
    return recorder is None or storage in recorder.makers


def _describe(node: Node, tensor: Tensor, nbytes: int, origin: Origin) -> HeldTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, operation = tuple(tensor.shape), operation_name(node)
    return HeldTensor(nbytes, shape, dtype, operation, origin.module, origin.source)


def _add_rebuild_seconds(held: dict[int, HeldTensor], makers: dict[int, Maker]) -> None:
    """What it would take to compute each storage again if only the others were kept."""
    kept = set(makers.values())
    for storage, maker in makers.items():
        seconds = _rebuild_seconds(maker, kept)
        held[storage] = dataclasses.replace(held[storage], rebuild_seconds=seconds)


def _rebuild_seconds(maker: Maker, kept: set[Maker]) -> float:
    """The operations to run again for one storage, from everything else that is kept."""
    seconds, stack, seen = 0.0, [maker], {maker}
    while stack:
        one = stack.pop()
        seconds += one.seconds
        for before in one.inputs:
            if before not in kept and before not in seen:
                seen.add(before)
                stack.append(before)
    return seconds
