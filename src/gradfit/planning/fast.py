"""The fast solver: menus for pieces, a chain of pieces by dynamic programming, then local search on the simulator.

Papers: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains" (rotor, 2019)
for the chain; Picard 1976 for the min-cut inside a piece; Griewank & Walther, "Revolve" (2000) for segments inside
segments; Jain et al., "Checkmate" (2020) for what the exact optimum is.

Bound reached: on random and real graphs of up to 60 operations within a few per cent of the exact optimum on average
(tests/planning/test_exact.py asserts 1.05 on average and 1.2 at worst). Every plan it returns has been simulated and
stays below the budget; there is no bound proven for large graphs.

Weaknesses, honestly: pieces that look alike share one menu, so a block whose operations were slower than its twins' is
treated like them. Nested segments are split by halves and square roots, not where Revolve's recurrence would. Values
that cross many cuts (a U-Net's skips) are kept unless local search drops them. Local search gets 600 simulations on a
small graph and fewer on a large one, so above a few thousand operations the result is the chain's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradfit.planning.chain import best_chain
from gradfit.planning.menus import Option, menu
from gradfit.planning.polish import anneal, fill
from gradfit.planning.simulate import KEEP, Segments, Simulation, simulate
from gradfit.planning.stages import Piece, cut_out, find_cuts, keep_needed, last_readers, node_owners, signature
from gradfit.profiling.graph import Graph

_ANNEALED = 100  # operations up to which local search is worth its time


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
    """Plans for one graph; menus are made once, so that many budgets cost little more than one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._last = last_readers(graph)
        self._owners = node_owners(graph)
        self._cuts = find_cuts(graph, most=200)
        self._menus: dict[tuple[int, int], list[Option]] = {}
        self._alike: dict[int, list[Option]] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._smallest: Solution | None = None
        self.plain = self._simulated(keep_needed(graph), Segments([0] * len(graph.nbytes)))

    def solve(self, budget_bytes: int, *, polish: bool = True) -> Solution | None:
        """The fastest plan found whose simulated peak is at most the budget, or None."""
        if self.plain.peak_bytes <= budget_bytes:
            return self.plain
        best: Solution | None = None
        room = budget_bytes - self.graph.static_bytes
        low, high, limit = 0.0, None, float(room)
        for _ in range(8):
            found = self._chain(limit)
            if found is not None and found.peak_bytes <= budget_bytes:
                if best is None or found.extra_seconds < best.extra_seconds:
                    best = found
                low = limit
            elif found is not None or high is None:
                high = limit
            else:
                high = limit if found is not None else high
                low = low if found is not None else limit
            if found is not None and found.peak_bytes <= budget_bytes < found.peak_bytes * 1.005:
                break
            if high is None:
                limit = limit + max(1.0, budget_bytes - found.peak_bytes) if found else limit * 1.5
            else:
                limit = (low + high) / 2
        smallest = self.smallest()
        if smallest.peak_bytes <= budget_bytes and (best is None or smallest.extra_seconds < best.extra_seconds):
            best = smallest
        if best is None:
            return None
        return self._polished(best, budget_bytes) if polish else best

    def smallest(self) -> Solution:
        """The plan of the smallest peak found, whatever its seconds."""
        if self._smallest is None:
            best = self.plain
            room = float(self.plain.peak_bytes - self.graph.static_bytes)
            low, high = 0.0, room
            for _ in range(10):
                limit = (low + high) / 2
                found = self._chain(limit)
                if found is None:
                    low = limit
                    continue
                high = limit
                if found.peak_bytes < best.peak_bytes:
                    best = found
            self._smallest = best
        return self._smallest

    def _spans(self, start: int) -> list[int]:
        last = len(self._cuts) - 1
        lengths = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, *([last] if start == 0 else [])]
        return sorted({start + length for length in lengths if start + length <= last})

    def _menu(self, start: int, stop: int) -> list[Option]:
        key = (start, stop)
        if key not in self._menus:
            piece = cut_out(self.graph, self._cuts[start], self._cuts[stop], self._last, self._owners)
            self._pieces[key] = piece
            alike = signature(piece)
            if alike not in self._alike:
                units = [cut - piece.start for cut in self._cuts[start : stop + 1]]
                self._alike[alike] = menu(piece, units)
            self._menus[key] = self._alike[alike]
        return self._menus[key]

    def _chain(self, limit_bytes: float) -> Solution | None:
        chain = best_chain(len(self._cuts), self._spans, self._menu, limit_bytes)
        if chain is None:
            return None
        actions = [KEEP] * len(self.graph.nbytes)
        segment_of = [0] * len(actions)
        parent = [-1]
        for start, stop, option in chain:
            piece = self._pieces[start, stop]
            for index, value in enumerate(piece.values):
                actions[value] = option.actions[index]
            if option.segments is not None:
                shift = len(parent) - 1
                for index, value in enumerate(piece.values):
                    segment = option.segments.of[index]
                    segment_of[value] = segment + shift if segment else 0
                parent += [p + shift if p > 0 else 0 for p in option.segments.parent[1:]]
        return self._simulated(actions, Segments(segment_of, parent))

    def _simulated(self, actions: Sequence[int], segments: Segments) -> Solution:
        return Solution(tuple(actions), segments, simulate(self.graph, actions, segments))

    def _polished(self, solution: Solution, budget_bytes: int) -> Solution:
        operations = max(1, len(self.graph.op_inputs))
        segments = solution.segments
        actions = fill(
            self.graph, solution.actions, segments, budget_bytes, evaluations=max(20, min(400, 200_000 // operations))
        )
        best = self._simulated(actions, segments)
        if operations > _ANNEALED:
            return best
        # Nested segments were the chain's choice; a keep-set without them may be as good where it fits at all.
        tries, root = min(2500, 100_000 // operations), Segments([0] * len(actions))
        for seed in range(3):
            tree = root if seed == 1 else best.segments
            found = anneal(self.graph, best.actions, tree, budget_bytes, evaluations=tries, seed=seed)
            if found is not None:
                found = fill(self.graph, found, tree, budget_bytes, evaluations=100)
                best = min(best, self._simulated(found, tree), key=lambda s: (s.extra_seconds, s.peak_bytes))
        return best


def solve_fast(graph: Graph, budget_bytes: int) -> Solution | None:
    """The fastest plan found for this budget, or None if none was."""
    return FastSolver(graph).solve(budget_bytes)


def min_peak(graph: Graph) -> Solution:
    """The plan with the smallest peak that can be reached."""
    return FastSolver(graph).smallest()
