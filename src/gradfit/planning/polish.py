"""Local search on the simulator, from the chain's solution: fill the room that is left, then exchange and anneal.

Kirkpatrick, Gelatt & Vecchi 1983, with bytes over the budget priced instead of forbidden, so that the search can pass
through plans that do not fit. Its random numbers are its own: the same graph and budget give the same plan.

Weakness: it changes keep bits only, not the tree of segments, and its moves are blind to structure. It pays on graphs
of up to some hundred operations; on large ones there is time for the fill only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gradfit.planning.simulate import KEEP, REBUILD, Segments, Simulation, simulate
from gradfit.profiling.graph import Graph


def fill(graph: Graph, actions: Sequence[int], segments: Segments, budget_bytes: int, *, evaluations: int) -> list[int]:
    """Keep more, best seconds per byte first, while the budget holds; never slower than what it was given."""
    best = list(actions)
    result = simulate(graph, best, segments)
    while evaluations > 0:
        worth = sorted(
            (
                (graph.op_seconds[op] * result.replays[op] / max(1, graph.held_bytes[value]), value)
                for value, op in enumerate(graph.producer)
                if op >= 0 and best[value] == REBUILD and result.replays[op] and not graph.overwritten[value]
            ),
            reverse=True,
        )
        before = result.extra_seconds
        for _, value in worth[:evaluations]:
            evaluations -= 1
            best[value] = KEEP
            trial = simulate(graph, best, segments)
            if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
                result = trial
            else:
                best[value] = REBUILD
        if result.extra_seconds == before:
            break
    return best


def anneal(
    graph: Graph, actions: Sequence[int], segments: Segments, budget_bytes: int, *, evaluations: int, seed: int = 0
) -> list[int] | None:
    """Flip and exchange keep bits at a falling temperature; the fastest plan seen that fits, or None if none did."""
    choices = _choices(graph)
    current = list(actions)
    result = simulate(graph, current, segments)
    best = list(current) if result.peak_bytes <= budget_bytes else None
    least = (result.extra_seconds, result.peak_bytes) if best else (math.inf, 0)
    if len(choices) < 2 or result.extra_seconds <= 0:
        return best
    rng = random.Random(seed)
    # A byte too many costs some times what a byte saved has cost so far.
    plain = sum(graph.held_bytes[value] for value in choices)
    price = 4.0 * max(result.extra_seconds, sum(graph.op_seconds) / 4) / max(1, plain)

    def cost(of: Simulation) -> float:
        return of.extra_seconds + price * max(0, of.peak_bytes - budget_bytes)

    hot, cold = 0.2 * result.extra_seconds, 0.002 * result.extra_seconds
    energy = cost(result)
    for step in range(evaluations):
        temperature = hot * (cold / hot) ** (step / evaluations)
        changed = [rng.choice(choices)]
        if rng.random() < 0.6:  # exchange: give bytes up to keep others, one for one or one for several
            kept = current[changed[0]] == KEEP
            partners = [value for value in choices if (current[value] == KEEP) != kept]
            rng.shuffle(partners)
            owed = graph.held_bytes[changed[0]] if rng.random() < 0.5 else 1
            for value in partners[:8]:
                changed.append(value)
                owed -= graph.held_bytes[value]
                if owed <= 0:
                    break
        for value in changed:
            current[value] = KEEP if current[value] != KEEP else REBUILD
        trial = simulate(graph, current, segments)
        found = cost(trial)
        if found <= energy or rng.random() < math.exp((energy - found) / temperature):
            energy = found
            if trial.peak_bytes <= budget_bytes and (trial.extra_seconds, trial.peak_bytes) < least:
                best, least = list(current), (trial.extra_seconds, trial.peak_bytes)
        else:
            for value in changed:
                current[value] = KEEP if current[value] != KEEP else REBUILD
    return best


def _choices(graph: Graph) -> list[int]:
    """Values whose keep bit can matter: needed, or on the way to one that is, and not there anyway."""
    matters = [last >= 0 for last in graph.last_need]
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(matters[value] for value in graph.op_outputs[op]):
            for value in graph.op_inputs[op]:
                matters[value] = True
    survives = graph.survives
    return [
        value
        for value, op in enumerate(graph.producer)
        if op >= 0
        and matters[value]
        and not graph.overwritten[value]
        and not survives[value]
        and graph.held_bytes[value] > 0
        and graph.op_replayable[op]
    ]
