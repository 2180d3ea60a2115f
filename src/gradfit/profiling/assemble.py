"""From one or two measured micro-batches to a profile: what grows with the rows, and what does
not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch

from gradfit.devices import counted_device
from gradfit.profiling.optimizer_bytes import OptimizerCost
from gradfit.profiling.overhead import tape_overhead
from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value
from gradfit.profiling.resident_bytes import gradient_bytes, storage_bytes
from gradfit.profiling.trace import Trace, TracedNode, TracedOp, TracedValue
from gradfit.tree import leaves


@dataclass(frozen=True)
class Sample:
    """A micro-batch of `size` rows, watched, and timed without being watched."""

    size: int
    trace: Trace
    plain_seconds: float | None
    refused_one: bool = False  # a single row cannot be run alone
    extrapolated: bool = False  # on shapes, not run
    peak_bytes: int = 0  # of all tensors while it was watched, if that was measured

    @property
    def busy_seconds(self) -> float:
        """Of all operations, each timed alone."""
        return sum(op.seconds for op in self.trace.operations) + sum(
            node.seconds for node in self.trace.nodes
        )


def assemble(
    model: torch.nn.Module,
    batch: Any,
    rows: int,
    samples: list[Sample],
    cost: OptimizerCost,
    *,
    host_bandwidth: float = 0.0,
    static: set[int] | None = None,
    min_batch: int = 1,
) -> Profile:
    """Put the last two measurements together into a profile, or the only one.

    `static` are the storages of parameters, buffers and the batch: what else the forward read
    without having made it are constants.
    """
    lines = _Lines(samples)
    trace = lines.big.trace
    overhead = tape_overhead()
    return Profile(
        values=tuple(starmap(lines.value, enumerate(trace.values))),
        operations=tuple(starmap(lines.operation, enumerate(trace.operations))),
        nodes=tuple(starmap(lines.node, enumerate(trace.nodes))),
        parameter_bytes=storage_bytes(model.parameters()),
        gradient_bytes=gradient_bytes(model),
        buffer_bytes=storage_bytes(model.buffers()),
        optimizer_bytes=cost.state_bytes,
        optimizer_burst_bytes=cost.burst_bytes,
        update_ways=cost.ways,
        batch_bytes=Linear(0.0, _batch_bytes(model, batch) / rows),
        constant_bytes=Linear() if static is None else _constant_line(lines, static),
        optimizer_seconds=cost.seconds,
        overhead_seconds=_overhead(samples, len(trace.operations) + len(trace.nodes)),
        plain_points=_plain_points(samples),
        runs_plain=static is not None and any(one.plain_seconds is not None for one in samples),
        record_overhead_seconds=overhead.record,
        replay_overhead_seconds=overhead.replay,
        batch_size=lines.big.size,
        min_batch=min_batch,
        host_bandwidth=host_bandwidth,
        names={name: tuple(values) for name, values in trace.named_values.items()},
        device=str(next(iter(model.parameters())).device),
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


class _Lines:
    """Lines over the rows: through the last two measurements, if these did the same, or through
    nothing and the last.
    """

    def __init__(self, samples: list[Sample]) -> None:
        self.big = samples[-1]
        self.small: Sample | None = None
        if len(samples) > 1 and same_structure(samples[-2].trace, self.big.trace):
            self.small = samples[-2]

    def line(self, get: Callable[[Trace], float]) -> Linear:
        big, small = self.big, self.small
        if small is None:
            return Linear(0.0, get(big.trace) / big.size)
        return Linear.through((small.size, get(small.trace)), (big.size, get(big.trace)))

    def seconds(self, get: Callable[[Trace], float]) -> Linear:
        """A time cannot shrink as the micro-batch grows: where noise says so, take it as
        constant.
        """
        line, seconds = self.line(get), get(self.big.trace)
        if line.per_item < 0:
            return Linear(seconds, 0.0)
        return line if line.fixed >= 0 else Linear(0.0, seconds / self.big.size)

    def value(self, index: int, value: TracedValue) -> Value:
        nbytes = self.line(lambda trace: trace.values[index].nbytes)
        return Value(nbytes, value.operation, value.storage, value.dies, value.overwritten)

    def operation(self, index: int, op: TracedOp) -> Operation:
        return Operation(
            op.name,
            op.inputs,
            op.outputs,
            op.overwrites,
            self.seconds(lambda trace: trace.operations[index].seconds),
            self.line(lambda trace: trace.operations[index].workspace_bytes),
            op.replayable,
            op.random,
            op.module,
            op.source,
            op.gathered_bytes,
        )

    def node(self, index: int, node: TracedNode) -> BackwardNode:
        return BackwardNode(
            node.name,
            tuple(node.needs),
            self.seconds(lambda trace: trace.nodes[index].seconds),
            self.line(lambda trace: trace.nodes[index].before_bytes),
            self.line(lambda trace: trace.nodes[index].peak_bytes),
            self.line(lambda trace: trace.nodes[index].after_bytes),
            _module_of(self.big.trace, node.needs),
            node.gradient_bytes,
        )


def _constant_line(lines: _Lines, static: set[int]) -> Linear:
    if lines.small is not None and lines.small.extrapolated:
        # shapes have no storages to be told from parameters and the batch
        return Linear(float(_constant_bytes(lines.big.trace, static)))
    return lines.line(lambda trace: _constant_bytes(trace, static))


def _batch_bytes(model: torch.nn.Module, batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_there(model, batch))


def tensors_there(model: torch.nn.Module, batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch that are on the device whose memory is counted."""
    device = counted_device(model)
    return [
        tensor
        for tensor in leaves(batch)
        # what has only a shape yet will be where the model is
        if device is None or tensor.device.type in (device.type, "meta")
    ]


def _plain_points(samples: list[Sample]) -> tuple[tuple[int, float], ...]:
    """Where plain passes were timed up to the largest size: else its operations, each timed alone,
    tell more.
    """
    points = tuple(
        (one.size, one.plain_seconds) for one in samples if one.plain_seconds is not None
    )
    return points if len(points) > 1 and points[-1][0] == samples[-1].size else ()


def _overhead(samples: list[Sample], parts: int) -> float:
    """What plain passes take beyond their operations; less than nothing where those are too short
    to be timed alone.
    """
    beside = [
        one.plain_seconds - one.busy_seconds for one in samples if one.plain_seconds is not None
    ]
    # what is beyond any interpreter's share is another's
    return min(beside[-1], 1e-4 * parts) if beside else 0.0


def same_structure(a: Trace, b: Trace) -> bool:
    """Whether two runs did the same, up to sizes, and up to what was written in place.

    Some of torch's own code writes in place, but not to fake tensors (`areAnyTensorSubclassLike`).
    """
    return _structure(a) == _structure(b)


def _structure(trace: Trace) -> tuple[object, ...]:
    operations = [(_plain_name(op), op.inputs, op.outputs) for op in trace.operations]
    return len(trace.values), len(trace.nodes), operations


def _plain_name(op: TracedOp) -> str:
    return op.name.replace("_.", ".", 1)


def _constant_bytes(trace: Trace, static: set[int]) -> int:
    counted_elsewhere = static | trace.gathered.keys() | trace.batch_keys
    external = [value for value in trace.values if value.operation is None]
    return sum(value.nbytes for value in external if value.key not in counted_elsewhere)


def _module_of(trace: Trace, needs: list[int]) -> str:
    for value in needs:
        operation = trace.values[value].operation
        if operation is not None:
            return trace.operations[operation].module
    return ""
