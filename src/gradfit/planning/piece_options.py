"""What can be done with a piece of the graph: a short menu of (bytes kept, seconds, bytes at its
worst moment).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradfit.planning.min_cut import hull
from gradfit.planning.pieces import Piece, last_readers, nest
from gradfit.planning.simulate import KEEP, REBUILD, Segments, Simulator

_LONG = 600  # operations; trees over more are few, since each is simulated


@dataclass(frozen=True)
class Option:
    """One way to run a piece, given that what it reads from before is there."""

    kept_bytes: int  # held from its forward to its backward
    seconds: float
    peak_bytes: int  # its own worst moment, forward or backward, kept bytes included
    actions: tuple[int, ...]
    segments: Segments | None
    replays: tuple[int, ...]  # how often each of its operations runs again


Way = tuple[Sequence[int], Segments | None]  # what to do with each value of a piece


def ways(piece: Piece, units: Sequence[int], *, nested: bool, hull_units: int) -> list[Way]:
    """What may be worth doing: keep-sets on the hull, and (`nested`) everything rebuilt in segments
    inside segments.

    `units` are the piece's cuts, as positions in it. A piece of more than `hull_units` units only
    serves to drop everything in it.
    """
    graph = piece.graph
    forced = set(piece.forced)
    nothing = [KEEP if p < 0 or v in forced else REBUILD for v, p in enumerate(graph.producer)]
    many = len(units) - 1
    flat = (
        hull(graph, piece.forced, most=12 if many == 1 else 8) if many <= hull_units else [nothing]
    )
    found: list[Way] = [(actions, None) for actions in flat]
    if nested:
        last = last_readers(graph)
        found += [
            (nothing, nest(graph, last, levels)) for levels in nestings(units, len(graph.op_inputs))
        ]
    return found


def menu(piece: Piece, found: Sequence[Way]) -> list[Option]:
    """The ways that are worth having, with what they cost."""
    simulator = Simulator(piece.graph)
    return prune([evaluate(piece, simulator, actions, segments) for actions, segments in found])


def evaluate(
    piece: Piece, simulator: Simulator, actions: Sequence[int], segments: Segments | None
) -> Option:
    graph = piece.graph
    result = simulator.run(actions, segments)
    leaving = set(piece.leaving)
    kept = sum(
        graph.held_bytes[value]
        for value in range(len(piece.values))
        if actions[value] == KEEP
        and (value in leaving or graph.last_need[value] >= 0 or _feeds(piece, value, actions))
    )
    return Option(
        kept,
        result.extra_seconds,
        result.peak_bytes,
        tuple(actions),
        segments,
        tuple(result.replays),
    )


def _feeds(piece: Piece, value: int, actions: Sequence[int]) -> bool:
    graph = piece.graph
    return any(
        actions[output] == REBUILD
        for op in graph.consumers[value]
        for output in graph.op_outputs[op]
    )


def nestings(units: Sequence[int], operations: int) -> list[list[list[int]]]:
    """Ways to split a piece again and again: at its cuts, then between its operations, by twos and
    by roots.
    """
    inner = [position for position in units if 0 < position < operations]
    if operations > _LONG and inner:
        finer = halvings_within(inner, operations)
        return [halvings(inner), [*halvings(inner), *finer[:2]], [*halvings(inner), *finer]]
    found: list[list[list[int]]] = []
    if inner:
        found.append([inner])
        if len(inner) >= 3:
            found.append(halvings(inner))
            step = round((len(inner) + 1) ** 0.5)
            found.append([inner[step - 1 :: step], inner])
    if operations > 2:
        coarse = halvings(inner) if inner else []
        finer = halvings_within(inner, operations)
        depths = (
            range(1, len(finer) + 1) if len(inner) < 4 else sorted({min(2, len(finer)), len(finer)})
        )
        found += [[*coarse, *finer[:depth]] for depth in depths]
        if not inner:
            found.append([list(range(1, operations))])
    return found


def halvings(positions: Sequence[int]) -> list[list[int]]:
    """The middle, then the quarters, and so on, until every position is in.

    >>> halvings([1, 2, 3])
    [[2], [1, 2, 3]]
    """
    levels: list[list[int]] = []
    ranges = [(0, len(positions))]
    chosen: set[int] = set()
    while ranges:
        following = []
        for low, high in ranges:
            middle = (low + high) // 2
            chosen.add(positions[middle])
            following += [(a, b) for a, b in ((low, middle), (middle + 1, high)) if a < b]
        levels.append(sorted(chosen))
        ranges = following
    return levels


def halvings_within(units: Sequence[int], operations: int) -> list[list[int]]:
    """Halve every unit on its own, keeping the units' bounds at each level."""
    bounds = [0, *units, operations]
    parts = [
        halvings(range(low + 1, high)) if high - low > 1 else [] for low, high in pairwise(bounds)
    ]
    depth = max(len(part) for part in parts)
    return [
        sorted({*units, *(p for part in parts if part for p in part[min(level, len(part) - 1)])})
        for level in range(depth)
    ]


def prune(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats in all three numbers."""
    chosen: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.kept_bytes, o.peak_bytes)):
        if not any(
            o.kept_bytes <= option.kept_bytes and o.peak_bytes <= option.peak_bytes for o in chosen
        ):
            chosen.append(option)
    return chosen
