"""Local search on the simulator: keep what fits, drop what is cheap, until the seconds no longer fall."""

from __future__ import annotations

from collections.abc import Sequence

from gradfit.planning.simulate import KEEP, REBUILD, Segments, simulate
from gradfit.profiling.graph import Graph


def polish(
    graph: Graph, actions: Sequence[int], segments: Segments, budget_bytes: int, *, evaluations: int
) -> list[int]:
    """Actions at least as fast as the given ones, which must stay below the budget."""
    best = list(actions)
    result = simulate(graph, best, segments)
    left = evaluations
    improved = True
    while improved and left > 0:
        improved = False
        # Keep a value whose operation runs again: the seconds saved are at least its own, at most its ancestors' too.
        worth = [
            (graph.op_seconds[op] * result.replays[op] / max(1, graph.held_bytes[value]), value)
            for value, op in enumerate(graph.producer)
            if op >= 0 and best[value] == REBUILD and result.replays[op] and not graph.overwritten[value]
        ]
        for _, value in sorted(worth, reverse=True):
            if left <= 0:
                break
            left -= 1
            best[value] = KEEP
            trial = simulate(graph, best, segments)
            if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
                result, improved = trial, True
            else:
                best[value] = REBUILD
    return best
