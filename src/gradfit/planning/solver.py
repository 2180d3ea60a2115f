"""The fast solver: menus for pieces, a chain of pieces by dynamic programming, then local search on
the simulator.

Papers: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains" (rotor, 2019) for the chain; Picard 1976 for the min-cut inside a piece; Griewank & Walther,
"Revolve" (2000) for segments inside segments; Jain et al., "Checkmate" (2020) for what the exact
optimum is.

Bound reached: on random and real graphs of up to 60 operations within a few per cent of the exact
optimum on average (tests/planning/test_exact.py asserts 1.05 on average and 1.2 at worst). Every
plan it returns has been simulated and stays below the budget; there is no bound proven for large
graphs.

Weaknesses, honestly: pieces that look alike share one menu, made for their mean seconds. Nested
segments are split by halves and square roots, not where Revolve's recurrence would. Values that
cross many cuts (a U-Net's skips) are kept unless local search drops them. Local search has time for
a few hundred simulations on a graph of a thousand operations and for a dozen on one of ten
thousand, where the result is the chain's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from gradfit.planning.chain import best_chain
from gradfit.planning.local_search import anneal, fill
from gradfit.planning.min_cut import PricedCut
from gradfit.planning.piece_options import Option, Way, menu, ways
from gradfit.planning.pieces import Anatomy, find_cuts, keep_needed
from gradfit.planning.simulate import KEEP, Segments, Simulation, Simulator
from gradfit.profiling.step_graph import Graph

_MOST_UNITS = 200
_FLAT_SPANS = (1, 2, 3, 4, 6, 8, 12)  # units that a piece may have
_NESTED_SPANS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_LONGEST_NESTED = 1500  # operations
_MEDIUM = 300  # operations up to which nested segments are tried where flat ones would do
_KEPT_CUTS = (0, 1, 3)
_ANNEALED = 100  # operations up to which local search is worth its time


Effort = Literal["glance", "chain", "fill", "anneal"]
Book = dict[tuple[int, ...], list[Way]]  # by whether nested, and the cuts of the piece


@dataclass(frozen=True)
class Solution:
    """A choice and what the simulator says of it."""

    actions: tuple[int, ...]
    segments: Segments
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def extra_seconds(self) -> float:
        return self.simulation.extra_seconds


class FastSolver:
    """Plans for one graph; menus are made once, so that many budgets cost little more than one.

    Solvers of one profile at several micro-batch sizes share a `book`: what is worth doing with a
    piece at one size is worth looking at for the others, and finding it takes longer than to see
    what it costs.
    """

    def __init__(self, graph: Graph, book: Book | None = None) -> None:
        self.graph = graph
        self.simulator = Simulator(graph)
        self.plain = self._plain()
        self._anatomy = Anatomy(graph)
        self._cuts = find_cuts(graph, most=_MOST_UNITS)
        self._units = [self._anatomy.kind(start, end) for start, end in pairwise(self._cuts)]
        self._mean_seconds = self._seconds_by_kind()
        # menus are many where nothing repeats
        self._hull_units = 4 if len(self._mean_seconds) <= 12 else 2
        self._menus: dict[tuple[int, int, bool], tuple[list[Option], int]] = {}
        self._alike: dict[tuple[object, ...], list[Option]] = {}
        self._book: Book = {} if book is None else book
        self._networks: dict[int, PricedCut] = {}
        self._at_prices: dict[tuple[int, float], Solution] = {}
        self._smallest: Solution | None = None
        densities = [s / b for s, b in self._seconds_and_bytes() if s > 0 and b > 0]
        self._cheapest_price = min(densities, default=1.0) / 2
        self._dearest_price = max(densities, default=1.0) * 100

    def solve(self, budget_bytes: int, *, effort: Effort = "anneal") -> Solution | None:
        """The fastest plan found whose simulated peak is at most the budget, or None.

        With less `effort` the chain's plan as it is, or with the room filled that it leaves; or
        about that plan.
        """
        if self.plain.peak_bytes <= budget_bytes:
            return self.plain
        if effort == "glance":
            found = _fastest(
                [self._fitted(budget_bytes, nested=False, tries=2), *self._priced(budget_bytes)]
            )
            return found or self._fitted(budget_bytes, nested=True, tries=2)
        starts = [self._fitted(budget_bytes, nested=False), _fastest(self._priced(budget_bytes))]
        # Segments inside segments replay more than once: not worth looking at while little is
        # replayed at all.
        best = _fastest(starts)
        share = 0.6 if len(self.graph.op_inputs) <= _MEDIUM else 0.95
        if best is None or best.extra_seconds > share * sum(self.graph.op_seconds):
            starts.append(self._fitted(budget_bytes, nested=True))
            if _fastest(starts) is None and self.smallest().peak_bytes <= budget_bytes:
                starts.append(self.smallest())
        if effort == "chain":
            return _fastest(starts)
        filled = _fastest(
            [self._filled(start, budget_bytes) for start in starts if start is not None]
        )
        return (
            self._annealed(filled, budget_bytes)
            if filled is not None and effort == "anneal"
            else filled
        )

    def _plain(self) -> Solution:
        """Everything kept, which is not recorded: where plain autograd needs less than a recording
        does, by that.
        """
        graph, flat = self.graph, Segments([0] * len(self.graph.nbytes))
        if graph.plain_needs is None:
            return self._simulated(keep_needed(graph), flat)
        actions = (KEEP,) * len(graph.nbytes)
        unrecorded = replace(graph, node_needs=graph.plain_needs)
        return Solution(actions, flat, Simulator(unrecorded).run(actions, flat))

    def _priced(self, budget_bytes: int) -> list[Solution]:
        """One price per byte for the whole graph, with what crosses every n-th cut kept to bound
        the burst.
        """
        found = []
        for every in _KEPT_CUTS:
            low, high = self._cheapest_price, self._dearest_price
            for _ in range(8):
                price = math.sqrt(low * high)
                trial = self._at_price(every, price)
                if trial.peak_bytes <= budget_bytes and math.isfinite(trial.extra_seconds):
                    found.append(trial)
                    high = price
                else:
                    low = price
        return found

    def _at_price(self, every: int, price: float) -> Solution:
        # budgets close to each other ask for the same prices
        if (every, price) not in self._at_prices:
            if every not in self._networks:
                self._networks[every] = PricedCut(self.graph, self._crossing(every))
            actions = self._networks[every].at(price)
            self._at_prices[every, price] = self._simulated(actions, Segments([0] * len(actions)))
        return self._at_prices[every, price]

    def _crossing(self, every: int) -> set[int]:
        """What crosses every n-th cut (0: none), and what is there anyway."""
        graph, last = self.graph, self._anatomy.last
        cuts = self._cuts[every:-1:every] if every else []
        return {
            value
            for value, op in enumerate(graph.producer)
            if op >= 0
            and not graph.overwritten[value]
            and (
                self._anatomy.survives[value]
                or bisect_right(cuts, op) < bisect_right(cuts, last[value])
            )
        }

    def _fitted(self, budget_bytes: int, *, nested: bool, tries: int = 6) -> Solution | None:
        """Move the chain's limit, which is not quite the simulator's peak, until the plan just
        fits.
        """
        best: Solution | None = None
        limit = float(budget_bytes - self.graph.static_bytes)
        low, high = 0.0, math.inf
        for _ in range(tries):
            found = self._chain(limit, nested=nested)
            if found is None:
                if math.isinf(high):
                    # nothing at the budget itself: more room on paper will not help the simulator
                    return best
                low = limit
            elif found.peak_bytes <= budget_bytes:
                low = limit
                if best is None or found.extra_seconds < best.extra_seconds:
                    best = found
                if budget_bytes - found.peak_bytes < 0.005 * limit:
                    break
            else:
                high = limit
            if not math.isinf(high):
                limit = (low + high) / 2
            elif found is not None:
                limit += max(1.0, budget_bytes - found.peak_bytes)
        return best

    def smallest(self) -> Solution:
        """The plan of the smallest peak found, whatever its seconds."""
        if self._smallest is None:
            best = self.plain
            low, high = 0.0, float(best.peak_bytes - self.graph.static_bytes)
            while high - low > 0.01 * high:
                limit = (low + high) / 2
                found = self._chain(limit, nested=True)
                if found is None:
                    low = limit
                    continue
                high = limit
                best = min(best, found, key=lambda s: (s.peak_bytes, s.extra_seconds))
            self._smallest = best
        return self._smallest

    def _spans(self, start: int, *, nested: bool) -> list[int]:
        last = len(self._cuts) - 1
        ends = {
            start + length
            for length in (_NESTED_SPANS if nested else _FLAT_SPANS)
            if start + length <= last
        }
        if nested:
            ends = {
                end
                for end in ends
                if end == start + 1 or self._cuts[end] - self._cuts[start] <= _LONGEST_NESTED
            }
        return sorted(ends | {last}) if start == 0 else sorted(ends)

    def _menu(self, start: int, stop: int, *, nested: bool) -> tuple[list[Option], int]:
        key = (start, stop, nested)
        if key not in self._menus:
            units = self._units[start:stop]
            base = min(around for _, around in units)
            alike = (nested, *((kind, around - base) for kind, around in units))
            first, end = self._cuts[start], self._cuts[stop]
            usual = [seconds for kind, _ in units for seconds in self._mean_seconds[kind]]
            if alike not in self._alike:
                piece = self._anatomy.piece(first, end, usual)
                place = (nested, *self._cuts[start : stop + 1])
                if place not in self._book:
                    cuts = [cut - first for cut in place[1:]]
                    self._book[place] = ways(
                        piece, cuts, nested=nested, hull_units=self._hull_units
                    )
                options = self._alike[alike] = menu(piece, self._book[place])
                self._book[place] = [(option.actions, option.segments) for option in options]
            # The menu is for all pieces alike; the seconds are this one's.
            differs = np.array(self.graph.op_seconds[first:end]) - usual
            self._menus[key] = (
                [
                    replace(o, seconds=o.seconds + float(differs @ o.replays))
                    for o in self._alike[alike]
                ],
                base,
            )
        return self._menus[key]

    def _chain(self, limit_bytes: float, *, nested: bool) -> Solution | None:
        spans, menu_of = partial(self._spans, nested=nested), partial(self._menu, nested=nested)
        chain = best_chain(len(self._cuts), spans, menu_of, limit_bytes)
        if chain is None:
            return None
        actions = [KEEP] * len(self.graph.nbytes)
        segment_of = [0] * len(actions)
        parent = [-1]
        for start, stop, option in chain:
            values = [
                v
                for op in range(self._cuts[start], self._cuts[stop])
                for v in self.graph.op_outputs[op]
            ]
            for index, value in enumerate(values):
                actions[value] = option.actions[index]
            if option.segments is not None:
                shift = len(parent) - 1
                for index, value in enumerate(values):
                    segment = option.segments.of[index]
                    segment_of[value] = segment + shift if segment else 0
                parent += [p + shift if p > 0 else 0 for p in option.segments.parent[1:]]
        found = self._simulated(actions, Segments(segment_of, parent))
        # it would replay what cannot be replayed
        return found if math.isfinite(found.extra_seconds) else None

    def _seconds_by_kind(self) -> dict[int, list[float]]:
        """The mean over the units of a kind: one measurement of a short operation says little."""
        found: dict[int, list[list[float]]] = {}
        for (kind, _), (start, end) in zip(self._units, pairwise(self._cuts), strict=True):
            found.setdefault(kind, []).append(self.graph.op_seconds[start:end])
        return {
            kind: [float(mean) for mean in np.mean(rows, axis=0)] for kind, rows in found.items()
        }

    def _seconds_and_bytes(self) -> list[tuple[float, int]]:
        graph = self.graph
        return [
            (graph.op_seconds[op], graph.held_bytes[value])
            for value, op in enumerate(graph.producer)
            if op >= 0 and graph.last_need[value] >= 0
        ]

    def _simulated(self, actions: Sequence[int], segments: Segments) -> Solution:
        return Solution(tuple(actions), segments, self.simulator.run(actions, segments))

    def _filled(self, solution: Solution, budget_bytes: int) -> Solution:
        evaluations = max(10, min(400, 80_000 // len(self.graph.op_inputs)))
        actions = fill(
            self.simulator,
            solution.actions,
            solution.segments,
            budget_bytes,
            evaluations=evaluations,
        )
        return self._simulated(actions, solution.segments)

    def _annealed(self, best: Solution, budget_bytes: int) -> Solution:
        operations = len(self.graph.op_inputs)
        if operations > _ANNEALED:
            return best
        # Nested segments were the chain's choice; a keep-set without them is often faster where it
        # fits at all.
        tries, chosen = min(2000, 100_000 // operations), best.segments
        for seed, tree in enumerate((chosen, Segments([0] * len(best.actions)), chosen)):
            found = anneal(
                self.simulator, best.actions, tree, budget_bytes, evaluations=tries, seed=seed
            )
            if found is not None:
                found = fill(self.simulator, found, tree, budget_bytes, evaluations=100)
                best = min(
                    best,
                    self._simulated(found, tree),
                    key=lambda s: (s.extra_seconds, s.peak_bytes),
                )
        return best


def _fastest(solutions: Sequence[Solution | None]) -> Solution | None:
    found = [solution for solution in solutions if solution is not None]
    return min(found, key=lambda s: (s.extra_seconds, s.peak_bytes), default=None)


def solve_fast(graph: Graph, budget_bytes: int) -> Solution | None:
    """The fastest plan found for this budget, or None if none was."""
    return FastSolver(graph).solve(budget_bytes)


def min_peak(graph: Graph) -> Solution:
    """The plan with the smallest peak that can be reached."""
    return FastSolver(graph).smallest()
