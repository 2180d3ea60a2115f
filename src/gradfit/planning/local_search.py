"""Local search on the simulator, from the chain's solution: fill the room that is left, hold longer
what segments rebuild, then exchange and anneal.

Kirkpatrick, Gelatt & Vecchi, "Optimization by simulated annealing", 1983
(https://doi.org/10.1126/science.220.4598.671), with bytes over the budget priced instead of
forbidden, so that the search can pass through plans that do not fit. Its random numbers are its
own: the same graph and budget give the same plan.

Bound reached: none is proven; the plan is never slower than the one it began with.

Weakness: it changes keep bits, and which segment a value is in, but not the tree of segments, and
one by one: on graphs of more than some hundred operations annealing finds little in the time there
is, so these get the fill only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments, Simulation, Simulator
from gradfit.profiling.step_graph import Graph

_T = TypeVar("_T")
# how much a byte too many rises in price while annealing: near the floor only that finds a fit
_DEARER = 30.0


def fill(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    evaluations: int,
) -> list[int]:
    """Keep more, best seconds per byte first, while the budget holds; never slower than what it was
    given.
    """
    best = list(actions)
    result = simulator.run(best, segments)
    groups = choices_by_operation(simulator.graph)
    while evaluations > 0:
        before = result.extra_seconds
        for dropped in _worth_keeping(simulator.graph, groups, best, result)[:evaluations]:
            evaluations -= 1
            _set_all(best, dropped, KEEP)
            trial = simulator.run(best, segments)
            if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
                result = trial
            else:
                _set_all(best, dropped, REBUILD)
        if result.extra_seconds == before:
            break
    return best


def drop_to_fit(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    drops: int,
) -> list[int] | None:
    """For a plan that takes a little too much: rebuild one thing more and another, until it fits,
    each time what then takes least; None if it does not fit after so many.
    """
    best, result = list(actions), simulator.run(actions, segments)
    groups = list(choices_by_operation(simulator.graph).values())
    for _ in range(drops):
        chosen: tuple[tuple[float, float], list[int], Simulation] | None = None
        for group in [group for group in groups if best[group[0]] == KEEP]:
            _set_all(best, group, REBUILD)
            trial = simulator.run(best, segments)
            _set_all(best, group, KEEP)
            saved = result.peak_bytes - max(budget_bytes, trial.peak_bytes)
            if saved > 0 and math.isfinite(trial.extra_seconds):
                slower = trial.extra_seconds - result.extra_seconds
                worth = (slower / saved, slower)
                if chosen is None or worth < chosen[0]:
                    chosen = worth, group, trial
        if chosen is None:
            return None
        _, group, result = chosen
        _set_all(best, group, REBUILD)
        if result.peak_bytes <= budget_bytes:
            return best
    return None


def move_instead(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    evaluations: int,
) -> list[int]:
    """Keep what is moved out, what was made last first, and move out what is rebuilt, most seconds
    per byte first, while the budget holds; never slower than what it was given.
    """
    best = list(actions)
    result = simulator.run(best, segments)
    groups = choices_by_operation(simulator.graph)
    moved = [v for group in reversed(groups.values()) for v in group if best[v] == OFFLOAD]
    rebuilt = _worth_keeping(simulator.graph, groups, best, result)
    changes = [([value], KEEP) for value in moved] + [(values, OFFLOAD) for values in rebuilt]
    for values, action in changes[:evaluations]:
        before = [best[value] for value in values]
        _set_all(best, values, action)
        trial = simulator.run(best, segments)
        if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
            result = trial
        else:
            for value, old in zip(values, before, strict=True):
                best[value] = old
    return best


def hold_longer(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    evaluations: int,
) -> Segments:
    """Move values to the segment around theirs, where they stay for those that come before and are
    replayed less often, most seconds per byte first, while the budget holds.
    """
    of, parent = list(segments.of), segments.parent
    result = simulator.run(actions, segments)
    groups = choices_by_operation(simulator.graph)
    while evaluations > 0:
        before = result.extra_seconds
        for values in _worth_holding(simulator.graph, groups, actions, of, result)[:evaluations]:
            evaluations -= 1
            own = [of[value] for value in values]
            for value, segment in zip(values, own, strict=True):
                of[value] = parent[segment]
            trial = simulator.run(actions, Segments(of, parent))
            if trial.peak_bytes <= budget_bytes and trial.extra_seconds < result.extra_seconds:
                result = trial
            else:
                for value, segment in zip(values, own, strict=True):
                    of[value] = segment
        if result.extra_seconds == before:
            break
    return Segments(of, parent)


def _worth_holding(
    graph: Graph,
    groups: dict[int, list[int]],
    actions: Sequence[int],
    segment_of: Sequence[int],
    result: Simulation,
) -> list[list[int]]:
    """What is rebuilt more than once in a segment that has one around it, an operation's results
    together, most seconds per byte first.
    """
    worth = []
    for op, group in groups.items():
        rebuilt = [v for v in group if actions[v] == REBUILD and segment_of[v] > 0]
        if rebuilt and result.replays[op] > 1:
            values = list(graph.op_outputs[op])  # which have one segment
            seconds = graph.op_seconds[op] * (result.replays[op] - 1)
            size = sum([graph.nbytes[value] for value in values])
            worth.append((seconds / max(1, size), values))
    return [values for _, values in sorted(worth, reverse=True)]


def _set_all(table: list[_T], values: Iterable[int], to: _T) -> None:
    for value in values:
        table[value] = to


def _worth_keeping(
    graph: Graph, groups: dict[int, list[int]], actions: Sequence[int], result: Simulation
) -> list[list[int]]:
    """What is rebuilt, an operation's results together, most seconds per byte first."""
    worth = []
    for op, group in groups.items():
        dropped = [value for value in group if actions[value] == REBUILD]
        if dropped and result.replays[op]:
            seconds = graph.op_seconds[op] * result.replays[op]
            worth.append((seconds / max(1, _held_bytes(graph, dropped)), dropped))
    return [dropped for _, dropped in sorted(worth, reverse=True)]


