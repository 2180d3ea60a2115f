"""More options for a short piece: those that there are, changed in one place at a time.

Paquete, Chiarandini & Stützle, "Pareto local optimum sets in the biobjective traveling salesman
problem: an experimental study" (2004): of options that no other one beats in
bytes kept, seconds and peak, one after the other is changed in every way, and what is not beaten
stays. A change keeps what an operation makes, or rebuilds it, or holds it in the segment around its
own. So segments and keep-sets are found together, which neither a minimum cut nor splitting by
halves does. A piece is short, and all that are like it share what is found: this costs less than
to look for the same changes in the whole graph, and gives the chain more to choose from.

Bound reached: none is proven; no option is lost that none beats. Weakness: it ends after so many
changes, and options of the lowest peak are changed first, since they are for little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gradfit.planning.local_search import choices_by_operation
from gradfit.planning.piece_options import Option, evaluate, is_no_worse, prune
from gradfit.planning.pieces import Piece
from gradfit.planning.simulate import KEEP, REBUILD, Segments, Simulator


def with_changed_options(piece: Piece, options: Sequence[Option], operations: int) -> list[Option]:
    """The options that none beats, of these and of what changes make of them, until so many
    operations have been simulated, their replays included.
    """
    simulator = Simulator(piece.graph)
    search = _ParetoSearch(piece, options)
    while (option := search.next_to_change()) is not None:
        for actions, segments in search.changes(option):
            if operations <= 0:
                return search.front
            if search.is_new(actions, segments):
                changed = evaluate(piece, simulator, actions, segments)
                operations -= len(changed.replays) + sum(changed.replays)
                search.add(changed)
    return search.front


class _ParetoSearch:
    """The options that none beats so far, and what was tried."""

    def __init__(self, piece: Piece, options: Sequence[Option]) -> None:
        self.outputs = piece.graph.op_outputs
        forced = set(piece.forced)
        groups = choices_by_operation(piece.graph).values()
        self.groups = [group for group in groups if forced.isdisjoint(group)]
        self.front = prune(options)
        self.tried = {_identity(option.actions, option.segments) for option in options}
        self.changed: list[Option] = []

    def next_to_change(self) -> Option | None:
        changed = {id(option) for option in self.changed}
        rest = [option for option in self.front if id(option) not in changed]
        option = min(rest, key=lambda one: one.peak_bytes, default=None)
        if option is not None:
            self.changed.append(option)
        return option

    def changes(self, option: Option) -> Iterator[tuple[Sequence[int], Segments | None]]:
        for group in self.groups:
            actions = list(option.actions)
            action = REBUILD if actions[group[0]] == KEEP else KEEP
            for value in group:
                actions[value] = action
            yield actions, option.segments
        if option.segments is not None:
            for segments in self._held_longer(option, option.segments):
                yield option.actions, segments

    def _held_longer(self, option: Option, segments: Segments) -> Iterator[Segments]:
        """What an operation that is replayed makes goes to the segment around its own."""
        for outputs, replays in zip(self.outputs, option.replays, strict=True):
            inner = [value for value in outputs if segments.of[value] > 0]
            if replays and inner:
                of = list(segments.of)
                for value in inner:
                    of[value] = segments.parent[of[value]]
                yield Segments(of, segments.parent)

    def is_new(self, actions: Sequence[int], segments: Segments | None) -> bool:
        identity = _identity(actions, segments)
        is_new = identity not in self.tried
        self.tried.add(identity)
        return is_new

    def add(self, option: Option) -> None:
        if math.isfinite(option.seconds) and not any(is_no_worse(o, option) for o in self.front):
            self.front = [o for o in self.front if not is_no_worse(option, o)] + [option]


def _identity(actions: Sequence[int], segments: Segments | None) -> tuple[object, ...]:
    return tuple(actions), None if segments is None else tuple(segments.of)
