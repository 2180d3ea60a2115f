"""Segments inside segments: how a piece that keeps nothing is rebuilt in less memory than it has
bytes to rebuild.

Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova, "Optimal checkpointing for heterogeneous chains"
(rotor, 2019, https://arxiv.org/abs/1911.13214): C(s,t,m), the least seconds for the units s to t
with m bytes free. A sweep runs over the units before the last, and what it leaves at each is one of
that part's own options, as in the forward: here "kept" means rebuilt with the piece, in its
segment, and "rebuilt" in a segment inside it. So menus of longer pieces are made from those of
shorter ones, and rotor's "everything or nothing of a stage" is a choice of values.

Bound reached: for given menus the optimum for each limit, up to bytes rounded to 1/128 of what the
whole piece takes; the simulator has the last word. Weakness: parts begin and end at cuts, and have
the lengths of which there are menus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradfit.planning.piece_options import Option, Way, dense_values, keeping
from gradfit.planning.pieces import Piece
from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments

SLOTS = 128
_MOST_WAYS = 10

# for two units of a piece, the options of what lies between them, and the bytes around in its time
# beyond the piece's own
PartMenu = Callable[[int, int], tuple[Sequence[Option], int]]


@dataclass(frozen=True)
class _UnitsPart:
    """Units of a piece, and one of the options that they have."""

    first: int
    end: int
    option: Option


def nested_ways(
    piece: Piece,
    units: Sequence[int],
    lengths: Sequence[int],
    part_menu: PartMenu,
    most_bytes: int,
) -> list[Way]:
    """Ways to rebuild all of a piece, from the fastest that takes less than `most_bytes` to the
    smallest.

    `units` are the piece's cuts, as positions in it; parts have one of the `lengths`, in units.
    """
    dense = dense_values(piece.graph)
    table = _PartsTable(piece, units, most_bytes, dense)
    for first in range(len(units) - 2, -1, -1):
        ends = [first + length for length in lengths if length < len(units) - 1]
        for end in (end for end in ends if end < len(units)):
            options, around = part_menu(first, end)
            table.extend(first, end, options, around)
    found = [_composed(piece, units, parts) for parts in table.chains()]
    # Near the floor even these bytes are too many.
    smallest = found[:1] if dense else []
    return smallest + [(keeping(actions, dense), segments) for actions, segments in found]


class _PartsTable:
    """The least seconds from each unit to the last with so many slots of bytes free, and how."""

    def __init__(
        self, piece: Piece, units: Sequence[int], most_bytes: int, dense: set[int]
    ) -> None:
        self.last = len(units) - 1
        self.slot_bytes = max(1.0, most_bytes / SLOTS)
        self.seconds = np.full((self.last + 1, SLOTS + 1), np.inf)
        self.seconds[self.last] = 0.0
        self.taken: list[list[tuple[_UnitsPart, int] | None]] = [
            [None] * (SLOTS + 1) for _ in range(self.last)
        ]
        both = zip(piece.graph.op_outputs, piece.graph.op_seconds, strict=True)
        seconds = [0.0 if dense.issuperset(outputs) else took for outputs, took in both]
        self.unit_seconds = [sum(seconds[a:b]) for a, b in pairwise(units)]

    def extend(self, first: int, end: int, options: Sequence[Option], around: int) -> None:
        row, after, taken = self.seconds[first], self.seconds[end], self.taken[first]
        passing, is_last = sum(self.unit_seconds[first:end]), end == self.last
        least_kept = min(option.kept_bytes for option in options)
        for option in options:
            if OFFLOAD in option.actions:
                continue
            shift = 0 if is_last else round(option.kept_bytes / self.slot_bytes)
            least = max(shift, int(np.ceil((option.peak_bytes + around) / self.slot_bytes)))
            if least > SLOTS:
                continue
            # a last part that keeps nothing is run by its own sweeps alone
            alone = is_last and option.kept_bytes == least_kept
            seconds = option.seconds + (0.0 if alone else passing)
            offered = after[least - shift : SLOTS + 1 - shift] + seconds
            better = np.flatnonzero(offered < row[least:]) + least
            if len(better):
                row[better] = offered[better - least]
                choice = _UnitsPart(first, end, option), shift
                for slot in better.tolist():
                    taken[slot] = choice

    def chains(self) -> list[list[_UnitsPart]]:
        """The parts of each way that is worth having, no more than a few."""
        row = self.seconds[0]
        steps = np.flatnonzero(row < np.concatenate([[np.inf], row[:-1]]))
        if len(steps) > _MOST_WAYS:
            steps = steps[_evenly(row[steps], _MOST_WAYS)]
        return [self.chain_from(slot) for slot in steps.tolist()]

    def chain_from(self, slot: int) -> list[_UnitsPart]:
        parts, unit = [], 0
        while unit < self.last:
            taken = self.taken[unit][slot]
            assert taken is not None
            part, shift = taken
            parts.append(part)
            unit, slot = part.end, slot - shift
        return parts


def _evenly(falling: np.ndarray, count: int) -> np.ndarray:
    """Places of numbers about as far from each other, the first and the last included: near the
    floor a few bytes less take much longer, and each of them is worth a way of its own.
    """
    wanted = np.linspace(falling[0], falling[-1], count)
    return np.unique(np.abs(falling - wanted[:, None]).argmin(axis=1))


def _composed(piece: Piece, units: Sequence[int], parts: Sequence[_UnitsPart]) -> Way:
    """All of the parts' options inside one segment."""
    graph, forced = piece.graph, set(piece.forced)
    count = len(graph.nbytes)
    actions = [KEEP if op < 0 or v in forced else REBUILD for v, op in enumerate(graph.producer)]
    of, parent = [0] * count, [-1, 0]
    for part in parts:
        values = [
            v for op in range(units[part.first], units[part.end]) for v in graph.op_outputs[op]
        ]
        inner = part.option.segments
        own = len(parent)  # the part's root
        parent.append(1)
        if inner is not None:
            parent += [own + p for p in inner.parent[1:]]
        for place, value in enumerate(values):
            if part.option.actions[place] == KEEP:
                of[value] = 1
            else:
                of[value] = own + (inner.of[place] if inner is not None else 0)
    return actions, Segments(of, parent)
