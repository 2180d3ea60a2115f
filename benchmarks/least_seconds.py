"""A bound that no plan can beat, to draw below what plans reach.

Lagrangian relaxation of a knapsack (Fisher, "The Lagrangian relaxation method for solving integer
programming problems", 1981, https://doi.org/10.1287/mnsc.27.1.1), with a minimum cut for its terms.
Weakness: bursts are left out, so that small budgets cost more than it says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gradfit.planning.min_cut import PricedCut, replay_seconds
from gradfit.planning.simulate import KEEP, REBUILD
from gradfit.profiling.step_graph import Graph


def least_seconds(graph: Graph, budget_bytes: int) -> float:
    """Seconds of recomputation below which no keep-set can come under this budget (nothing
    offloaded), in segments or not.

    While a backward node runs there must be room for what it takes, what it unpacks and what is
    kept for it and later ones. The bound is the best over nodes and prices.
    """
    return max(_at_node(graph, budget_bytes, node) for node in _tight_nodes(graph))


def _tight_nodes(graph: Graph) -> list[int]:
    """Those that take more than all before them: later ones are followed by fewer needs."""
    nodes: list[int] = []
    most_peak = most_bytes = -1
    for node, peak in enumerate(graph.node_peak):
        with_unpacked = peak + sum(graph.held_bytes[v] for v in _unpacked(graph, node))
        if peak > most_peak or with_unpacked > most_bytes:
            nodes.append(node)
        most_peak, most_bytes = max(most_peak, peak), max(most_bytes, with_unpacked)
    return nodes


def _unpacked(graph: Graph, node: int) -> set[int]:
    """What a node unpacks that a plan could keep or rebuild."""
    needs = graph.node_needs[node]
    return {v for v in needs if graph.producer[v] >= 0 and not graph.survives[v]}


def _at_node(graph: Graph, budget_bytes: int, node: int) -> float:
    """The better of two: what the node unpacks may be kept or rebuilt, with no bytes for what is
    rebuilt; or it is there for nothing, and has its bytes.
    """
    rebuilt = _with_room(graph, budget_bytes, node, ())
    return max(rebuilt, _with_room(graph, budget_bytes, node, _unpacked(graph, node)))


def _with_room(graph: Graph, budget_bytes: int, node: int, there: Collection[int]) -> float:
    """When this node runs, what is kept for it and later ones, what it takes and these must fit."""
    beside = (graph.node_peak[node] if graph.node_peak else 0) + sum(
        graph.held_bytes[value] for value in there
    )
    room = budget_bytes - graph.static_bytes - beside
    later = [needs if at >= node else () for at, needs in enumerate(graph.node_needs)]
    graph = replace(graph, node_needs=later)
    free = {value for value, stays in enumerate(graph.survives) if stays} | set(there)
    cut = PricedCut(graph, sorted(free))
    usual = sum(graph.op_seconds) / max(1, sum(graph.held_bytes))
    best = 0.0
    for power in range(-24, 25):
        price = usual * 2 ** (power / 2)
        actions = cut.at(price)
        seconds = replay_seconds(graph, actions)
        best = max(best, seconds + price * (_bytes_held(graph, actions, free) - room))
    return best


def _bytes_held(graph: Graph, actions: Sequence[int], free: Collection[int]) -> int:
    """Of kept values that backward needs, or that something rebuilt is made from."""
    needed = {v for v, last in enumerate(graph.last_need) if last >= 0}
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(v in needed and actions[v] == REBUILD for v in graph.op_outputs[op]):
            needed.update(graph.op_inputs[op])
    kept = {v for v in needed - set(free) if graph.producer[v] >= 0 and actions[v] == KEEP}
    return sum(graph.held_bytes[v] for v in kept)
