"""What one training step does, as numbers: operations, the values they make, and what the backward
pass needs.

A value is one version of one storage: an in-place operation makes a new value in the old one's
storage. Everything that grows with the micro-batch is a `Linear`, measured at two sizes and not
assumed, so one profile serves every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import add, attrgetter
from typing import Any

from gradfit import records
from gradfit.arguments import read_count, read_instance, read_number
from gradfit.batches.additivity_record import Additivity
from gradfit.choices import KEEP, OFFLOAD, REBUILD, Choice
from gradfit.errors import StateError
from gradfit.profiling.profile_checks import check_profile
from gradfit.profiling.profile_table import describe
from gradfit.profiling.step_graph import Graph
from gradfit.profiling.update_groups import UpdateInGroups
from gradfit.tiling.tiles import Tiles
from gradfit.units import parse_bytes

_FIXED = {"keep": KEEP, "rebuild": REBUILD, "offload": OFFLOAD}


@dataclass(frozen=True, slots=True)
class Linear:
    """A number that is `fixed` plus `per_item` for each item of the micro-batch.

    >>> Linear(100.0, 8.0).at(4)
    132.0
    """

    fixed: float = 0.0
    per_item: float = 0.0

    def at(self, batch_size: int) -> float:
        """The number at this micro-batch size; never below zero, as a fit through noise can be."""
        return max(0.0, self.fixed + self.per_item * batch_size)

    @property
    def grows(self) -> bool:
        """Whether it begins at or above zero and does not fall."""
        return self.fixed >= 0 and self.per_item >= 0

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Linear:
        """The line through two measurements `(batch_size, number)`.

        >>> Linear.through((2, 10.0), (4, 16.0))
        Linear(fixed=4.0, per_item=3.0)
        """
        if first[0] == second[0]:
            return cls(first[1], 0.0)
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope)


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one storage. `operation` is None for parameters, buffers and the batch."""

    nbytes: Linear
    operation: int | None
    storage: int
    # the operation after which Python no longer holds it; the number of operations if it survives
    # them all
    dies: int
    overwritten: bool = False  # a later in-place operation writes over it, so it cannot be kept


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the forward pass, in the order in which they ran."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    overwrites: tuple[int, ...] = ()  # old versions whose storage the outputs use again
    seconds: Linear = Linear()
    workspace_bytes: Linear = Linear()
    replayable: bool = True
    random: bool = False
    module: str = ""
    source: str = ""
    # of parameters that FSDP2 has gathered and not yet let go when it first runs
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BackwardNode:
    """One node of the backward pass: what it unpacks, in order, and the bytes of gradients around
    it.

    The three byte counts are of tensors that are neither values of the tape nor static: gradients
    on their way, and parameters that FSDP2 has gathered. `gradient_bytes` is what of the
    parameters' gradients is there once this node has run and was not before, if the step starts
    without gradients.
    """

    name: str
    needs: tuple[int, ...]
    seconds: Linear = Linear()
    before_bytes: Linear = Linear()
    peak_bytes: Linear = Linear()
    after_bytes: Linear = Linear()
    module: str = ""
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine that need not be here, as a roofline: what `profile(..., fake=True)` predicts for.

    Attributes:
        memory: bytes of one device, or text ("80 GiB").
        flops: floating point operations per second, in the model's precision; one A100's in
            bfloat16 by default.
        bandwidth: bytes per second of the device's memory.
        host_bandwidth: bytes per second to the host's memory.
        devices: how many the model is sharded over.
        name: for print-outs.

    >>> Hardware(memory="80 GiB", devices=64).memory
    85899345920
    """

    memory: int | str
    flops: float = 312e12  # per second, in the model's precision; the defaults are one A100
    bandwidth: float = 2.0e12  # bytes per second of its memory
    host_bandwidth: float = 25e9  # bytes per second to the host
    devices: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", parse_bytes(self.memory, name="memory"))
        for name, like in (("flops", 312e12), ("bandwidth", 2e12), ("host_bandwidth", 25e9)):
            read_number(getattr(self, name), name, above=0, like=like)
        read_count(self.devices, "devices")
        read_instance(self.name, "name", str, "name='a100'")

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        return records.from_json(Hardware, text)


@dataclass(frozen=True)
class Profile:
    """One step of one model: the operations, what autograd saves, and the bytes that are always
    there.

    Attributes:
        values: what operations make and take: versions of storages.
        operations: in the order of the forward.
        nodes: of autograd's graph, in the order of the backward.
        parameter_bytes: of all parameters.
        gradient_bytes: of all gradients.
        buffer_bytes: of all buffers.
        optimizer_bytes: of the optimizer's state.
        optimizer_burst_bytes: temporaries of the optimizer's step.
        update_ways: how that step can be run with fewer temporaries; the first is how the optimizer
            does it. Empty: in no other way.
        update_groups: the way that this profile is about, as groups of parameters; empty: as the
            optimizer does it.
        batch_bytes: of the batch, by rows.
        constant_bytes: tensors that the forward brings along, by rows.
        optimizer_seconds: of one step of the optimizer.
        overhead_seconds: of a micro-batch, beside its operations.
        plain_points: (rows, seconds) of both passes with everything kept.
        runs_plain: whether a plain run was seen to work.
        record_overhead_seconds: to record one operation.
        replay_overhead_seconds: to replay one, beside running it.
        batch_size: rows at which it was measured.
        min_batch: the fewest rows that work.
        splittable: whether the batch may be cut.
        additivity: whether the losses of parts make that of the whole; None: not measured.
        host_bandwidth: bytes per second for offloading; 0: not offered.
        device: that it was measured on.
        predicted: whether it was made on fake tensors.
        measuring_bytes: most bytes that were live while it was measured; 0: not known.
        tiles: what was cut along tokens when it was measured; None: nothing.
        tiled: profiles of the same step with tiles, which a plan may choose.
        names: by a name that the model gave (`gf.name`), the values that have it; none if only
            parameters or the batch do.
        fixed: by such a name, what a plan from this profile does with its values: "keep",
            "rebuild" or "offload".
        versions: of torch and Python.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    nodes: tuple[BackwardNode, ...]
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    optimizer_burst_bytes: int = 0  # temporaries of optimizer.step()
    # how the step can be run with fewer of these, and the way in which it is
    update_ways: tuple[UpdateInGroups, ...] = ()
    update_groups: tuple[int, ...] = ()
    batch_bytes: Linear = Linear()
    # tensors that the forward brings along: from Python numbers, from NumPy
    constant_bytes: Linear = Linear()
    optimizer_seconds: float = 0.0
    # of a micro-batch, beside its operations: Python's, and that of cold memory
    overhead_seconds: float = 0.0
    # micro-batch and seconds of passes that kept everything
    plain_points: tuple[tuple[int, float], ...] = ()
    runs_plain: bool = False  # a plain run of it was seen to work
    record_overhead_seconds: float = 0.0  # the tape's, per operation of the forward
    replay_overhead_seconds: float = 0.0  # the tape's, per replayed operation
    batch_size: int = 1  # at which it was measured
    min_batch: int = 1
    # False: the batch is not to be cut, so its size is the only micro-batch
    splittable: bool = True
    # whether the losses of parts make that of the whole; None: not measured
    additivity: Additivity | None = None
    # peak of all tensors while as little as possible was measured for this profile
    measuring_bytes: int = 0
    # bytes per second out to the host or a file; 0 means offloading is not offered
    host_bandwidth: float = 0.0
    device: str = "cpu"
    predicted: bool = False  # from fake tensors, not measured
    tiles: Tiles | None = None  # what was cut along tokens when it was measured
    tiled: tuple[Profile, ...] = ()  # the same step with tiles
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, op in enumerate(self.operations):
            self._check_values_of(index, op)
            self._check_order(index, op)
        for index, node in enumerate(self.nodes):
            if not self._has_values(node.needs):
                raise StateError(
                    f"Node {index} ({node.name}) needs a value that is not in the profile's"
                    f" {len(self.values)}."
                )
        self._check_names()

    def _check_names(self) -> None:
        for name, values in self.names.items():
            if not self._has_values(values) or any(_made_at(self.values[v]) < 0 for v in values):
                raise StateError(
                    f"The name {name!r} is of a value that no operation of the profile makes."
                )
        for name, action in self.fixed.items():
            if name not in self.names or action not in _FIXED:
                raise StateError(f"{action!r} of {name!r} is no choice for a value by its name.")

    @property
    def fixed_actions(self) -> dict[int, Choice]:
        """By value, what a plan has to do with it."""
        choices = [(name, _FIXED[action]) for name, action in self.fixed.items()]
        return {value: choice for name, choice in choices for value in self.names[name]}

    def _check_values_of(self, index: int, op: Operation) -> None:
        if not self._has_values((*op.inputs, *op.outputs, *op.overwrites)):
            raise StateError(
                f"Operation {index} ({op.name}) names a value that is not in the profile's"
                f" {len(self.values)}."
            )

    def _check_order(self, index: int, op: Operation) -> None:
        if any(self.values[v].operation != index for v in op.outputs):
            raise StateError(
                f"Operation {index} ({op.name}) has an output that says another operation made it."
            )
        if any(_made_at(self.values[v]) >= index for v in (*op.inputs, *op.overwrites)):
            raise StateError(f"Operation {index} ({op.name}) reads a value before it is made.")

    def _has_values(self, numbers: tuple[int, ...]) -> bool:
        return all(0 <= number < len(self.values) for number in numbers)

    def at(self, batch_size: int, *, accumulates: bool = True, rows: int | None = None) -> Graph:
        """Every number at this micro-batch size, for the solvers; `rows` is the whole batch, all of
        which is there.

        `accumulates=False` is a step of a single micro-batch: its gradients do not exist until
        backward makes them.

        Args:
            batch_size: rows of one micro-batch.
            accumulates: whether the update has several micro-batches.
            rows: rows of the whole batch; None: of one micro-batch.
        """
        nbytes = [_own_bytes(value, batch_size) for value in self.values]
        late = 0 if accumulates else self._bytes_of_gradients_that_come()
        before, peak, after = self._bytes_of_nodes(batch_size, gradients_come=late > 0)
        static = self._static_bytes(batch_size, rows or 0, late)
        return Graph(
            nbytes=nbytes,
            held_bytes=self._held_bytes(nbytes),
            producer=list(map(_made_at, self.values)),
            dies=_each("dies", self.values),
            overwritten=_each("overwritten", self.values),
            op_inputs=_each("inputs", self.operations),
            op_outputs=_each("outputs", self.operations),
            op_overwrites=_each("overwrites", self.operations),
            op_seconds=self._replay_seconds(batch_size),
            op_workspace=_rounded_at(batch_size, _each("workspace_bytes", self.operations)),
            op_replayable=self._are_replayed(),
            node_needs=_each("needs", self.nodes),
            node_before=before,
            node_peak=peak,
            node_after=after,
            static_bytes=sum(static.values()),
            # The optimizer runs with every gradient there, whenever they were made.
            optimizer_burst_bytes=self.optimizer_burst_bytes + late,
            plain_seconds=self.plain_seconds(batch_size),
            transfer_seconds_per_byte=1.0 / self.host_bandwidth if self.host_bandwidth > 0 else 0.0,
            node_seconds=[node.seconds.at(batch_size) for node in self.nodes],
            static_breakdown=static,
            op_gathered=_each("gathered_bytes", self.operations),
            plain_needs=self.plain_needs,
            fixed=self.fixed_actions,
            # Who says which values are moved out means these and no others.
            may_offload="offload" not in self.fixed.values(),
        )

    def _are_replayed(self) -> list[bool]:
        """Whether each operation may run again: not, where a result is kept or moved out by name,
        for then that would be in vain, unless another result of it can only be rebuilt.
        """
        may_run_again: list[bool] = _each("replayable", self.operations)
        fixed = self.fixed_actions
        rebuilt = {value for value, choice in fixed.items() if choice is REBUILD}
        rebuilt |= {number for number, value in enumerate(self.values) if value.overwritten}
        for value in fixed.keys() - rebuilt:
            operation = self.values[value].operation
            if operation is not None:
                results = self.operations[operation].outputs
                may_run_again[operation] &= not rebuilt.isdisjoint(results)
        return may_run_again

    def updating(self, groups: tuple[int, ...]) -> Profile:
        """The same step where the optimizer updates its parameters in these groups.

        Args:
            groups: of one of `update_ways`; empty: as the optimizer does it.

        Raises:
            StateError: it is none of them.
        """
        read_instance(groups, "groups", tuple, "the `groups` of one of `update_ways`")
        if groups == self.update_groups:
            return self
        ways = {way.groups: way for way in self.update_ways}
        now, then = ways.get(self.update_groups), ways.get(groups)
        if now is None or then is None:
            raise StateError(
                f"An update in {len(groups)} groups is none of the ways that this profile knows."
                " Make the plan again."
            )
        return replace(
            self,
            update_groups=groups,
            optimizer_burst_bytes=then.burst_bytes,
            optimizer_seconds=self.optimizer_seconds + then.more_seconds - now.more_seconds,
        )

    def smaller_updates(self) -> tuple[Profile, ...]:
        """This profile, and the same step updated in more and more groups."""
        less = [way for way in self.update_ways if way.burst_bytes < self.optimizer_burst_bytes]
        return (self, *(self.updating(way.groups) for way in less))

    def update_bytes(self, rows: int) -> int:
        """What is there at least while the optimizer steps.

        Args:
            rows: of the whole batch.
        """
        read_count(rows, "rows")
        static = self._static_bytes(self.min_batch, rows, 0)
        return sum(static.values()) + self.optimizer_burst_bytes

    def _bytes_of_gradients_that_come(self) -> int:
        """Of those that a backward makes where there were none."""
        return sum(node.gradient_bytes for node in self.nodes)

    def _static_bytes(self, batch_size: int, rows: int, late: int) -> dict[str, int]:
        """What is there all the time, by its name; gradients without those that come late."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": max(0, self.gradient_bytes - late),
            "buffers": self.buffer_bytes,
            "optimizer": self.optimizer_bytes,
            "batch": round(self.batch_bytes.at(max(batch_size, rows))),
            "constants": round(self.constant_bytes.at(batch_size)),
        }

    def _held_bytes(self, nbytes: list[int]) -> list[int]:
        """What keeping each value costs: nothing where its storage is there anyway, or is counted
        by another result of the same operation, which wrote to several parts of it.
        """
        held = list(nbytes)
        for number in self._in_external_storages():
            held[number] = 0
        for op in self.operations:
            for number in self._further_parts(op):
                held[number] = 0
        return held

    def _in_external_storages(self) -> list[int]:
        """Values whose storage is a parameter's, a buffer's or the batch's."""
        external = {value.storage for value in self.values if value.operation is None}
        return [number for number, value in enumerate(self.values) if value.storage in external]

    def _further_parts(self, op: Operation) -> list[int]:
        """Results in a storage that an earlier result of the operation is in."""
        first: dict[int, int] = {}
        for number in op.outputs:
            first.setdefault(self.values[number].storage, number)
        return [number for number in op.outputs if number not in first.values()]

    def _replay_seconds(self, batch_size: int) -> list[float]:
        """Of each operation that is run again.

        A tiny cost that grows with position makes the earlier of two equal operations be rebuilt,
        so that recording stops sooner.
        """
        later = 0.1 * self.record_overhead_seconds / max(1, len(self.operations))
        return [
            op.seconds.at(batch_size) + self.replay_overhead_seconds + later * index
            for index, op in enumerate(self.operations)
        ]

    def _bytes_of_nodes(
        self, batch_size: int, *, gradients_come: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Bytes in flight before, during and after each node; with the gradients made so far, if
        these do not exist from the start.
        """
        before = _rounded_at(batch_size, _each("before_bytes", self.nodes))
        peak = _rounded_at(batch_size, _each("peak_bytes", self.nodes))
        after = _rounded_at(batch_size, _each("after_bytes", self.nodes))
        if not gradients_come:
            return before, peak, after
        gradients = [0, *accumulate(node.gradient_bytes for node in self.nodes)]
        return (
            list(map(add, before, gradients)),
            list(map(add, peak, gradients)),
            list(map(add, after, gradients[1:])),
        )

    def in_tiles(self, tiles: Tiles | None) -> Profile:
        """The profile of the same step with these tiles, if it was measured; else this one.

        Args:
            tiles: of a plan; None for none.
        """
        return next((one for one in self.tiled if one.tiles == tiles), self)

    @cached_property
    def plain_needs(self) -> list[tuple[int, ...]] | None:
        """What nodes need of a plain run, if that was seen to work although it writes over what
        nodes need.

        It writes to other parts of the same storage then, as a GRU's gates are. To the tape each
        write makes a new value of the whole, and the old one has to be rebuilt; plain autograd has
        the part that it needs in the last.
        """
        if not self.runs_plain or not self._nodes_need_what_is_written_over():
            return None
        newest = self._newest_versions()
        return [tuple([newest.get(number, number) for number in node.needs]) for node in self.nodes]

    def _newest_versions(self) -> dict[int, int]:
        """For each value that an operation makes, the last one in its storage."""
        last = {value.storage: number for number, value in enumerate(self.values)}
        own = [number for number, value in enumerate(self.values) if value.operation is not None]
        return {number: last[self.values[number].storage] for number in own}

    def _nodes_need_what_is_written_over(self) -> bool:
        return any(self.values[v].overwritten for node in self.nodes for v in node.needs)

    def forward_seconds(self, batch_size: int) -> float:
        """Of all operations of the forward, one by one.

        Args:
            batch_size: rows of one micro-batch.
        """
        read_count(batch_size, "batch_size")
        return sum(op.seconds.at(batch_size) for op in self.operations)

    def backward_seconds(self, batch_size: int) -> float:
        """Of all nodes of the backward, one by one.

        Args:
            batch_size: rows of one micro-batch.
        """
        read_count(batch_size, "batch_size")
        return sum(node.seconds.at(batch_size) for node in self.nodes)

    def plain_seconds(self, batch_size: int) -> float:
        """Both passes with everything kept, as measured: small operations take less than when each
        is timed alone.

        Args:
            batch_size: rows of one micro-batch.
        """
        read_count(batch_size, "batch_size")
        if self.plain_points:
            return _between(self.plain_points, batch_size)
        return max(
            0.0,
            self.forward_seconds(batch_size)
            + self.backward_seconds(batch_size)
            + self.overhead_seconds,
        )

    def saved_bytes(self, batch_size: int) -> int:
        """What plain autograd holds between the passes: every value some node needs, each storage
        once.

        Args:
            batch_size: rows of one micro-batch.
        """
        read_count(batch_size, "batch_size")
        storages = {
            self.values[v].storage: self.values[v].nbytes.at(batch_size)
            for node in self.nodes
            for v in node.needs
            if self.values[v].operation is not None
        }
        return round(sum(storages.values()))

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        profile = records.from_json(Profile, text)
        check_profile(profile)
        return profile

    def __str__(self) -> str:
        return describe(self)


def _between(points: tuple[tuple[int, float], ...], size: int) -> float:
    """On the line from point to point; beyond the last, on that from the first to the last, and
    before the first, too.

    >>> _between(((2, 3.0), (4, 4.0), (8, 10.0)), 6)
    7.0
    """
    low, high = points[0], points[-1]
    if low[0] < size < high[0]:
        after = next(place for place, (at, _) in enumerate(points) if at >= size)
        return Linear.through(points[after - 1], points[after]).at(size)
    line = Linear.through(low, high)
    if low != high and line.grows:
        return line.at(size)
    near = low if size <= low[0] else high
    return near[1] * size / near[0]


def _each(name: str, items: Sequence[object]) -> list[Any]:
    """One attribute of all of these."""
    return list(map(attrgetter(name), items))


def _rounded_at(batch_size: int, lines: Sequence[Linear]) -> list[int]:
    return [round(line.at(batch_size)) for line in lines]


def _own_bytes(value: Value, batch_size: int) -> int:
    return 0 if value.operation is None else round(value.nbytes.at(batch_size))


def _made_at(value: Value) -> int:
    return -1 if value.operation is None else value.operation
