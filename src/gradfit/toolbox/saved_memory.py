"""What holds my memory? The bytes that autograd saved: by operation, by module, by source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradfit import records
from gradfit.toolbox.autograd_nodes import operation_name
from gradfit.toolbox.origin import Made, Origin, OriginRecorder
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
            totals = self._by(key)
            lines.append(f"\nby {title:<50} {'bytes':>10} {'share':>6}  to rebuild")
            for name, nbytes in list(totals.items())[:12]:
                costs = [held.rebuild_seconds for held in self.tensors if key(held) == name]
                known = [cost for cost in costs if cost is not None]
                cost = format_seconds(sum(known)) if len(known) == len(costs) else "not recorded"
                share = nbytes / max(1, self.saved_bytes)
                shown = name or "(none)"
                shown = shown if len(shown) <= 52 else "…" + shown[-51:]
                lines.append(f"{shown:<53} {format_bytes(nbytes):>10} {share:>6.1%}  {cost}")
            if len(totals) > 12:
                lines.append(f"… {len(totals) - 12} more")
        return "\n".join(lines)


def measure(nodes: list[Node], recorder: OriginRecorder | None) -> MemoryStats:
    """Add up what these nodes (first operation first) hold; of a recording, only what was made in
    it.
    """
    owned = parameter_storages(nodes)
    held: dict[int, HeldTensor] = {}
    for node in nodes:
        origin = (recorder.origin_of(node) if recorder else None) or Origin()
        for _, tensor in saved_by(node):
            storage, nbytes = storage_of(tensor)
            was_there = recorder is not None and storage not in recorder.made
            if not was_there and storage not in owned and storage not in held:
                held[storage] = _describe(node, tensor, nbytes, origin)
    if recorder is not None:
        _add_rebuild_seconds(held, {storage: recorder.made[storage] for storage in held})
    return MemoryStats(tuple(held.values()))


def _describe(node: Node, tensor: Tensor, nbytes: int, origin: Origin) -> HeldTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, operation = tuple(tensor.shape), operation_name(node)
    return HeldTensor(nbytes, shape, dtype, operation, origin.module, origin.source)


def _add_rebuild_seconds(held: dict[int, HeldTensor], makers: dict[int, Made]) -> None:
    """What it would take to compute each storage again if only the others were kept."""
    kept = set(makers.values())
    for storage, maker in makers.items():
        seconds = _rebuild_seconds(maker, kept)
        held[storage] = dataclasses.replace(held[storage], rebuild_seconds=seconds)


def _rebuild_seconds(maker: Made, kept: set[Made]) -> float:
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
