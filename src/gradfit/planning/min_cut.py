"""The best keep-set at a price per byte: a minimum cut.

For a price λ in seconds per byte, minimise Σ seconds of replayed operations + λ Σ bytes kept, where
every value that backward needs is kept or rebuilt, and rebuilding needs the inputs in turn. With
x(v) "v is there" and r(o) "o is replayed", v costs λ·bytes if x(v) and not r(o), o costs its
seconds, and r(o) implies x(inputs): each term is an edge of an s-t cut, so the minimum is exact
(project selection: Picard, "Maximal closure of a graph", 1976,
https://doi.org/10.1287/mnsc.22.11.1268; torch's min-cut partitioner is the same without seconds).
Sweeping λ gives the lower convex hull of (bytes, seconds).

Bound reached: the optimum of that sum, for each price. Weak where: it prices bytes between the
passes only; the burst of a sweep is not in it, and is left to the simulator. Points inside the hull
are never found; local search has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD
from gradfit.profiling.step_graph import Graph

_TOTAL = 100_000_000  # all replay seconds together, in the integer units that scipy's flow wants
_INFINITE = 4 * _TOTAL


class PricedCut:
    """The cut's network for one graph; only capacities change from price to price.

    Its nodes are the values, then the operations, the source and the sink.
    """

    def __init__(self, graph: Graph, forced: Collection[int]) -> None:
        self.graph = graph
        self.values, operations = len(graph.nbytes), len(graph.op_inputs)
        self.source, self.sink = self.values + operations, self.values + operations + 1
        self.free = _free_to_choose(graph, forced)
        total = sum(compress(graph.op_seconds, graph.op_replayable))
        self.scale = _TOTAL / total if total > 0 else 1.0
        self.priced = [v for v, free in enumerate(self.free) if free and not graph.unkeepable[v]]
        self._lay_out(self._edges())

    def _edges(self) -> dict[tuple[int, int], int]:
        """The capacity of each edge; 0 where the price decides."""
        return dict([*self._edges_of_operations(), *self._edges_of_values()])

    def _edges_of_operations(self) -> Iterator[tuple[tuple[int, int], int]]:
        """What a replay costs, and that it needs the operation's inputs."""
        for op, inputs in enumerate(self.graph.op_inputs):
            yield (self.values + op, self.sink), self._replay_cost(op)
            for value in inputs:
                if self.free[value]:
                    yield (self.values + op, value), _INFINITE

    def _edges_of_values(self) -> Iterator[tuple[tuple[int, int], int]]:
        """What it costs to have a value without a replay, and that backward needs it."""
        graph = self.graph
        for value in compress(range(self.values), self.free):
            # what cannot be kept (it is written over, say) is there only if its operation ran again
            cost = _INFINITE if graph.unkeepable[value] else 0
            yield (value, self.values + graph.producer[value]), cost
            if graph.last_need[value] >= 0:
                yield (self.source, value), _INFINITE

    def _replay_cost(self, op: int) -> int:
        if not self.graph.op_replayable[op]:
            return _INFINITE
        # At least one unit: of two equal cuts the one that replays less is to be taken.
        return int(self.graph.op_seconds[op] * self.scale) + 1

    def _lay_out(self, room: dict[tuple[int, int], int]) -> None:
        """The edges as a sparse matrix, and where in it the capacities are that a price decides."""
        edges = sorted(room)
        self.capacities = np.array([room[edge] for edge in edges], dtype=np.int32)
        tails, heads = np.array(edges, dtype=np.int32).T
        self.heads = heads.copy()
        self.starts = np.searchsorted(tails, np.arange(self.sink + 2)).astype(np.int32)
        place = {edge: index for index, edge in enumerate(edges)}
        producer = self.graph.producer
        self.slots = np.array(
            [place[value, self.values + producer[value]] for value in self.priced], dtype=np.int64
        )

    def at(self, seconds_per_byte: float) -> list[int]:
        """The actions that minimise replay seconds plus `seconds_per_byte` times the bytes kept."""
        offloaded = self._set_price(seconds_per_byte)
        there, unkeepable = self._on_the_sources_side().tolist(), self.graph.unkeepable
        actions = []
        for value, op in enumerate(self.graph.producer):
            if not self.free[value]:
                actions.append(KEEP)
            elif not there[value] or there[self.values + op] or unkeepable[value]:
                actions.append(REBUILD)
            else:
                actions.append(OFFLOAD if value in offloaded else KEEP)
        return actions

    def _set_price(self, seconds_per_byte: float) -> set[int]:
        """What it costs to have each value without replaying: keeping it, or moving it where that
        is cheaper; gives the values to move.
        """
        graph = self.graph
        offloaded, costs = set(), []
        for value in self.priced:
            keep = seconds_per_byte * graph.held_bytes[value]
            move = 2 * graph.transfer_seconds_per_byte * graph.nbytes[value]
            if graph.may_offload and 0 < move < keep:
                offloaded.add(value)
            costs.append(move if value in offloaded else keep)
        if costs:
            units = np.minimum(np.array(costs) * self.scale, _INFINITE)
            self.capacities[self.slots] = units.astype(np.int32)
        return offloaded

    def _on_the_sources_side(self) -> np.ndarray:
        """Which nodes of the network a minimum cut leaves with the source."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        nodes = self.sink + 1
        network = csr_matrix((self.capacities, self.heads, self.starts), shape=(nodes, nodes))
        left = network - maximum_flow(network, self.source, self.sink).flow
        left.eliminate_zeros()  # a full edge is still stored, and would be walked along
        reached = np.zeros(nodes, dtype=bool)
        reached[breadth_first_order(left, self.source, return_predecessors=False)] = True
        return reached


def _free_to_choose(graph: Graph, forced: Collection[int]) -> list[bool]:
    """Whether there is a choice for each value."""
    free = [op >= 0 for op in graph.producer]
    for value in forced:
        free[value] = False
    return free


@dataclass(frozen=True)
class _Point:
    """A keep-set, and where it is on the trade-off."""

    held_bytes: int
    seconds: float
    actions: list[int] = field(repr=False)


def _point(graph: Graph, actions: list[int]) -> _Point:
    held = sum(b for a, b in zip(actions, graph.held_bytes, strict=True) if a == KEEP)
    moved = sum(b for a, b in zip(actions, graph.nbytes, strict=True) if a == OFFLOAD)
    seconds = replay_seconds(graph, actions) + 2 * moved * graph.transfer_seconds_per_byte
    return _Point(held, seconds, actions)


def hull(graph: Graph, forced: Collection[int], *, most: int = 24) -> list[list[int]]:
    """Every keep-set on the lower convex hull of (bytes kept, seconds replayed), from keeping all
    to dropping all.
    """
    everything = sum(graph.op_seconds) + 2 * graph.transfer_seconds_per_byte * sum(graph.nbytes)
    cut = PricedCut(graph, forced)
    ends = [_point(graph, cut.at(price)) for price in (0.0, everything + 1.0)]
    points = [*ends, *islice(_points_between(cut, *ends), most - len(ends))]
    points.sort(key=lambda point: (-point.held_bytes, point.seconds))
    return [point.actions for point in points]


def _points_between(cut: PricedCut, left: _Point, right: _Point) -> Iterator[_Point]:
    """The points of the hull between two of them, the widest gaps first."""
    gaps = deque([(left, right)])
    while gaps:
        left, right = gaps.popleft()
        between = _point_below(cut, left, right)
        if between is not None:
            gaps += [(left, between), (between, right)]
            yield between


def _point_below(cut: PricedCut, left: _Point, right: _Point) -> _Point | None:
    """A keep-set below the line between two: the price that makes them equal either finds one, or
    proves that there is none.
    """
    saved, slower = left.held_bytes - right.held_bytes, right.seconds - left.seconds
    if saved <= 0 or slower <= 0:
        return None
    price = slower / saved
    point = _point(cut.graph, cut.at(price))
    line = left.seconds + price * left.held_bytes - 1e-6 * slower  # less what is rounding
    is_below = point.seconds + price * point.held_bytes < line
    return point if is_below and right.held_bytes < point.held_bytes < left.held_bytes else None


def replay_seconds(graph: Graph, actions: Sequence[int]) -> float:
    """Seconds of every operation that has to run again, each once: what a plan of one level
    pays.
    """
    needed = [last >= 0 for last in graph.last_need]
    seconds = 0.0
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(needed[value] and actions[value] == REBUILD for value in graph.op_outputs[op]):
            seconds += graph.op_seconds[op]
            for value in graph.op_inputs[op]:
                needed[value] = True
    return seconds
