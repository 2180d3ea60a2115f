"""The best keep-set at a price per byte: a minimum cut.

For a price λ in seconds per byte, minimise Σ seconds of replayed operations + λ Σ bytes kept, where every value that
backward needs is kept or rebuilt, and rebuilding needs the inputs in turn. With x(v) "v is there" and r(o) "o is
replayed", v costs λ·bytes if x(v) and not r(o), o costs its seconds, and r(o) implies x(inputs): each term is an edge
of an s-t cut, so the minimum is exact (project selection, Picard 1976; torch's min-cut partitioner is the
same without seconds). Sweeping λ gives the lower convex hull of (bytes, seconds).

Weak where: it prices bytes between the passes only; the burst of a sweep is not in it, and is left to the simulator.
Points inside the hull are never found; local search has to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD
from gradfit.profiling.graph import Graph

_TOTAL = 100_000_000  # all replay seconds together, in the integer units that scipy's flow wants


def cheapest_actions(graph: Graph, forced: Collection[int], seconds_per_byte: float) -> list[int]:
    """The actions that minimise replay seconds plus `seconds_per_byte` times the bytes kept; `forced` are kept."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count, operations = len(graph.nbytes), len(graph.op_inputs)
    kept = bytearray(count)
    for value in forced:
        kept[value] = 1
    total = sum(s for s, r in zip(graph.op_seconds, graph.op_replayable, strict=True) if r)
    scale = _TOTAL / total if total > 0 else 1.0
    infinite = 4 * _TOTAL
    source, sink = count + operations, count + operations + 1
    tails: list[int] = []
    heads: list[int] = []
    room: list[int] = []

    def edge(tail: int, head: int, capacity: float) -> None:
        tails.append(tail)
        heads.append(head)
        room.append(min(int(capacity), infinite))

    for op in range(operations):
        edge(count + op, sink, graph.op_seconds[op] * scale + 1 if graph.op_replayable[op] else infinite)
        for value in dict.fromkeys(graph.op_inputs[op]):
            if graph.producer[value] >= 0 and not kept[value]:
                edge(count + op, value, infinite)
    price = [0.0] * count
    for value, op in enumerate(graph.producer):
        if op < 0 or kept[value]:
            continue
        held, moved = (
            seconds_per_byte * graph.held_bytes[value],
            2 * graph.transfer_seconds_per_byte * graph.nbytes[value],
        )
        price[value] = min(held, moved) if moved > 0 else held
        edge(value, count + op, infinite if graph.overwritten[value] else price[value] * scale)
        if graph.last_need[value] >= 0:
            edge(source, value, infinite)
    shape = (count + operations + 2,) * 2
    capacity = csr_matrix((np.array(room, dtype=np.int32), (tails, heads)), shape=shape)
    flow = maximum_flow(capacity, source, sink).flow
    residual = capacity - flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = np.zeros(count + operations + 2, dtype=bool)
    reached[breadth_first_order(residual, source, return_predecessors=False)] = True
    actions = []
    for value, op in enumerate(graph.producer):
        if op < 0 or kept[value]:
            actions.append(KEEP)
        elif reached[value] and not reached[count + op]:
            actions.append(KEEP if seconds_per_byte * graph.held_bytes[value] <= price[value] else OFFLOAD)
        else:
            actions.append(REBUILD)
    return actions


def hull(graph: Graph, forced: Collection[int], *, most: int = 24) -> list[list[int]]:
    """Every keep-set on the lower convex hull of (bytes kept, seconds replayed), from keeping all to dropping all.

    Between two neighbours the price that makes them equal either finds a point below the line, or proves there is none.
    """

    def measure(actions: list[int]) -> tuple[float, float]:
        held = sum(b for a, b in zip(actions, graph.held_bytes, strict=True) if a == KEEP)
        moved = sum(b for a, b in zip(actions, graph.nbytes, strict=True) if a == OFFLOAD)
        return held, replay_seconds(graph, actions) + 2 * moved * graph.transfer_seconds_per_byte

    everything = sum(graph.op_seconds) + 2 * graph.transfer_seconds_per_byte * sum(graph.nbytes)
    first, last = cheapest_actions(graph, forced, 0.0), cheapest_actions(graph, forced, everything + 1.0)
    found = [(measure(first), first), (measure(last), last)]
    gaps = [(0, 1)]
    while gaps and len(found) < most:
        left, right = gaps.pop(0)
        (more, faster), (less, slower) = found[left][0], found[right][0]
        if more <= less or slower <= faster:
            continue
        price = (slower - faster) / (more - less)
        middle = cheapest_actions(graph, forced, price)
        held, seconds = measure(middle)
        if seconds + price * held < faster + price * more - 1e-6 * (slower - faster) and less < held < more:
            found.append(((held, seconds), middle))
            gaps += [(left, len(found) - 1), (len(found) - 1, right)]
    return [actions for _, actions in sorted(found, key=lambda point: (-point[0][0], point[0][1]))]


def replay_seconds(graph: Graph, actions: Sequence[int]) -> float:
    """Seconds of every operation that has to run again, each once: what a plan of one level pays."""
    needed = [last >= 0 for last in graph.last_need]
    seconds = 0.0
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(needed[value] and actions[value] == REBUILD for value in graph.op_outputs[op]):
            seconds += graph.op_seconds[op]
            for value in graph.op_inputs[op]:
                needed[value] = True
    return seconds