def _held_bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum([graph.held_bytes[value] for value in values])


def anneal(
    simulator: Simulator,
    actions: Sequence[int],
    segments: Segments,
    budget_bytes: int,
    *,
    evaluations: int,
    seed: int = 0,
) -> list[int] | None:
    """Flip and exchange keep bits at a falling temperature; the fastest plan seen that fits, or
    None if none did.
    """
    search = _Annealing(simulator, actions, segments, budget_bytes, seed)
    start_seconds = search.result.extra_seconds
    if len(search.groups) < 2 or start_seconds <= 0:
        return search.best
    hot, cold = 0.2 * start_seconds, 0.002 * start_seconds
    for step in range(evaluations):
        done = step / evaluations
        search.try_a_move(temperature=hot * (cold / hot) ** done, dearer=_DEARER**done)
    return search.best


class _Annealing:
    """The current plan, the best one so far, and the moves from one to the next."""

    def __init__(
        self,
        simulator: Simulator,
        actions: Sequence[int],
        segments: Segments,
        budget_bytes: int,
        seed: int,
    ) -> None:
        graph = simulator.graph
        self.simulator, self.segments, self.budget_bytes = simulator, segments, budget_bytes
        self.random = random.Random(seed)
        # All results of an operation together: keeping one of two saves nothing.
        by_op = choices_by_operation(graph)
        self.groups = list(by_op.values())
        self.neighbours = _neighbours(graph, list(by_op))
        self.sizes = [_held_bytes(graph, group) for group in self.groups]
        self.current = list(actions)
        self.result = simulator.run(self.current, segments)
        fits = self.result.peak_bytes <= budget_bytes
        self.best = list(self.current) if fits else None
        # The best plan's seconds and bytes. A plan of infinite seconds is none, unless the search
        # began with it.
        self.least = (self.result.extra_seconds, self.result.peak_bytes) if fits else (math.inf, 0)
        # A byte too many costs some times what a byte saved has cost so far, and in the end many
        # times that.
        dearest = max(self.result.extra_seconds, sum(graph.op_seconds) / 4)
        self.price = 4.0 * dearest / max(1, sum(self.sizes))
        # Small graphs, and cold searches, come by the same plans again and again.
        self.simulated: dict[bytes, Simulation] = {}

    def try_a_move(self, temperature: float, dearer: float) -> None:
        """Change the plan; what is worse stays only by chance, and the less likely the colder it
        is.
        """
        before = self.flip(self.choose_groups())
        trial = self.simulate_current()
        loss = self.cost(trial, dearer) - self.cost(self.result, dearer)
        if loss <= 0 or self.random.random() < math.exp(-loss / temperature):
            self.result = trial
            self.remember_if_best(trial)
        else:
            for value, action in before:
                self.current[value] = action

    def simulate_current(self) -> Simulation:
        plan = bytes(self.current)
        if plan not in self.simulated:
            self.simulated[plan] = self.simulator.run(self.current, self.segments)
        return self.simulated[plan]

    def cost(self, of: Simulation, dearer: float) -> float:
        return of.extra_seconds + dearer * self.price * max(0, of.peak_bytes - self.budget_bytes)

    def remember_if_best(self, result: Simulation) -> None:
        if (
            result.peak_bytes <= self.budget_bytes
            and (result.extra_seconds, result.peak_bytes) < self.least
        ):
            self.best, self.least = list(self.current), (result.extra_seconds, result.peak_bytes)

    def choose_groups(self) -> list[int]:
        """One group by chance, and those that are to change with it."""
        one = self.random.choice(range(len(self.groups)))
        move = self.random.random()
        # move the cut: keep what a value is made of, or what is made of it, instead of it
        if move < 0.3:
            after, before = self.neighbours[one]
            return [one, *self.unlike(one, after if move < 0.15 else before)]
        if move < 0.8:
            return [one, *self.in_exchange(one)]
        return [one]

    def in_exchange(self, one: int) -> list[int]:
        """Groups whose bytes are given up for this one's, or the other way round: one for one or
        one for several.
        """
        partners = self.unlike(one, range(len(self.groups)))
        self.random.shuffle(partners)
        owed = self.sizes[one] if self.random.random() < 0.5 else 1
        chosen = []
        for number in partners[:8]:
            chosen.append(number)
            owed -= self.sizes[number]
            if owed <= 0:
                break
        return chosen

    def unlike(self, one: int, others: Iterable[int]) -> list[int]:
        """Those of the others that are rebuilt if this one is kept, or kept if it is rebuilt."""
        return [number for number in others if self.is_kept(number) != self.is_kept(one)]

    def is_kept(self, number: int) -> bool:
        return self.current[self.groups[number][0]] == KEEP

    def flip(self, numbers: list[int]) -> list[tuple[int, int]]:
        """Keep what was rebuilt and rebuild what was kept; gives each value's action before."""
        before = []
        for number in numbers:
            action = REBUILD if self.is_kept(number) else KEEP
            for value in self.groups[number]:
                before.append((value, self.current[value]))
                self.current[value] = action
        return before


