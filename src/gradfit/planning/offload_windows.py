"""Plans that move out what hides behind computing.

A copy costs nothing while computation has something else to do, and everything when it waits. So
a price for each byte, as a minimum cut has it, says little about moving: what counts is when each
value is made and needed. Here some plan says what is rebuilt; of the rest values are moved out,
from the start of the forward on, where there is most time for both ways, until the budget holds:
all of them, or only those whose copies computation would not have to wait for.

Bound reached: none is proven. The number of simulations does not grow with the graph, but for the
logarithm of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradfit.planning.simulate import IN_FLIGHT, KEEP, OFFLOAD, Simulator
from gradfit.profiling.step_graph import Graph

_FINEST = 32  # parts of the values between which a bisection tells apart


def may_move(graph: Graph) -> bool:
    """Whether a plan may choose values to move out."""
    return graph.may_offload and graph.transfer_seconds_per_byte > 0


def moved_from_the_start(
    simulator: Simulator, actions: Sequence[int], fits: Callable[[list[int]], bool]
) -> list[list[int]]:
    """Plans that move out as few of the values that a plan holds as it takes, those made first.

    Args:
        simulator: of the graph.
        actions: the plan.
        fits: whether a plan's peak is within the budget.
    """
    held = _worth_moving(simulator, actions)
    menus = [held, _hidden(simulator, held)]
    found = [_fewest(actions, values, fits) for values in menus if values]
    return [plan for plan in found if plan is not None]


def _worth_moving(simulator: Simulator, actions: Sequence[int]) -> list[int]:
    """What is held until backward and need not be, in the order in which it is made."""
    graph = simulator.graph
    until, survives = simulator.alive_until(actions), graph.survives
    values = [
        value
        for value, keepable in enumerate(graph.keepable)
        if keepable
        and actions[value] in (KEEP, OFFLOAD)
        and until[value] >= 0
        and graph.held_bytes[value] > 0
        and not survives[value]
        and value not in graph.fixed
    ]
    return sorted(values, key=lambda value: (graph.producer[value], value))


def _hidden(simulator: Simulator, values: Sequence[int]) -> list[int]:
    """Of the values those for whose way out computation never waits."""
    graph, ends = simulator.graph, simulator.op_ends
    chosen: list[int] = []
    done = [0.0] * IN_FLIGHT  # when the copies so far are
    for value in values:
        now = ends[graph.producer[value]]
        if done[-IN_FLIGHT] <= now:
            seconds = graph.nbytes[value] * graph.transfer_seconds_per_byte
            done.append(max(now, done[-1]) + seconds)
            chosen.append(value)
    return chosen


def _fewest(
    actions: Sequence[int], values: Sequence[int], fits: Callable[[list[int]], bool]
) -> list[int] | None:
    """The plan that moves the fewest of the values, from the first on, and fits."""
    low, high = 0, len(values)  # `high` fits, `low` is taken not to: then it is not looked at
    best = _moving(actions, values, high)
    if not fits(best):
        return None
    while high - low > max(1, len(values) // _FINEST):
        middle = (low + high) // 2
        trial = _moving(actions, values, middle)
        if fits(trial):
            best, high = trial, middle
        else:
            low = middle
    return best


def _moving(actions: Sequence[int], values: Sequence[int], count: int) -> list[int]:
    trial = list(actions)
    for number, value in enumerate(values):
        trial[value] = OFFLOAD if number < count else KEEP
    return trial
