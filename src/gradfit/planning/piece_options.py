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
from gradfit.profiling.step_graph import Graph

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
    many = len(units) - 1
    nothing = _keeping_nothing(piece)
    flat = [nothing]
    if many <= hull_units:
        flat = hull(piece.graph, piece.forced, most=12 if many == 1 else 8)
    ways: list[Way] = [(actions, None) for actions in flat]
    if nested:
        ways += [(nothing, tree) for tree in _trees(piece.graph, units)]
    return ways


def _trees(graph: Graph, units: Sequence[int]) -> list[Segments]:
    last = last_readers(graph)
    return [nest(graph, last, levels) for levels in nestings(units, len(graph.op_inputs))]


def _keeping_nothing(piece: Piece) -> list[int]:
    forced = set(piece.forced)
    return [
        KEEP if op < 0 or value in forced else REBUILD
        for value, op in enumerate(piece.graph.producer)
    ]


def menu(piece: Piece, ways: Sequence[Way]) -> list[Option]:
    """The ways that are worth having, with what they cost."""
    simulator = Simulator(piece.graph)
    return prune([evaluate(piece, simulator, actions, segments) for actions, segments in ways])


def evaluate(
    piece: Piece, simulator: Simulator, actions: Sequence[int], segments: Segments | None
) -> Option:
    actions = piece.graph.with_fixed(actions)
    result = simulator.run(actions, segments)
    return Option(
        _kept_bytes(piece, actions),
        result.extra_seconds,
        result.peak_bytes,
        tuple(actions),
        segments,
        tuple(result.replays),
    )


def _kept_bytes(piece: Piece, actions: Sequence[int]) -> int:
    """Of kept values that somebody will ask for: after the piece, in backward, or to rebuild."""
    graph, leaving = piece.graph, set(piece.leaving)
    kept = [value for value in range(len(piece.values)) if actions[value] == KEEP]
    asked_for = [value for value in kept if value in leaving or _is_used(graph, value, actions)]
    return sum([graph.held_bytes[value] for value in asked_for])


def _is_used(graph: Graph, value: int, actions: Sequence[int]) -> bool:
    """Whether backward needs a value, or something is rebuilt from it."""
    return graph.last_need[value] >= 0 or any(
        actions[output] == REBUILD
        for op in graph.consumers[value]
        for output in graph.op_outputs[op]
    )


def nestings(units: Sequence[int], operations: int) -> list[list[list[int]]]:
    """Ways to split a piece again and again: at its cuts, then between its operations, by twos and
    by roots.

    Revolve (Griewank & Walther 2000, https://doi.org/10.1145/347837.347846) splits where its
    recurrence says; halves and square roots come close with a few simulations.
    """
    inner = [position for position in units if 0 < position < operations]
    if operations > _LONG and inner:
        return _few_nestings(inner, operations)
    return _nestings_at_cuts(inner) + _nestings_between(inner, operations)


def _few_nestings(inner: list[int], operations: int) -> list[list[list[int]]]:
    finer, coarse = halvings_within(inner, operations), halvings(inner)
    return [coarse, [*coarse, *finer[:2]], [*coarse, *finer]]


def _nestings_at_cuts(inner: list[int]) -> list[list[list[int]]]:
    if len(inner) < 3:
        return [[inner]] if inner else []
    step = round((len(inner) + 1) ** 0.5)
    return [[inner], halvings(inner), [inner[step - 1 :: step], inner]]


def _nestings_between(inner: list[int], operations: int) -> list[list[list[int]]]:
    """Splits between any two operations, below those at the cuts."""
    if operations <= 2:
        return []
    finer = halvings_within(inner, operations)
    coarse = halvings(inner) if inner else []
    splits = [[*coarse, *finer[:depth]] for depth in _depths(len(inner), len(finer))]
    return splits if inner else [*splits, [list(range(1, operations))]]


def _depths(cuts: int, deepest: int) -> Sequence[int]:
    """To which depths a piece of so many inner cuts is split: of many units, each simulated, the
    extremes will do.
    """
    return range(1, deepest + 1) if cuts < 4 else sorted({min(2, deepest), deepest})


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
    parts = [halvings(range(low + 1, high)) for low, high in pairwise(bounds) if high - low > 1]
    depth = max((len(part) for part in parts), default=0)
    return [sorted({*units, *_at_level(parts, level)}) for level in range(depth)]


def _at_level(parts: Sequence[Sequence[list[int]]], level: int) -> list[int]:
    """Where the parts are split at this level, each at its deepest if it has fewer."""
    return [place for part in parts for place in part[min(level, len(part) - 1)]]


def prune(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats in all three numbers."""
    chosen: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.kept_bytes, o.peak_bytes)):
        if not any(_is_smaller(other, option) for other in chosen):
            chosen.append(option)
    return chosen


def _is_smaller(one: Option, other: Option) -> bool:
    return one.kept_bytes <= other.kept_bytes and one.peak_bytes <= other.peak_bytes
