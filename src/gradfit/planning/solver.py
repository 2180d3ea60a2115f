"""The fast solver: menus for pieces, a chain of pieces by dynamic programming, then local search on
the simulator.

Papers: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains" (rotor, 2019, https://arxiv.org/abs/1911.13214) for the chain; Picard 1976
(https://doi.org/10.1287/mnsc.22.11.1268) for the min-cut inside a piece; Griewank & Walther,
"Revolve" (2000, https://doi.org/10.1145/347837.347846) for segments inside segments; Jain et al.,
"Checkmate" (2020, https://arxiv.org/abs/1910.02653) for what the exact optimum is.

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

    @property
    def can_be_run(self) -> bool:
        """Whether it replays only what can be replayed."""
        return math.isfinite(self.simulation.extra_seconds)


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
            return self._at_a_glance(budget_bytes)
        starts = self._starts(budget_bytes)
        if effort == "chain":
            return _fastest(starts)
        filled = _fastest([self._filled(start, budget_bytes) for start in starts])
        if filled is None or effort == "fill":
            return filled
        return self._annealed(filled, budget_bytes)

    def _at_a_glance(self, budget_bytes: int) -> Solution | None:
        flat = self._fitted(budget_bytes, nested=False, tries=2)
        fastest = _fastest([*_there(flat), *self._priced(budget_bytes)])
        return fastest or self._fitted(budget_bytes, nested=True, tries=2)

    def _starts(self, budget_bytes: int) -> list[Solution]:
        """Plans to begin a local search with: the chain's, the best at one price, and where these
        replay much, nested ones.
        """
        starts = [
            *_there(self._fitted(budget_bytes, nested=False)),
            *_there(_fastest(self._priced(budget_bytes))),
        ]
        if self._may_replay_more(_fastest(starts)):
            starts += _there(self._fitted(budget_bytes, nested=True))
            if not starts and self.smallest().peak_bytes <= budget_bytes:
                return [self.smallest()]
        return starts

    def _may_replay_more(self, best: Solution | None) -> bool:
        """Segments inside segments replay more than once: not worth looking at while little is
        replayed at all.
        """
        if best is None:
            return True
        share = 0.6 if len(self.graph.op_inputs) <= _MEDIUM else 0.95
        return best.extra_seconds > share * sum(self.graph.op_seconds)

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
        return [fit for every in _KEPT_CUTS for fit in self._near_the_price(every, budget_bytes)]

    def _near_the_price(self, every: int, budget_bytes: int) -> list[Solution]:
        """Plans that fit, at prices closer and closer to the least at which one does."""
        fits = []
        low, high = self._cheapest_price, self._dearest_price
        for _ in range(8):
            price = math.sqrt(low * high)
            trial = self._at_price(every, price)
            if trial.peak_bytes <= budget_bytes and trial.can_be_run:
                fits.append(trial)
                high = price
            else:
                low = price
        return fits

    def _at_price(self, every: int, price: float) -> Solution:
        # budgets close to each other ask for the same prices
        if (every, price) not in self._at_prices:
            actions = self._network(every).at(price)
            self._at_prices[every, price] = self._simulated(actions, Segments([0] * len(actions)))
        return self._at_prices[every, price]

    def _network(self, every: int) -> PricedCut:
        if every not in self._networks:
            self._networks[every] = PricedCut(self.graph, self._crossing(every))
        return self._networks[every]

    def _crossing(self, every: int) -> set[int]:
        """What crosses every n-th cut (0: none), and what is there anyway."""
        graph, last, survives = self.graph, self._anatomy.last, self._anatomy.survives
        cuts = self._cuts[every:-1:every] if every else []

        def crosses(value: int) -> bool:
            return bisect_right(cuts, graph.producer[value]) < bisect_right(cuts, last[value])

        can_be_kept = [value for value, keepable in enumerate(graph.keepable) if keepable]
        return {value for value in can_be_kept if survives[value] or crosses(value)}

    def _fitted(self, budget_bytes: int, *, nested: bool, tries: int = 6) -> Solution | None:
        """Move the chain's limit, which is not quite the simulator's peak, until the plan just
        fits.
        """
        best: Solution | None = None
        limit = _ChainLimit(float(budget_bytes - self.graph.static_bytes))
        for _ in range(tries):
            trial = self._chain(limit.now, nested=nested)
            spare = None if trial is None else budget_bytes - trial.peak_bytes
            if trial is None or spare is None:
                if limit.never_broken:
                    # nothing at the budget itself: more room on paper will not help the simulator
                    return best
            elif spare >= 0:
                best = _fastest([*_there(best), trial])
                if spare < 0.005 * limit.now:
                    return best
            limit.move(spare)
        return best

    def smallest(self) -> Solution:
        """The plan of the smallest peak found, whatever its seconds."""
        if self._smallest is None:
            self._smallest = self._search_smallest()
        return self._smallest

    def _search_smallest(self) -> Solution:
        best = self.plain
        low, high = 0.0, float(best.peak_bytes - self.graph.static_bytes)
        while high - low > 0.01 * high:
            limit = (low + high) / 2
            trial = self._chain(limit, nested=True)
            if trial is None:
                low = limit
                continue
            high = limit
            best = min(best, trial, key=lambda s: (s.peak_bytes, s.extra_seconds))
        return best

    def _spans(self, start: int, *, nested: bool) -> list[int]:
        last = len(self._cuts) - 1
        lengths = _NESTED_SPANS if nested else _FLAT_SPANS
        ends = {start + length for length in lengths if start + length <= last}
        if nested:
            ends = {end for end in ends if self._may_be_nested(start, end)}
        return sorted(ends | {last}) if start == 0 else sorted(ends)

    def _may_be_nested(self, start: int, end: int) -> bool:
        return end == start + 1 or self._cuts[end] - self._cuts[start] <= _LONGEST_NESTED

    def _menu(self, start: int, stop: int, *, nested: bool) -> tuple[list[Option], int]:
        key = (start, stop, nested)
        if key not in self._menus:
            self._menus[key] = self._make_menu(start, stop, nested=nested)
        return self._menus[key]

    def _make_menu(self, start: int, stop: int, *, nested: bool) -> tuple[list[Option], int]:
        """The menu for all pieces alike, with the seconds of this one."""
        units = self._units[start:stop]
        base = min(around for _, around in units)
        alike = (nested, *((kind, around - base) for kind, around in units))
        usual = [seconds for kind, _ in units for seconds in self._mean_seconds[kind]]
        if alike not in self._alike:
            self._alike[alike] = self._options(start, stop, usual, nested=nested)
        own = self.graph.op_seconds[self._cuts[start] : self._cuts[stop]]
        differs = np.array(own) - usual
        menu = [
            replace(option, seconds=option.seconds + float(differs @ option.replays))
            for option in self._alike[alike]
        ]
        return menu, base

    def _options(self, start: int, stop: int, usual: list[float], *, nested: bool) -> list[Option]:
        cuts = self._cuts[start : stop + 1]
        piece = self._anatomy.piece(cuts[0], cuts[-1], usual)
        place = (nested, *cuts)
        if place not in self._book:
            units = [cut - cuts[0] for cut in cuts]
            self._book[place] = ways(piece, units, nested=nested, hull_units=self._hull_units)
        options = menu(piece, self._book[place])
        self._book[place] = [(option.actions, option.segments) for option in options]
        return options

    def _chain(self, limit_bytes: float, *, nested: bool) -> Solution | None:
        spans, menu_of = partial(self._spans, nested=nested), partial(self._menu, nested=nested)
        chain = best_chain(len(self._cuts), spans, menu_of, limit_bytes)
        if chain is None:
            return None
        whole = _Joined(self.graph)
        for start, stop, option in chain:
            whole.add(self._cuts[start], self._cuts[stop], option)
        joined = self._simulated(whole.actions, Segments(whole.segment_of, whole.parent))
        return joined if joined.can_be_run else None

    def _seconds_by_kind(self) -> dict[int, list[float]]:
        """The mean over the units of a kind: one measurement of a short operation says little."""
        units: dict[int, list[list[float]]] = {}
        for (kind, _), (start, end) in zip(self._units, pairwise(self._cuts), strict=True):
            units.setdefault(kind, []).append(self.graph.op_seconds[start:end])
        return {kind: np.mean(seconds, axis=0).tolist() for kind, seconds in units.items()}

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
            actions = anneal(
                self.simulator, best.actions, tree, budget_bytes, evaluations=tries, seed=seed
            )
            if actions is not None:
                actions = fill(self.simulator, actions, tree, budget_bytes, evaluations=100)
                best = min(best, self._simulated(actions, tree), key=_order)
        return best


class _ChainLimit:
    """Bisection for the limit at which the chain's plan just fits, upwards for as long as all
    fit.
    """

    def __init__(self, bytes_: float) -> None:
        self.now, self._low, self._high = bytes_, 0.0, math.inf

    @property
    def never_broken(self) -> bool:
        """No limit so far was too much."""
        return math.isinf(self._high)

    def move(self, spare: int | None) -> None:
        """Go on from a limit whose plan leaves so many bytes of the budget; None: it has no
        plan.
        """
        if spare is not None and spare < 0:
            self._high = self.now
        else:
            self._low = self.now
        if not self.never_broken:
            self.now = (self._low + self._high) / 2
        elif spare is not None:
            self.now += max(1.0, spare)


class _Joined:
    """Options of pieces side by side, as one plan for the whole graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.actions = [KEEP] * len(graph.nbytes)
        self.segment_of = [0] * len(graph.nbytes)
        self.parent = [-1]

    def add(self, first: int, end: int, option: Option) -> None:
        values = [v for outputs in self.graph.op_outputs[first:end] for v in outputs]
        for index, value in enumerate(values):
            self.actions[value] = option.actions[index]
        if option.segments is not None:
            self._add_segments(values, option.segments)

    def _add_segments(self, values: list[int], segments: Segments) -> None:
        """A piece's segments get numbers of their own; its root is everybody's."""
        shift = len(self.parent) - 1
        for index, value in enumerate(values):
            segment = segments.of[index]
            self.segment_of[value] = segment + shift if segment else 0
        self.parent += [p + shift if p > 0 else 0 for p in segments.parent[1:]]


def _order(solution: Solution) -> tuple[float, int]:
    return solution.extra_seconds, solution.peak_bytes


def _fastest(solutions: Sequence[Solution]) -> Solution | None:
    return min(solutions, key=_order, default=None)


def _there(solution: Solution | None) -> list[Solution]:
    return [] if solution is None else [solution]
