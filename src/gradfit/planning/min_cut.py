"""The best keep-set at a price per byte: a minimum cut.

For a price λ in seconds per byte, minimise Σ seconds of replayed operations + λ Σ bytes kept, where
every value that backward needs is kept or rebuilt, and rebuilding needs the inputs in turn. With
x(v) "v is there" and r(o) "o is replayed", v costs λ·bytes if x(v) and not r(o), o costs its
seconds, and r(o) implies x(inputs): each term is an edge of an s-t cut, so the minimum is exact
(project selection, Picard 1976; torch's min-cut partitioner is the same without seconds). Sweeping
λ gives the lower convex hull of (bytes, seconds).

Weak where: it prices bytes between the passes only; the burst of a sweep is not in it, and is left
to the simulator. Points inside the hull are never found; local search has to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD
from gradfit.profiling.step_graph import Graph

_TOTAL = 100_000_000  # all replay seconds together, in the integer units that scipy's flow wants
_INFINITE = 4 * _TOTAL


class PricedCut:
    """The cut's network for one graph; only capacities change from price to price."""

    def __init__(self, graph: Graph, forced: Collection[int]) -> None:
        self.graph = graph
        count, operations = len(graph.nbytes), len(graph.op_inputs)
        self.kept = bytearray(count)
        for value in forced:
            self.kept[value] = 1
        total = sum(s for s, r in zip(graph.op_seconds, graph.op_replayable, strict=True) if r)
        self.scale = _TOTAL / total if total > 0 else 1.0
        self.source, self.sink = count + operations, count + operations + 1
        room: dict[tuple[int, int], int] = {}
        for op in range(operations):
            replay = (
                int(graph.op_seconds[op] * self.scale) + 1 if graph.op_replayable[op] else _INFINITE
            )
            room[count + op, self.sink] = replay
            for value in graph.op_inputs[op]:
                if graph.producer[value] >= 0 and not self.kept[value]:
                    room[count + op, value] = _INFINITE
        self.priced: list[int] = []
        for value, op in enumerate(graph.producer):
            if op < 0 or self.kept[value]:
                continue
            room[value, count + op] = _INFINITE if graph.overwritten[value] else 0
            if not graph.overwritten[value]:
                self.priced.append(value)
            if graph.last_need[value] >= 0:
                room[self.source, value] = _INFINITE
        edges = np.array(sorted(room), dtype=np.int32)
        self.capacities = np.array(
            [room[tail, head] for tail, head in edges.tolist()], dtype=np.int32
        )
        self.heads = edges[:, 1].copy()
        size = count + operations + 2
        self.starts = np.searchsorted(edges[:, 0], np.arange(size + 1)).astype(np.int32)
        where = {edge: index for index, edge in enumerate(map(tuple, edges.tolist()))}
        self.slots = np.array(
            [where[value, count + graph.producer[value]] for value in self.priced], dtype=np.int64
        )

    def at(self, seconds_per_byte: float) -> list[int]:
        """The actions that minimise replay seconds plus `seconds_per_byte` times the bytes kept."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        graph, count = self.graph, len(self.graph.nbytes)
        held = [seconds_per_byte * graph.held_bytes[value] for value in self.priced]
        moved = [2 * graph.transfer_seconds_per_byte * graph.nbytes[value] for value in self.priced]
        offload = {
            v for v, keep, move in zip(self.priced, held, moved, strict=True) if 0 < move < keep
        }
        costs = [
            move if v in offload else keep
            for v, keep, move in zip(self.priced, held, moved, strict=True)
        ]
        if len(self.slots):
            self.capacities[self.slots] = np.minimum(
                np.array(costs) * self.scale, _INFINITE
            ).astype(np.int32)
        shape = (self.sink + 1, self.sink + 1)
        network = csr_matrix((self.capacities, self.heads, self.starts), shape=shape)
        flow = maximum_flow(network, self.source, self.sink).flow
        left = network - flow
        left.eliminate_zeros()
        reached = np.zeros(self.sink + 1, dtype=bool)
        reached[breadth_first_order(left, self.source, return_predecessors=False)] = True
        actions = []
        for value, op in enumerate(graph.producer):
            if op < 0 or self.kept[value]:
                actions.append(KEEP)
            elif reached[value] and not reached[count + op]:
                actions.append(OFFLOAD if value in offload else KEEP)
            else:
                actions.append(REBUILD)
        return actions


def hull(graph: Graph, forced: Collection[int], *, most: int = 24) -> list[list[int]]:
    """Every keep-set on the lower convex hull of (bytes kept, seconds replayed), from keeping all
    to dropping all.

    Between two neighbours the price that makes them equal either finds a point below the line, or
    proves there is none.
    """

    def measure(actions: list[int]) -> tuple[float, float]:
        held = sum(b for a, b in zip(actions, graph.held_bytes, strict=True) if a == KEEP)
        moved = sum(b for a, b in zip(actions, graph.nbytes, strict=True) if a == OFFLOAD)
        return held, replay_seconds(graph, actions) + 2 * moved * graph.transfer_seconds_per_byte

    everything = sum(graph.op_seconds) + 2 * graph.transfer_seconds_per_byte * sum(graph.nbytes)
    cut = PricedCut(graph, forced)
    first, last = cut.at(0.0), cut.at(everything + 1.0)
    found = [(measure(first), first), (measure(last), last)]
    gaps = [(0, 1)]
    while gaps and len(found) < most:
        left, right = gaps.pop(0)
        (more, faster), (less, slower) = found[left][0], found[right][0]
        if more <= less or slower <= faster:
            continue
        price = (slower - faster) / (more - less)
        middle = cut.at(price)
        held, seconds = measure(middle)
        if (
            seconds + price * held < faster + price * more - 1e-6 * (slower - faster)
            and less < held < more
        ):
            found.append(((held, seconds), middle))
            gaps += [(left, len(found) - 1), (len(found) - 1, right)]
    return [actions for _, actions in sorted(found, key=lambda point: (-point[0][0], point[0][1]))]


def least_seconds(graph: Graph, budget_bytes: int) -> float:
    """Seconds of recomputation below which no keep-set can come under this budget (one level,
    nothing offloaded).

    When the backward pass begins, what is kept and what its first node takes must fit: a knapsack
    with a min-cut for its terms, whose Lagrangian bound is the best over all prices. Bursts are
    left out, so small budgets cost more.
    """
    room = budget_bytes - graph.static_bytes - (graph.node_peak[0] if graph.node_peak else 0)
    cut = PricedCut(graph, [value for value, stays in enumerate(graph.survives) if stays])
    best, price = 0.0, sum(graph.op_seconds) / max(1, sum(graph.held_bytes))
    for power in range(-24, 25):
        at = price * 2 ** (power / 2)
        actions = cut.at(at)
        needed = {v for v, last in enumerate(graph.last_need) if last >= 0}
        for op in range(len(graph.op_inputs) - 1, -1, -1):
            if any(v in needed and actions[v] == REBUILD for v in graph.op_outputs[op]):
                needed.update(graph.op_inputs[op])
        held = sum(
            graph.held_bytes[v] for v in needed if graph.producer[v] >= 0 and actions[v] == KEEP
        )
        best = max(best, replay_seconds(graph, actions) + at * (held - room))
    return best


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
