"""From one or two measured micro-batches to a profile: what grows with the rows, and what does
not.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradfit.devices import counted_device
from gradfit.profiling.optimizer_bytes import OptimizerCost
from gradfit.profiling.overhead import tape_overhead
from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value
from gradfit.profiling.resident_bytes import gradient_bytes, storage_bytes
from gradfit.profiling.trace import Trace, TracedOp
from gradfit.tree import leaves


@dataclass(frozen=True)
class Sample:
    """A micro-batch of `size` rows, watched, and timed without being watched."""

    size: int
    trace: Trace
    plain_seconds: float | None
    refused_one: bool = False  # a single row cannot be run alone
    foreseen: bool = False  # on shapes, not run
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
    big = samples[-1]
    small = (
        samples[-2] if len(samples) > 1 and same_structure(samples[-2].trace, big.trace) else None
    )

    def line(get: Callable[[Trace], float]) -> Linear:
        if small is not None:
            return Linear.through((small.size, get(small.trace)), (big.size, get(big.trace)))
        return Linear(0.0, get(big.trace) / big.size)

    trace = big.trace
    values = tuple(
        Value(
            line(lambda t, i=i: t.values[i].nbytes),  # type: ignore[misc]
            value.operation,
            value.storage,
            value.dies,
            value.overwritten,
        )
        for i, value in enumerate(trace.values)
    )
    operations = tuple(
        Operation(
            op.name,
            op.inputs,
            op.outputs,
            op.overwrites,
            _slope(line(lambda t, i=i: t.operations[i].seconds), op.seconds, big.size),  # type: ignore[misc]
            line(lambda t, i=i: t.operations[i].workspace_bytes),  # type: ignore[misc]
            op.replayable,
            op.random,
            op.module,
            op.source,
            op.gathered_bytes,
        )
        for i, op in enumerate(trace.operations)
    )
    nodes = tuple(
        BackwardNode(
            node.name,
            tuple(node.needs),
            _slope(line(lambda t, i=i: t.nodes[i].seconds), node.seconds, big.size),  # type: ignore[misc]
            line(lambda t, i=i: t.nodes[i].before_bytes),  # type: ignore[misc]
            line(lambda t, i=i: t.nodes[i].peak_bytes),  # type: ignore[misc]
            line(lambda t, i=i: t.nodes[i].after_bytes),  # type: ignore[misc]
            _module_of(trace, node.needs),
            node.gradient_bytes,
        )
        for i, node in enumerate(trace.nodes)
    )
    if static is not None and small is not None and small.foreseen:
        constants = Linear(float(_constant_bytes(trace, static)))
    elif static is not None:
        constants = line(lambda t: _constant_bytes(t, static))
    device = counted_device(model)
    there = [
        tensor
        for tensor in leaves(batch)
        # what has only a shape yet will be where the model is
        if device is None or tensor.device.type in (device.type, "meta")
    ]
    batch_bytes = sum(tensor.nbytes for tensor in there)
    overhead = tape_overhead()
    return Profile(
        values=values,
        operations=operations,
        nodes=nodes,
        parameter_bytes=storage_bytes(model.parameters()),
        gradient_bytes=gradient_bytes(model),
        buffer_bytes=storage_bytes(model.buffers()),
        optimizer_bytes=cost.state_bytes,
        optimizer_burst_bytes=cost.burst_bytes,
        batch_bytes=Linear(0.0, batch_bytes / rows),
        constant_bytes=Linear() if static is None else constants,
        optimizer_seconds=cost.seconds,
        overhead_seconds=_overhead(samples, len(operations) + len(nodes)),
        plain_points=_plain_points(samples),
        runs_plain=static is not None and any(one.plain_seconds is not None for one in samples),
        record_overhead_seconds=overhead.record,
        replay_overhead_seconds=overhead.replay,
        batch_size=big.size,
        min_batch=min_batch,
        host_bandwidth=host_bandwidth,
        device=str(next(iter(model.parameters())).device),
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


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


def _slope(line: Linear, seconds: float, size: int) -> Linear:
    """A time cannot shrink as the micro-batch grows: where noise says so, take it as constant."""
    if line.per_item < 0:
        return Linear(seconds, 0.0)
    return line if line.fixed >= 0 else Linear(0.0, seconds / size)


def same_structure(a: Trace, b: Trace) -> bool:
    """Whether two runs did the same, up to sizes, and up to what was written in place.

    Some of torch's own code writes in place, but not to fake tensors (`areAnyTensorSubclassLike`).
    """
    return (
        len(a.values) == len(b.values)
        and len(a.nodes) == len(b.nodes)
        and [(_plain_name(op), op.inputs, op.outputs) for op in a.operations]
        == [(_plain_name(op), op.inputs, op.outputs) for op in b.operations]
    )


def _plain_name(op: TracedOp) -> str:
    return op.name.replace("_.", ".", 1)


def _constant_bytes(trace: Trace, static: set[int]) -> int:
    known = static | trace.gathered.keys()
    return sum(
        value.nbytes for value in trace.values if value.operation is None and value.key not in known
    )


def _module_of(trace: Trace, needs: list[int]) -> str:
    for value in needs:
        operation = trace.values[value].operation
        if operation is not None:
            return trace.operations[operation].module
    return ""
