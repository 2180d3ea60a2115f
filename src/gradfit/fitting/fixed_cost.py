"""Seconds by arithmetic and not by the clock: the same in every run, however busy the machine is.

The micro-batch decides in which order a window's gradients are added, and so their last bits.
Chosen by measured seconds it would differ from one run to the next; a run that can be repeated
chooses it by these numbers, and only what is kept and rebuilt, which changes no bit, by the
measured ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from gradfit.profiling.profile import Linear, Operation, Profile

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "attention", "matmul")


class _Pace(NamedTuple):
    """How fast a machine is."""

    rate: float  # operations in a second
    bandwidth: float  # bytes in a second
    call: float  # seconds for each


_CPU, _ACCELERATOR = _Pace(5e10, 1e10, 3e-5), _Pace(5e13, 1e12, 1e-5)


def with_computed_seconds(profile: Profile) -> Profile:
    """The same profile with each operation's time reckoned from its bytes, on a machine that is
    always the same.
    """
    pace = _CPU if profile.device == "cpu" else _ACCELERATOR
    operations = [
        dataclasses.replace(op, seconds=_seconds_by_rows(profile, op, pace))
        for op in profile.operations
    ]
    back = _backward_seconds(operations, len(profile.nodes))
    calls = pace.call * (len(profile.operations) + len(profile.nodes))
    return dataclasses.replace(
        profile,
        operations=tuple(operations),
        nodes=tuple(dataclasses.replace(node, seconds=back) for node in profile.nodes),
        optimizer_seconds=0.0,
        update_ways=tuple(
            dataclasses.replace(way, more_seconds=0.0) for way in profile.update_ways
        ),
        overhead_seconds=calls + 3 * profile.gradient_bytes / pace.bandwidth,
        plain_points=(),
        record_overhead_seconds=pace.call / 2,
        replay_overhead_seconds=pace.call,
    )


def _seconds_by_rows(profile: Profile, op: Operation, pace: _Pace) -> Linear:
    size = max(2, profile.batch_size)
    few, all_rows = _seconds(profile, op, size // 2, pace), _seconds(profile, op, size, pace)
    return Linear.through((size // 2, few), (size, all_rows))


def _seconds(profile: Profile, op: Operation, rows: int, pace: _Pace) -> float:
    values = [profile.values[number] for number in (*op.inputs, *op.outputs)]
    moved = sum(value.nbytes.at(rows) for value in values) / pace.bandwidth
    return pace.call + max(moved, rows * _multiplications(profile, op) * 2 / pace.rate)


def _backward_seconds(operations: Sequence[Operation], nodes: int) -> Linear:
    """Of one node: a backward pass takes about twice the forward's time."""
    share = 2.0 / max(1, nodes)
    fixed = sum(op.seconds.fixed for op in operations)
    return Linear(share * fixed, share * sum(op.seconds.per_item for op in operations))


def _multiplications(profile: Profile, op: Operation) -> float:
    """Of a product of matrices, for one row of the batch, from bytes alone; 0 for any other
    operation.

    Of (m, k) by (k, n) there are mk, kn and mn elements, and the root of their product is mkn. A
    product of stacks of matrices comes out too large by the root of the stack's height, which for
    one row is small.
    """
    if not _is_product(op):
        return 0.0
    first, second = sorted(profile.values[v].nbytes.at(1) for v in op.inputs)[-2:]
    return math.sqrt(first / 4 * second / 4 * profile.values[op.outputs[0]].nbytes.at(1) / 4)


def _is_product(op: Operation) -> bool:
    """Of two matrices."""
    is_named_so = any(part in op.name for part in _PRODUCTS)
    return is_named_so and len(op.inputs) >= 2 and bool(op.outputs)
