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
segments begin and end at cuts, and inside a unit they are split by halves. Values that cross many
cuts (a U-Net's skips) are kept unless local search drops them. Local search has time for a few
hundred simulations on a graph of a thousand operations and for a dozen on one of ten thousand,
where the result is the chain's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Literal

import numpy as np

from gradfit.planning.chain import Around, best_chain
from gradfit.planning.local_search import anneal, drop_to_fit, fill, hold_longer, move_instead
from gradfit.planning.menu_search import with_changed_options
from gradfit.planning.min_cut import PricedCut
from gradfit.planning.nested_ways import nested_ways
from gradfit.planning.offload_windows import may_move, moved_from_the_start
from gradfit.planning.piece_options import Option, Way, flat_ways, options, prune, unit_ways
from gradfit.planning.pieces import Anatomy, Piece, find_cuts, keep_needed, together
from gradfit.planning.simulate import KEEP, Segments, Simulation, Simulator
from gradfit.profiling.step_graph import Graph

_MOST_UNITS = 200
_FLAT_SPANS = (1, 2, 3, 4, 6, 8, 12)  # units that a piece may have
_NESTED_SPANS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_LONGEST_NESTED = 1500  # operations
_MEDIUM = 300  # operations up to which nested segments are tried where flat ones would do
_SHORT = 48  # operations up to which a nested piece's options are changed, one place at a time
_CHANGED = 160_000  # operations simulated for that at most, for each length that pieces have,
_CHANGED_PER_OPERATION = 640  # and less for a small graph,
_LARGE = 200  # or for one of more operations, of which the longer pieces take the time
_LITTLE_ABOVE = 0.03  # of the bytes that a plan may use
_DROPS = 3  # values that are rebuilt after all, where a nested plan is a little above the budget
_KEPT_CUTS = (0, 1, 3)  # what crosses is kept: at no cut, at each, at every third
_PRICES = 8  # steps between those at which what is rebuilt beside moving is looked for
_ANNEALED = 100  # operations up to which local search is worth its time


Effort = Literal["price", "glance", "chain", "fill", "anneal"]
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
        self._menus: dict[tuple[int, int, bool], tuple[list[Option], Around]] = {}
        self._alike: dict[tuple[object, ...], list[Option]] = {}
        self._book: Book = {} if book is None else book
        self._networks: dict[int, PricedCut] = {}
        self._at_prices: dict[tuple[int, float], Solution] = {}
        self._smallest: Solution | None = None
        self._unmoved: list[Sequence[int]] | None = None
        # Below the lowest density everything is kept; far above the highest all that can go is
        # dropped, chains of operations too, whose seconds add up. Prices are searched in between.
        densities = self._seconds_per_byte()
        self._cheapest_price = min(densities, default=1.0) / 2
        self._dearest_price = max(densities, default=1.0) * 100

    def solve(self, budget_bytes: int, *, effort: Effort = "anneal") -> Solution | None:
        """The fastest plan found whose simulated peak is at most the budget, or None.

        With less `effort` the chain's plan as it is, or with the room filled that it leaves; or
        about that plan; or the best at one price for every byte, if one fits.
        """
        if self.plain.peak_bytes <= budget_bytes:
            return self.plain
        if budget_bytes < self.simulator.least_peak_bytes:
            return None
        by_effort = {
            "price": self._fastest_priced,
            "glance": self._at_a_glance,
            "chain": self._fastest_start,
            "fill": self._fastest_filled,
            "anneal": self._fastest_annealed,
        }
        return by_effort[effort](budget_bytes)

    def _fastest_priced(self, budget_bytes: int) -> Solution | None:
        return _fastest(self._priced(budget_bytes))

    def _at_a_glance(self, budget_bytes: int) -> Solution | None:
        flat = self._fitted(budget_bytes, nested=False, tries=2)
        fastest = _fastest([*_there(flat), *self._priced(budget_bytes)])
        return fastest or self._fitted(budget_bytes, nested=True, tries=2)

    def _fastest_start(self, budget_bytes: int) -> Solution | None:
        return _fastest(self._starts(budget_bytes))

    def _fastest_filled(self, budget_bytes: int) -> Solution | None:
        return _fastest([self._filled(one, budget_bytes) for one in self._starts(budget_bytes)])

    def _fastest_annealed(self, budget_bytes: int) -> Solution | None:
        filled = self._fastest_filled(budget_bytes)
        return None if filled is None else self._annealed(filled, budget_bytes)

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
        # On a large graph menus of nested segments take seconds, so they wait until flat plans
        # replay nearly everything.
        share = 0.6 if len(self.graph.op_inputs) <= _MEDIUM else 0.95
        return best.extra_seconds > share * sum(self.graph.op_seconds)

    def _plain(self) -> Solution:
        """Everything kept but what was asked not to be, which is not recorded: where plain autograd
        needs less than a recording does, by that.
        """
        graph, flat = self.graph, Segments([0] * len(self.graph.nbytes))
        if graph.plain_needs is None or any(action != KEEP for action in graph.fixed.values()):
            return self._simulated(keep_needed(graph), flat)
        actions = (KEEP,) * len(graph.nbytes)
        unrecorded = replace(graph, node_needs=graph.plain_needs)
        return Solution(actions, flat, Simulator(unrecorded).run(actions, flat))

    def _priced(self, budget_bytes: int) -> list[Solution]:
        """One price per byte for the whole graph, with what crosses every n-th cut kept to bound
        the burst.
        """
        priced = [fit for every in _KEPT_CUTS for fit in self._near_the_price(every, budget_bytes)]
        return [*priced, *self._moved(budget_bytes)]

    def _moved(self, budget_bytes: int) -> list[Solution]:
        """Plans that move values out beside computation, where that is offered."""
        if not may_move(self.graph):
            return []
        found: list[Solution] = []

        def fits(actions: list[int]) -> bool:
            trial = self._simulated(actions, Segments([0] * len(actions)))
            if trial.peak_bytes > budget_bytes or not trial.can_be_run:
                return False
            found.append(trial)
            return True

        for actions in self._with_less_and_less_held():
            moved_from_the_start(self.simulator, actions, fits)
        return found

    def _with_less_and_less_held(self) -> list[Sequence[int]]:
        """Plans that move nothing out: all kept, and more and more rebuilt."""
        if self._unmoved is None:
            still = replace(self.graph, may_offload=False)
            network = PricedCut(still, self._crossing(0))
            ratio = self._dearest_price / self._cheapest_price
            prices = [self._cheapest_price * ratio ** (n / _PRICES) for n in range(1, _PRICES)]
            self._unmoved = [keep_needed(still), *map(network.at, prices)]
        return self._unmoved

    def _near_the_price(self, every: int, budget_bytes: int) -> list[Solution]:
        """Plans that fit, at prices closer and closer to the least at which one does."""
        fits = []
        low, high = self._cheapest_price, self._dearest_price
        for _ in range(8):
            price = math.sqrt(low * high)  # the middle in ratio: prices span powers of ten
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
        survives = self._anatomy.survives
        cuts = self._cuts[every:-1:every] if every else []
        can_be_kept = [value for value, keepable in enumerate(self.graph.keepable) if keepable]
        return {value for value in can_be_kept if survives[value] or self._crosses(value, cuts)}

    def _crosses(self, value: int, cuts: Sequence[int]) -> bool:
        """Whether a value is made before one of the cuts and read after it."""
        made, last = self.graph.producer[value], self._anatomy.last[value]
        return bisect_right(cuts, made) < bisect_right(cuts, last)

    def _fitted(self, budget_bytes: int, *, nested: bool, tries: int = 6) -> Solution | None:
        """Move the chain's limit, which is not quite the simulator's peak, until the plan just
        fits.
        """
        fits: list[Solution] = []
        above: list[Solution] = []
        limit = _ChainLimit(float(budget_bytes - self.graph.static_bytes))
        for _ in range(tries):
            trial = self._chain(limit.now, nested=nested)
            spare = None if trial is None else budget_bytes - trial.peak_bytes
            if trial is not None and trial.peak_bytes <= budget_bytes:
                fits.append(trial)
            elif trial is not None:
                above.append(trial)
            if limit.is_settled_by(spare):
                break
            limit.move(spare)
        # At little memory one option more or less is some per cent of the step.
        dropped = self._dropped_to_fit(above, budget_bytes) if nested else None
        return _fastest([*fits, *_there(dropped)])

    def _dropped_to_fit(self, above: Sequence[Solution], budget_bytes: int) -> Solution | None:
        """The fastest that two of these become when more is rebuilt until they fit: the fastest
        that is a little above the budget, and the nearest.
        """
        most = budget_bytes + _LITTLE_ABOVE * (budget_bytes - self.graph.static_bytes)
        little = [one for one in above if one.peak_bytes <= most]
        if not little:
            return None
        fastest, nearest = min(little, key=_order), min(little, key=lambda one: one.peak_bytes)
        chosen = [fastest] if nearest is fastest else [fastest, nearest]
        dropped = [
            drop_to_fit(self.simulator, one.actions, one.segments, budget_bytes, drops=_DROPS)
            for one in chosen
        ]
        return _fastest(
            [
                self._simulated(actions, one.segments)
                for actions, one in zip(dropped, chosen, strict=True)
                if actions is not None
            ]
        )

    def smallest(self) -> Solution:
        """The plan of the smallest peak found, whatever its seconds."""
        if self._smallest is None:
            self._smallest = self._search_smallest()
        return self._smallest

    def _search_smallest(self) -> Solution:
        best, static = self.plain, self.graph.static_bytes
        low, high = 0.0, float(best.peak_bytes - static)
        least = self.simulator.least_peak_bytes - static  # about which a search would end
        while high - low > 0.01 * high and best.peak_bytes - static > 1.003 * least:
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
        ends = self._nested_ends(start, last) if nested else _ends(start, last, _FLAT_SPANS)
        return sorted(ends | {last}) if start == 0 else sorted(ends)

    def _nested_ends(self, start: int, last: int) -> set[int]:
        ends = _ends(start, last, _NESTED_SPANS)
        return {end for end in ends if self._may_be_nested(start, end)}

    def _may_be_nested(self, start: int, end: int) -> bool:
        return end == start + 1 or self._cuts[end] - self._cuts[start] <= _LONGEST_NESTED

    def _menu(self, start: int, stop: int, *, nested: bool) -> tuple[list[Option], Around]:
        key = (start, stop, nested)
        if key not in self._menus:
            self._menus[key] = self._make_menu(start, stop, nested=nested)
        return self._menus[key]

    def _make_menu(self, start: int, stop: int, *, nested: bool) -> tuple[list[Option], Around]:
        """The menu for all pieces alike, with the seconds of this one."""
        units = self._units[start:stop]
        own = self.graph.op_seconds[self._cuts[start] : self._cuts[stop]]
        differs = np.array(own) - self._usual_seconds(units)
        alike = self._alike_options(start, stop, nested=nested)
        around = Around(self._anatomy.lingering[self._cuts[start]], _base(units))
        return [_with_seconds_of(option, differs) for option in alike], around

    def _alike_options(self, start: int, stop: int, *, nested: bool) -> list[Option]:
        units = self._units[start:stop]
        base = _base(units)
        alike = (nested, *((kind, None if own is None else own - base) for kind, own in units))
        if alike not in self._alike:
            usual = self._usual_seconds(units)
            self._alike[alike] = self._options(start, stop, usual, nested=nested)
        return self._alike[alike]

    def _usual_seconds(self, units: Sequence[tuple[int, int | None]]) -> list[float]:
        return [seconds for kind, _ in units for seconds in self._mean_seconds[kind]]

    def _options(self, start: int, stop: int, usual: list[float], *, nested: bool) -> list[Option]:
        cuts = self._cuts[start : stop + 1]
        piece = self._anatomy.piece(cuts[0], cuts[-1], usual)
        place = (nested, *cuts)
        others = self._alike_options(start, stop, nested=False) if nested else []
        is_new = place not in self._book
        if is_new:
            self._book[place] = self._ways(piece, start, stop, nested=nested)
        found = prune([*others, *options(piece, self._book[place])])
        if is_new and nested and len(piece.graph.op_inputs) <= _SHORT:
            found = with_changed_options(piece, found, self._changes())
        own = [option for option in found if not any(option is other for other in others)]
        self._book[place] = [(option.actions, option.segments) for option in own]
        return found

    def _changes(self) -> int:
        """Operations simulated for a piece: fewer where nothing repeats and many are looked at."""
        operations = len(self.graph.op_inputs)
        most = min(_CHANGED_PER_OPERATION * operations, _CHANGED, _CHANGED * _LARGE // operations)
        return most // max(8, len(self._mean_seconds))

    def _ways(self, piece: Piece, start: int, stop: int, *, nested: bool) -> list[Way]:
        units = stop - start
        if not nested:
            return flat_ways(piece, units=units, hull_units=self._hull_units)
        return unit_ways(piece) if units == 1 else self._nested_ways(piece, start, stop)

    def _nested_ways(self, piece: Piece, start: int, stop: int) -> list[Way]:
        units = [cut - self._cuts[start] for cut in self._cuts[start : stop + 1]]
        base = _base(self._units[start:stop])

        def part_menu(first: int, end: int) -> tuple[list[Option], int]:
            alike = self._alike_options(start + first, start + end, nested=True)
            return alike, _base(self._units[start + first : start + end]) - base

        flat = self._alike_options(start, stop, nested=False)
        most_bytes = max(option.peak_bytes for option in flat)
        return nested_ways(piece, units, _NESTED_SPANS, part_menu, most_bytes)

    def _chain(self, limit_bytes: float, *, nested: bool) -> Solution | None:
        spans, menu_of = partial(self._spans, nested=nested), partial(self._menu, nested=nested)
        pieces = best_chain(len(self._cuts), spans, menu_of, limit_bytes)
        if pieces is None:
            return None
        joined = self._joined(pieces)
        return joined if joined.can_be_run else None

    def _joined(self, pieces: Sequence[tuple[int, int, Option]]) -> Solution:
        whole = _Joined(self.graph)
        for start, stop, option in pieces:
            whole.add(self._cuts[start], self._cuts[stop], option)
        return self._simulated(whole.actions, Segments(whole.segment_of, whole.parent))

    def _seconds_by_kind(self) -> dict[int, list[float]]:
        """The mean over the units of a kind: one measurement of a short operation says little."""
        units: dict[int, list[list[float]]] = {}
        for (kind, _), (start, end) in zip(self._units, pairwise(self._cuts), strict=True):
            units.setdefault(kind, []).append(self.graph.op_seconds[start:end])
        return {kind: np.mean(seconds, axis=0).tolist() for kind, seconds in units.items()}

    def _seconds_per_byte(self) -> list[float]:
        """Of each value that a plan can trade, what its operation takes for a byte of it."""
        both = self._seconds_and_bytes()
        return [seconds / size for seconds, size in both if seconds > 0 and size > 0]

    def _seconds_and_bytes(self) -> list[tuple[float, int]]:
        graph = self.graph
        return [
            (graph.op_seconds[op], graph.held_bytes[value])
            for value, op in enumerate(graph.producer)
            if op >= 0 and graph.last_need[value] >= 0
        ]

    def _simulated(self, actions: Sequence[int], segments: Segments) -> Solution:
        actions = self.graph.with_fixed(actions)
        segments = together(self.graph, actions, segments)
        return Solution(actions, segments, self.simulator.run(actions, segments))

    def _filled(self, solution: Solution, budget_bytes: int) -> Solution:
        # Simulating takes 2 to 3 µs for each operation: some 0.2 s in all, whatever the graph.
        evaluations = max(10, min(400, 80_000 // len(self.graph.op_inputs)))
        actions = fill(
            self.simulator,
            solution.actions,
            solution.segments,
            budget_bytes,
            evaluations=evaluations,
        )
        if may_move(self.graph):
            actions = move_instead(
                self.simulator,
                actions,
                solution.segments,
                budget_bytes,
                evaluations=evaluations,
            )
        segments = together(self.graph, actions, solution.segments)
        if len(segments.parent) > 1:
            segments = hold_longer(
                self.simulator, actions, segments, budget_bytes, evaluations=evaluations // 3
            )
        return self._simulated(actions, segments)

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

    def is_settled_by(self, spare: int | None) -> bool:
        """Whether to stop at a limit whose plan leaves so many bytes of the budget (None: it has no
        plan).
        """
        if spare is None:
            # nothing at the budget itself: more room on paper will not help the simulator
            return self.never_broken
        return 0 <= spare < 0.005 * self.now

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
        values = list(chain.from_iterable(self.graph.op_outputs[first:end]))
        # the option's actions go on with values from before the piece
        for value, action in zip(values, option.actions, strict=False):
            self.actions[value] = action
        if option.segments is not None:
            self._add_segments(values, option.segments)

    def _add_segments(self, values: list[int], segments: Segments) -> None:
        """A piece's segments get numbers of their own; its root is everybody's."""
        shift = len(self.parent) - 1
        for value, segment in zip(values, segments.of, strict=False):
            self.segment_of[value] = _shifted(segment, shift)
        self.parent += [_shifted(parent, shift) for parent in segments.parent[1:]]


def _base(units: Sequence[tuple[int, int | None]]) -> int:
    """The least of the bytes of gradients that are around in the time of these units."""
    return min((around for _, around in units if around is not None), default=0)


def _shifted(segment: int, shift: int) -> int:
    return segment + shift if segment > 0 else 0


def _ends(start: int, last: int, lengths: Sequence[int]) -> set[int]:
    """The cuts at which pieces of these lengths end that start at a cut."""
    return {start + length for length in lengths if start + length <= last}


def _with_seconds_of(option: Option, differs: np.ndarray) -> Option:
    """The option in a piece whose operations take so much longer or shorter than is usual."""
    return replace(option, seconds=option.seconds + float(differs @ option.replays))


def _order(solution: Solution) -> tuple[float, int]:
    return solution.extra_seconds, solution.peak_bytes


def _fastest(solutions: Sequence[Solution]) -> Solution | None:
    return min(solutions, key=_order, default=None)


def _there(solution: Solution | None) -> list[Solution]:
    return [] if solution is None else [solution]
