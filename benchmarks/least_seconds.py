"""A bound that no plan can beat, to draw below what plans reach.

Lagrangian relaxation of a knapsack (Fisher, "The Lagrangian relaxation method for solving integer
programming problems", 1981, https://doi.org/10.1287/mnsc.27.1.1), with a minimum cut for its terms.
Weakness: bursts are left out, so that small budgets cost more than it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradfit.planning.min_cut import PricedCut, replay_seconds
from gradfit.planning.simulate import KEEP, REBUILD
from gradfit.profiling.step_graph import Graph


def least_seconds(graph: Graph, budget_bytes: int) -> float:
    """Seconds of recomputation below which no keep-set can come under this budget (one level,
    nothing offloaded).

    When the backward pass begins, what is kept and what its first node takes must fit; the bound is
    the best over all prices.
    """
    room = budget_bytes - graph.static_bytes - (graph.node_peak[0] if graph.node_peak else 0)
    cut = PricedCut(graph, [value for value, stays in enumerate(graph.survives) if stays])
    usual = sum(graph.op_seconds) / max(1, sum(graph.held_bytes))
    best = 0.0
    for power in range(-24, 25):
        price = usual * 2 ** (power / 2)
        actions = cut.at(price)
        seconds = replay_seconds(graph, actions)
        best = max(best, seconds + price * (_bytes_held(graph, actions) - room))
    return best


def _bytes_held(graph: Graph, actions: Sequence[int]) -> int:
    """Of kept values that backward needs, or that something rebuilt is made from."""
    needed = {v for v, last in enumerate(graph.last_need) if last >= 0}
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(v in needed and actions[v] == REBUILD for v in graph.op_outputs[op]):
            needed.update(graph.op_inputs[op])
    return sum(graph.held_bytes[v] for v in needed if graph.producer[v] >= 0 and actions[v] == KEEP)
