"""Ways to run an optimizer's step that need less memory: its parameters in groups, one group after
the other.

With `foreach`, torch's optimizers make the temporaries of all parameters of a group before they use
the first of them. A step over smaller groups does the same arithmetic to each parameter, bit for
bit, with the temporaries of one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from gradfit._torch import FakeTensor, steps_each_parameter_alone

_PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor, FakeTensor)


@dataclass(frozen=True, slots=True)
class UpdateInGroups:
    """One way to run the step.

    Attributes:
        groups: how many parameters are updated together, in the optimizer's order; none of these
            groups has parameters of two of the optimizer's own. Empty: as the optimizer does it.
        burst_bytes: temporaries of the step.
        more_seconds: than the optimizer takes by itself.
    """

    groups: tuple[int, ...]
    burst_bytes: int
    more_seconds: float = 0.0


class GroupBursts(NamedTuple):
    """The temporaries of one of an optimizer's own groups."""

    of_each: Sequence[int]  # bytes of each parameter alone, in order
    burst_bytes: int  # of the whole group
    together: bool  # those of all parameters are there at once, not only those of neighbours
    divisible: bool  # whether it may be updated in smaller groups
    call_seconds: float  # of a call of the optimizer, beside those of its parameters


class _Group(NamedTuple):
    size: int
    burst_bytes: int


def ways_to_update(groups: Sequence[GroupBursts]) -> tuple[UpdateInGroups, ...]:
    """The way the optimizer does it and those that need less, each about half as much as the one
    before; none if none does.

    >>> one = GroupBursts([8, 8, 4, 4], 24, together=True, divisible=True, call_seconds=0.1)
    >>> [(way.groups, way.burst_bytes) for way in ways_to_update([one])]
    [((), 24), ((1, 2, 1), 12), ((1, 1, 2), 8)]
    """
    whole = max((group.burst_bytes for group in groups), default=0)
    least = max((burst for group in groups for burst in group.of_each), default=0)
    ways = [UpdateInGroups((), whole)]
    for most in _halves(whole, least):
        cut = [(group, list(_cut(group, most))) for group in groups]
        burst = max(one.burst_bytes for _, parts in cut for one in parts)
        if burst < ways[-1].burst_bytes:
            counts = tuple(one.size for _, parts in cut for one in parts)
            more = sum((len(parts) - 1) * group.call_seconds for group, parts in cut)
            ways.append(UpdateInGroups(counts, burst, more))
    return tuple(ways) if len(ways) > 1 else ()


def _halves(whole: int, least: int) -> Iterator[int]:
    """Half of it, a quarter, and so on, down to the least."""
    most = whole // 2
    while most > least:
        yield most
        most //= 2
    if least < whole:
        yield least


def _cut(group: GroupBursts, most_bytes: int) -> Iterator[_Group]:
    """Neighbours together while their temporaries stay within so many bytes."""
    if not group.of_each:
        return
    if not group.divisible or group.burst_bytes <= most_bytes:
        yield _Group(len(group.of_each), group.burst_bytes)
        return
    gathered = _Group(0, 0)
    largest: list[int] = []  # the two that count where parameters are updated one by one
    for burst in group.of_each:
        # One by one, a parameter's temporaries still have their names when the next one's are made.
        largest = sorted([*largest, burst])[-2:]
        taken = gathered.burst_bytes + burst if group.together else sum(largest)
        if gathered.size and taken > most_bytes:
            yield gathered
            gathered, largest, taken = _Group(0, 0), [burst], burst
        gathered = _Group(gathered.size + 1, taken)
    yield gathered


def may_be_divided(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether to update a group's parameters in smaller groups changes no bit.

    torch decides between its implementations by looking at all parameters of a group: so they have
    to be of one kind, and, on an accelerator, of a layout for which `foreach` has one kernel.
    """
    if not steps_each_parameter_alone(optimizer) or group.get("differentiable"):
        return False
    parameters = group["params"]
    kinds = {(type(parameter), parameter.device) for parameter in parameters}
    if len(kinds) != 1 or next(iter(kinds))[0] not in _PLAIN_TENSORS:
        return False
    return parameters[0].device.type == "cpu" or all(map(_is_dense, parameters))


def may_be_cut(optimizer: Any, counts: Sequence[int]) -> bool:
    """Whether an optimizer may be stepped in groups of so many parameters: all of its own groups
    that are cut by that may be.
    """
    if not counts:
        return True
    sizes = chain(counts, repeat(1))
    for group in getattr(optimizer, "param_groups", ()):
        left, groups = len(group["params"]), 0
        while left > 0:
            left, groups = left - next(sizes), groups + 1
        if groups > 1 and not may_be_divided(optimizer, group):
            return False
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its memory, each element once."""
    sizes = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]
    filled = 1
    for stride, size in sorted(sizes):
        if stride != filled:
            return False
        filled *= size
    return True


def with_bursts(
    ways: Iterable[UpdateInGroups], bursts: Iterable[int]
) -> tuple[UpdateInGroups, ...]:
    """The same ways with other temporaries, without those that are then no use."""
    other = [
        UpdateInGroups(way.groups, burst, way.more_seconds)
        for way, burst in zip(ways, bursts, strict=True)
    ]
    useful = other[:1]
    for way in other[1:]:
        if way.burst_bytes < useful[-1].burst_bytes:
            useful.append(way)
    return tuple(useful) if len(useful) > 1 else ()
