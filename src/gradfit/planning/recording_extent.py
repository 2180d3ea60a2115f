"""How many operations of a forward must be recorded to follow a plan."""

from __future__ import annotations

from collections.abc import Sequence

from gradfit.planning.simulate import KEEP
from gradfit.profiling.step_graph import Graph


def in_effect(actions: Sequence[int], until: Sequence[int]) -> list[int]:
    """The actions, where what nothing will ask for (`alive_until`) is kept: that costs nothing, and
    is not written down.
    """
    return [action if last >= 0 else KEEP for action, last in zip(actions, until, strict=True)]


def operations_recorded(graph: Graph, actions: Sequence[int]) -> int:
    """How many operations, from the first, are recorded by whoever follows these actions (those
    `in_effect`).
    """
    return max([*_not_kept(graph, actions)[-1:], last_write(graph, actions)]) + 1


def last_write(graph: Graph, actions: Sequence[int]) -> int:
    """The last operation that writes over something that a rebuilt value is made from; -1 if none
    does.
    """
    sources = {value for op in _not_kept(graph, actions) for value in graph.op_inputs[op]}
    writers = (op for op, old in enumerate(graph.op_overwrites) if not sources.isdisjoint(old))
    return max(writers, default=-1)


def _not_kept(graph: Graph, actions: Sequence[int]) -> list[int]:
    """The operations of which some result is rebuilt or moved out, in their order."""
    return [op for op, outputs in enumerate(graph.op_outputs) if _is_chosen(outputs, actions)]


def _is_chosen(outputs: Sequence[int], actions: Sequence[int]) -> bool:
    return any(actions[value] != KEEP for value in outputs)
