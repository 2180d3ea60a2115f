"""Local search on the simulator, from the chain's solution: fill the room that is left, then exchange and anneal.

Kirkpatrick, Gelatt & Vecchi 1983, with bytes over the budget priced instead of forbidden, so that the search can pass
through plans that do not fit. Its random numbers are its own: the same graph and budget give the same plan.

Weakness: it changes keep bits only, not the tree of segments, and one by one: on graphs of more than some hundred
operations it finds little in the time there is, so these get the fill only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from gradfit.planning.simulate import KEEP, REBUILD, Segments, Simulation, Simulator
from gradfit.profiling.step_graph import Graph

_DEARER = 30.0  # how much a byte too many rises in price while annealing: near the floor only that finds a fit


def fill(
    simulator: Simulator, actions: Sequence[int], segments: Segments, budget_bytes: int, *, evaluations: int
) -> list[int]:
    """Keep more, best seconds per byte first, while the budget holds; never slower than what it was given."""
    graph = simulator.graph
    best = list(actions)
    result = simulator.run(best, segments)
    groups = _groups(graph)
    while evaluations > 0:
        worth = []
        for op, group in groups.items():
            dropped = [value for value in group if best[value] == REBUILD]
            if dropped and result.replays[op]:
                size = sum(graph.held_bytes[value] for value in dropped)
                worth.append((graph.op_seconds[op] * result.replays[op] / max(1, size), dropped))
        before = result.extra_seconds
        for _, dropped in sorted(worth, reverse=True)[:evaluations]:
            evaluations -= 1
            for value in dropped:
                best[value] = KEEP
            trial = simulator.run(best, segments)
            if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
                result = trial
            else:
                for value in dropped:
                    best[value] = REBUILD
        if result.extra_seconds == before:
            break
    return best


def anneal(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    evaluations: int,
    seed: int = 0,
) -> list[int] | None:
    """Flip and exchange keep bits at a falling temperature; the fastest plan seen that fits, or None if none did."""
    graph = simulator.graph
    # All results of an operation together: keeping one of two saves nothing.
    by_op = _groups(graph)
    groups = list(by_op.values())
    beside = _neighbours(graph, list(by_op))
    current = list(actions)
    result = simulator.run(current, segments)
    best = list(current) if result.peak_bytes <= budget_bytes else None
    least = (result.extra_seconds, result.peak_bytes) if best else (math.inf, 0)
    if len(groups) < 2 or result.extra_seconds <= 0:
        return best
    rng = random.Random(seed)
    sizes = [sum(graph.held_bytes[value] for value in group) for group in groups]
    # A byte too many costs some times what a byte saved has cost so far, and in the end many times that.
    price = 4.0 * max(result.extra_seconds, sum(graph.op_seconds) / 4) / max(1, sum(sizes))

    def cost(of: Simulation, dearer: float) -> float:
        return of.extra_seconds + dearer * price * max(0, of.peak_bytes - budget_bytes)

    def kept(number: int) -> bool:
        return current[groups[number][0]] == KEEP

    seen: dict[bytes, Simulation] = {}  # small graphs, and cold searches, come by the same plans again and again
    hot, cold = 0.2 * result.extra_seconds, 0.002 * result.extra_seconds
    everything = range(len(groups))
    for step in range(evaluations):
        temperature = hot * (cold / hot) ** (step / evaluations)
        dearer = _DEARER ** (step / evaluations)
        changed = [rng.choice(everything)]
        move = rng.random()
        if move < 0.3:  # move the cut: keep what a value is made of, or what is made of it, instead of it
            after, before = beside[changed[0]]
            changed += [number for number in (after if move < 0.15 else before) if kept(number) != kept(changed[0])]
        elif move < 0.8:  # exchange: give bytes up to keep others, one for one or one for several
            partners = [number for number in everything if kept(number) != kept(changed[0])]
            rng.shuffle(partners)
            owed = sizes[changed[0]] if rng.random() < 0.5 else 1
            for number in partners[:8]:
                changed.append(number)
                owed -= sizes[number]
                if owed <= 0:
                    break
        undo = []
        for number in changed:
            to = REBUILD if kept(number) else KEEP
            for value in groups[number]:
                undo.append((value, current[value]))
                current[value] = to
        plan = bytes(current)
        if plan not in seen:
            seen[plan] = simulator.run(current, segments)
        trial = seen[plan]
        loss = cost(trial, dearer) - cost(result, dearer)
        if loss <= 0 or rng.random() < math.exp(-loss / temperature):
            result = trial
            if trial.peak_bytes <= budget_bytes and (trial.extra_seconds, trial.peak_bytes) < least:
                best, least = list(current), (trial.extra_seconds, trial.peak_bytes)
        else:
            for value, action in undo:
                current[value] = action
    return best


def _groups(graph: Graph) -> dict[int, list[int]]:
    """By operation, the values whose keep bit can matter: needed or on the way to one that is, and not there anyway."""
    matters = [last >= 0 for last in graph.last_need]
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(matters[value] for value in graph.op_outputs[op]):
            for value in graph.op_inputs[op]:
                matters[value] = True
    survives = graph.survives
    groups: dict[int, list[int]] = {}
    for value, op in enumerate(graph.producer):
        if (
            op >= 0
            and matters[value]
            and not graph.overwritten[value]
            and not survives[value]
            and graph.held_bytes[value] > 0
            and graph.op_replayable[op]
        ):
            groups.setdefault(op, []).append(value)
    return groups


def _neighbours(graph: Graph, ops: list[int]) -> list[tuple[list[int], list[int]]]:
    """For each group, the groups that are made from it, and those that it is made from."""
    place = {op: number for number, op in enumerate(ops)}
    found = []
    for op in ops:
        after = {reader for value in graph.op_outputs[op] for reader in graph.consumers[value]}
        before = {graph.producer[value] for value in graph.op_inputs[op]}
        found.append(tuple(sorted(place[other] for other in others if other in place) for others in (after, before)))
    return [(after, before) for after, before in found]
