"""What can be done with a piece of the graph: a short menu of (bytes kept, seconds, bytes at its
worst moment).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from gradfit.planning.min_cut import hull
from gradfit.planning.pieces import Piece, last_readers, nest, together
from gradfit.planning.simulate import KEEP, REBUILD, Segments, Simulator
from gradfit.profiling.step_graph import Graph

_LONG = 600  # operations; trees over more are few, since each is simulated
_DENSE = 10  # times the usual seconds per byte


@dataclass(frozen=True)
class Option:
    """One way to run a piece, given that what it reads from before is there."""

    kept_bytes: int  # held from its forward to its backward
    seconds: float
    forward_bytes: int  # its own worst moments in both passes, kept bytes included
    backward_bytes: int
    actions: tuple[int, ...]
    segments: Segments | None
    replays: tuple[int, ...]  # how often each of its operations runs again

    @property
    def peak_bytes(self) -> int:
        """The worse of the two."""
        return max(self.forward_bytes, self.backward_bytes)


Way = tuple[Sequence[int], Segments | None]  # what to do with each value of a piece


def flat_ways(piece: Piece, *, units: int, hull_units: int) -> list[Way]:
    """What may be worth doing without segments: keep-sets on the hull. A piece of more than
    `hull_units` units only serves to drop everything in it.
    """
    if units > hull_units:
        return [(keeping_nothing(piece), None)]
    return [
        (actions, None) for actions in hull(piece.graph, piece.forced, most=12 if units == 1 else 8)
    ]


def unit_ways(piece: Piece) -> list[Way]:
    """Everything of one unit rebuilt in segments inside segments, which are split by halves."""
    graph, last = piece.graph, last_readers(piece.graph)
    nothing, dense = keeping_nothing(piece), dense_values(piece.graph)
    trees = [nest(graph, last, levels) for levels in nestings(len(graph.op_inputs))]
    chosen = [keeping(nothing, dense), nothing] if dense else [nothing]
    return [(actions, tree) for tree in trees for actions in chosen]


def keeping_nothing(piece: Piece) -> list[int]:
    forced = set(piece.forced)
    return [
        KEEP if op < 0 or value in forced else REBUILD
        for value, op in enumerate(piece.graph.producer)
    ]


def dense_values(graph: Graph) -> set[int]:
    """What takes so long to make again, for its bytes, that it is kept nearly always: the bits of a
    dropout's mask.
    """
    usual = sum(graph.op_seconds) / max(1, sum(graph.held_bytes))
    dense: set[int] = set()
    for outputs, seconds in zip(graph.op_outputs, graph.op_seconds, strict=True):
        size = sum([graph.held_bytes[value] for value in outputs])
        keepable = not any(graph.unkeepable[value] for value in outputs)
        if keepable and seconds > _DENSE * usual * size:
            dense.update(outputs)
    return dense


def keeping(actions: Sequence[int], values: Container[int]) -> list[int]:
    return [KEEP if value in values else action for value, action in enumerate(actions)]


def options(piece: Piece, ways: Sequence[Way]) -> list[Option]:
    """The ways, with what they cost."""
    simulator = Simulator(piece.graph)
    return [evaluate(piece, simulator, actions, segments) for actions, segments in ways]


def evaluate(
    piece: Piece, simulator: Simulator, actions: Sequence[int], segments: Segments | None
) -> Option:
    actions = piece.graph.with_fixed(actions)
    segments = None if segments is None else together(piece.graph, actions, segments)
    result = simulator.run(actions, segments)
    return Option(
        _kept_bytes(piece, actions),
        result.extra_seconds,
        result.forward_bytes,
        result.backward_bytes,
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


def nestings(operations: int) -> list[list[list[int]]]:
    """Ways to split between operations again and again, by twos; and between all at once."""
    if operations <= 2:
        return []
    halves = halvings(range(1, operations))
    depths = range(1, len(halves) + 1) if operations <= _LONG else (2, len(halves))
    return [*(halves[:depth] for depth in depths), [list(range(1, operations))]]


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


def prune(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats in all four numbers."""
    chosen: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.kept_bytes, o.peak_bytes)):
        if not any(is_no_worse(other, option) for other in chosen):
            chosen.append(option)
    return chosen


def is_no_worse(one: Option, other: Option) -> bool:
    """Whether an option beats another one in all four numbers, or is as good."""
    return (
        one.kept_bytes <= other.kept_bytes
        and one.forward_bytes <= other.forward_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.seconds <= other.seconds
    )