def choices_by_operation(graph: Graph) -> dict[int, list[int]]:
    """By operation, the values whose keep bit can matter: needed or on the way to one that is, and
    not there anyway.
    """
    needed, there_anyway = _needed(graph), _there_anyway(graph)
    groups: dict[int, list[int]] = {}
    for value, op in enumerate(graph.producer):
        if value in graph.fixed:  # by name
            continue
        if needed[value] and not there_anyway[value] and _can_be_replayed(graph, op):
            groups.setdefault(op, []).append(value)
    return groups


def _can_be_replayed(graph: Graph, op: int) -> bool:
    return op >= 0 and graph.op_replayable[op]


def _needed(graph: Graph) -> list[bool]:
    """Whether backward needs a value, or something that could be rebuilt from it."""
    needed = [last >= 0 for last in graph.last_need]
    for op in range(len(graph.op_inputs) - 1, -1, -1):
        if any(needed[value] for value in graph.op_outputs[op]):
            _set_all(needed, graph.op_inputs[op], True)
    return needed


def _there_anyway(graph: Graph) -> list[bool]:
    """Whether there is no choice for a value: held by the caller, not to be kept, or of no
    bytes.
    """
    flags = zip(graph.survives, graph.unkeepable, graph.held_bytes, strict=True)
    return [survives or unkeepable or not size for survives, unkeepable, size in flags]


def _neighbours(graph: Graph, ops: list[int]) -> list[tuple[list[int], list[int]]]:
    """For each group, the groups that are made from it, and those that it is made from."""
    place = {op: number for number, op in enumerate(ops)}
    return [
        (_in_order(place, _readers(graph, op)), _in_order(place, _makers(graph, op))) for op in ops
    ]


def _in_order(place: Mapping[int, int], operations: Iterable[int]) -> list[int]:
    return sorted(place[op] for op in {*operations} & place.keys())


def _readers(graph: Graph, op: int) -> list[int]:
    return [reader for value in graph.op_outputs[op] for reader in graph.consumers[value]]


def _makers(graph: Graph, op: int) -> list[int]:
    return [graph.producer[value] for value in graph.op_inputs[op]]
