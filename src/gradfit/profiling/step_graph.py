"""A profile at one micro-batch size: plain lists of ints and floats, which is what solvers run
on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradfit.choices import REBUILD


@dataclass(frozen=True, slots=True)
class Graph:
    """What one micro-batch does, with every number resolved; ids are positions in the lists.

    Values made by no operation are *external* (parameters, buffers, the batch): always there, and
    counted in `static_bytes`. `held_bytes` is what keeping a value costs: 0 where its storage
    exists anyway.
    """

    nbytes: list[int]
    held_bytes: list[int]
    producer: list[int]  # the operation that makes the value, -1 for external ones
    dies: list[int]
    overwritten: list[bool]

    op_inputs: list[tuple[int, ...]]
    op_outputs: list[tuple[int, ...]]
    op_overwrites: list[tuple[int, ...]]
    op_seconds: list[float]
    op_workspace: list[int]
    op_replayable: list[bool]

    node_needs: list[tuple[int, ...]]
    node_before: list[int]
    node_peak: list[int]
    node_after: list[int]

    # parameters, gradients that exist from the start, buffers, optimizer state, the batch
    static_bytes: int
    optimizer_burst_bytes: int
    plain_seconds: float  # one micro-batch with everything kept, Python's overhead included
    # to the host or the disk, one way; 0 means no offloading
    transfer_seconds_per_byte: float = 0.0
    static_breakdown: dict[str, int] = field(default_factory=dict)
    node_seconds: list[float] = field(default_factory=list)
    # of other ranks' parameters, there while it first runs
    op_gathered: list[int] = field(default_factory=list)
    # What nodes need if nothing is recorded, where that is something else and known to work. See
    # `Profile.plain_needs`.
    plain_needs: list[tuple[int, ...]] | None = None
    # by value: the action that was asked for by its name, which no plan may change
    fixed: Mapping[int, int] = field(default_factory=dict)
    may_offload: bool = True  # also values for which that was not asked

    # of each value, whether it cannot be kept: it is written over, or it was asked not to be
    unkeepable: list[bool] = field(init=False)
    consumers: list[list[int]] = field(init=False)
    last_need: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.op_gathered:
            object.__setattr__(self, "op_gathered", [0] * len(self.op_inputs))
        if not self.node_seconds:
            object.__setattr__(self, "node_seconds", [0.0] * len(self.node_needs))
        object.__setattr__(self, "unkeepable", self._find_unkeepable())
        object.__setattr__(self, "consumers", self._find_consumers())
        object.__setattr__(self, "last_need", self._find_last_needs())

    def _find_unkeepable(self) -> list[bool]:
        unkeepable = list(self.overwritten)
        for value, action in self.fixed.items():
            unkeepable[value] |= action == REBUILD
        return unkeepable

    def with_fixed(self, actions: Sequence[int]) -> tuple[int, ...]:
        """The actions, where values have what was asked for by name.

        Args:
            actions: one for each value.
        """
        if not self.fixed:
            return tuple(actions)
        return tuple([self.fixed.get(value, action) for value, action in enumerate(actions)])

    def _find_consumers(self) -> list[list[int]]:
        """For each value the operations that read it."""
        consumers: list[list[int]] = [[] for _ in self.nbytes]
        for op, inputs in enumerate(self.op_inputs):
            for value in dict.fromkeys(inputs):
                consumers[value].append(op)
        return consumers

    def _find_last_needs(self) -> list[int]:
        """For each value the last node that needs it; -1 if none does."""
        last_need = [-1] * len(self.nbytes)
        for node, needs in enumerate(self.node_needs):
            for value in needs:
                last_need[value] = node
        return last_need

    @property
    def survives(self) -> list[bool]:
        """Values that the caller still holds after the forward pass, such as the loss."""
        last = len(self.op_inputs)
        return [p >= 0 and d >= last for p, d in zip(self.producer, self.dies, strict=True)]

    @property
    def keepable(self) -> list[bool]:
        """Values that may be kept: made by an operation and never overwritten in place."""
        return [p >= 0 and not u for p, u in zip(self.producer, self.unkeepable, strict=True)]
