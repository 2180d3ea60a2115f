"""A profile as a person reads it: totals, then the modules and the source lines that matter
most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from gradfit.profiling.profile import Profile

_ROWS = 10


def saved_values(profile: Profile) -> list[int]:
    """The values that some node of the backward pass needs, in the order in which they were
    made.
    """
    needed = {v for node in profile.nodes for v in node.needs}
    return sorted(v for v in needed if profile.values[v].operation is not None)


def saved_by(profile: Profile, attribute: str) -> dict[str, int]:
    """Bytes that autograd saves, by the `module` or the `source` line of the operation that made
    them.
    """
    totals: dict[str, int] = defaultdict(int)
    for index in saved_values(profile):
        operation = profile.operations[profile.values[index].operation or 0]
        totals[getattr(operation, attribute)] += round(
            profile.values[index].nbytes.at(profile.batch_size)
        )
    return dict(totals)


def seconds_by(profile: Profile, attribute: str) -> dict[str, float]:
    """Seconds of the forward pass by the operations' `module` or `source` line."""
    totals: dict[str, float] = defaultdict(float)
    for operation in profile.operations:
        totals[getattr(operation, attribute)] += operation.seconds.at(profile.batch_size)
    return dict(totals)


def describe(profile: Profile) -> str:
    size = profile.batch_size
    forward, backward = profile.forward_seconds(size), profile.backward_seconds(size)
    plain = profile.plain_seconds(size)
    totals = {
        "activations": profile.saved_bytes(size),
        "parameters": profile.parameter_bytes,
        "gradients": profile.gradient_bytes,
        "optimizer": profile.optimizer_bytes,
        "buffers": profile.buffer_bytes,
        "batch": profile.batch_bytes.at(size),
    }
    lines = [
        (
            f"{'predicted' if profile.predicted else 'measured'} on {profile.device} at batch"
            f" {size}: {len(profile.operations)} operations, {len(saved_values(profile))} of"
            f" {len(profile.values)} values saved, {format_seconds(plain)} (forward"
            f" {format_seconds(forward)}, backward {format_seconds(backward)})"
        ),
        "bytes: " + ", ".join(f"{name} {format_bytes(count)}" for name, count in totals.items()),
    ]
    for attribute, title in (("module", "module"), ("source", "source line")):
        rows = [(title, "saved", "forward"), *_largest(profile, attribute)]
        lines += ["", *columns(rows)]
    return "\n".join(lines)


def _largest(profile: Profile, attribute: str) -> list[tuple[str, str, str]]:
    """Where most is saved: the name, the bytes, and the seconds of the forward there."""
    saved, seconds = saved_by(profile, attribute), seconds_by(profile, attribute)
    names = sorted(saved.keys() | seconds.keys(), key=lambda name: (-saved.get(name, 0), name))
    return [
        (name or "(none)", format_bytes(saved.get(name, 0)), format_seconds(seconds.get(name, 0.0)))
        for name in names[:_ROWS]
    ]


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of text with the first column to the left and the others to the right.

    >>> columns([("a", "bytes"), ("long name", "1")])
    ['a          bytes', 'long name      1']
    """
    table = list(rows)
    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in table
    ]
