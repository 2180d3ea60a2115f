"""Seconds by arithmetic and not by the clock: the same in every run, however busy the machine is.

The micro-batch decides in which order a window's gradients are added, and so their last bits.
Chosen by measured seconds it would differ from one run to the next; a run that can be repeated
chooses it by these numbers, and only what is kept and rebuilt, which changes no bit, by the
measured ones.
"""

from __future__ import annotations

import dataclasses
import math

from gradfit.profiling.profile import Linear, Operation, Profile

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "attention", "matmul")
# operations and bytes per second, seconds per call
_CPU, _ACCELERATOR = (5e10, 1e10, 3e-5), (5e13, 1e12, 1e-5)


def with_computed_seconds(profile: Profile) -> Profile:
    """The same profile with each operation's time reckoned from its bytes, on a machine that is
    always the same.
    """
    rate, bandwidth, call = _CPU if profile.device == "cpu" else _ACCELERATOR
    size = max(2, profile.batch_size)

    def seconds(op: Operation, rows: int) -> float:
        moved = (
            sum(profile.values[v].nbytes.at(rows) for v in (*op.inputs, *op.outputs)) / bandwidth
        )
        return call + max(moved, rows * _multiplications(profile, op) * 2 / rate)

    times = [
        Linear.through((size // 2, seconds(op, size // 2)), (size, seconds(op, size)))
        for op in profile.operations
    ]
    share = 2.0 / max(1, len(profile.nodes))  # a backward pass takes about twice the forward's time
    back = Linear(share * sum(t.fixed for t in times), share * sum(t.per_item for t in times))
    calls = call * (len(profile.operations) + len(profile.nodes))
    return dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, seconds=t)
            for op, t in zip(profile.operations, times, strict=True)
        ),
        nodes=tuple(dataclasses.replace(node, seconds=back) for node in profile.nodes),
        optimizer_seconds=0.0,
        overhead_seconds=calls + 3 * profile.gradient_bytes / bandwidth,
        plain_points=(),
        record_overhead_seconds=call / 2,
        replay_overhead_seconds=call,
    )


def _multiplications(profile: Profile, op: Operation) -> float:
    """Of a product of matrices, for one row of the batch, from bytes alone; 0 for any other
    operation.

    Of (m, k) by (k, n) there are mk, kn and mn elements, and the root of their product is mkn. A
    product of stacks of matrices comes out too large by the root of the stack's height, which for
    one row is small.
    """
    if not any(part in op.name for part in _PRODUCTS) or len(op.inputs) < 2 or not op.outputs:
        return 0.0
    first, second = sorted(profile.values[v].nbytes.at(1) for v in op.inputs)[-2:]
    return math.sqrt(first / 4 * second / 4 * profile.values[op.outputs[0]].nbytes.at(1) / 4)
