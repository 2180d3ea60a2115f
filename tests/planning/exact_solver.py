"""The exact solver: the keep-set of least recomputation under a budget, as a mixed-integer program
for HiGHS.

Checkmate (Jain et al., 2020) optimises over arbitrary schedules; the engine does not run arbitrary
schedules, so this one optimises over exactly what it runs at one level (every value in the root
segment, no offloading): a keep-set, from which every sweep, every cached value and every release
follows. Only the keep bits are integer. For each unpacking of a value (an *event*) A(o, e) says
that operation o has been replayed by then; it is pinned from both sides, so that an integer
keep-set leaves it no freedom. Memory while a node runs is in the program from the start; memory
inside a sweep is added for the moments at which a solution turns out to break the budget (by the
simulator), until none does.

Bound reached: the optimum over one-level keep-sets, confirmed by brute force in the tests. Nested
segments can reach budgets this calls infeasible, and can beat it where the burst is what binds.

Weaknesses: meant for graphs of up to some 60 operations; beyond, or against `seconds_limit`, it may
end with a bound instead of an optimum (`Exact.proven` is False then).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from gradfit.planning.simulate import KEEP, REBUILD, Simulation, simulate
from gradfit.profiling.step_graph import Graph


@dataclass(frozen=True)
class Exact:
    """The outcome. `actions` is None if no keep-set fits; `bound_seconds` is below every keep-set's
    seconds.
    """

    actions: tuple[int, ...] | None
    extra_seconds: float
    bound_seconds: float
    proven: bool


def solve_exact(graph: Graph, budget_bytes: int, *, seconds_limit: float = 60.0) -> Exact:
    """The best one-level keep-set under the budget."""
    program = _Program(graph, budget_bytes)
    deadline = time.monotonic() + seconds_limit
    while True:
        found = program.solve(max(0.1, deadline - time.monotonic()))
        if found is None:
            return Exact(None, np.inf, np.inf, True)
        actions, bound, optimal = found
        if actions is None:
            return Exact(None, np.inf, bound, False)
        result = simulate(graph, actions)
        if result.peak_bytes <= budget_bytes:
            return Exact(tuple(actions), result.extra_seconds, bound, optimal)
        if time.monotonic() > deadline:
            return Exact(None, np.inf, bound, False)
        program.forbid(actions, result)


class _Program:
    """Variables are numbered as they are asked for; rows are (coefficients, lower, upper)."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.room = budget_bytes - graph.static_bytes
        self.index: dict[tuple[object, ...], int] = {}
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.added: set[tuple[int, int]] = set()
        self.events = [
            (n, v)
            for n, needs in enumerate(graph.node_needs)
            for v in needs
            if graph.producer[v] >= 0
        ]
        self.last_event = {v: e for e, (_, v) in enumerate(self.events)}
        self.keepable = graph.keepable
        self._replays()
        self._memory()

    def variable(
        self, *key: object, integer: bool = False, low: float = 0.0, high: float = 1.0
    ) -> int:
        if key not in self.index:
            self.index[key] = len(self.lower)
            self.lower.append(low)
            self.upper.append(high)
            self.integer.append(int(integer))
        return self.index[key]

    def keep(self, value: int) -> int:
        return self.variable("keep", value, integer=True, high=1.0 if self.keepable[value] else 0.0)

    def replayed(self, op: int, event: int) -> int:
        return self.variable(
            "replayed", op, event, high=1.0 if self.graph.op_replayable[op] else 0.0
        )

    def at_least(self, terms: dict[int, float], low: float) -> None:
        self.rows.append((terms, low, np.inf))

    def _replays(self) -> None:
        graph = self.graph
        for event in range(len(self.events)):
            reasons: dict[int, dict[int, float]] = {op: {} for op in range(len(graph.op_inputs))}
            for value, op in enumerate(graph.producer):
                if op < 0:
                    continue
                if any(v == value for _, v in self.events[: event + 1]):
                    # replayed ≥ 1 − keep, and a reason to be replayed
                    self.at_least({self.replayed(op, event): 1.0, self.keep(value): 1.0}, 1.0)
                    reasons[op][self.variable("dropped", value, low=0.0)] = 1.0
                for reader in graph.consumers[value]:
                    self.at_least(
                        {
                            self.replayed(op, event): 1.0,
                            self.replayed(reader, event): -1.0,
                            self.keep(value): 1.0,
                        },
                        0.0,
                    )
                    both = self.variable("reason", value, reader, event)
                    self.at_least({self.replayed(reader, event): 1.0, both: -1.0}, 0.0)
                    self.at_least({self.keep(value): -1.0, both: -1.0}, -1.0)
                    reasons[op][both] = 1.0
            for op, terms in reasons.items():
                self.at_least({self.replayed(op, event): -1.0, **terms}, 0.0)
                if event:
                    self.at_least(
                        {self.replayed(op, event): 1.0, self.replayed(op, event - 1): -1.0}, 0.0
                    )
        for value, op in enumerate(graph.producer):
            if op >= 0:
                self.rows.append(
                    ({self.variable("dropped", value): 1.0, self.keep(value): 1.0}, 1.0, 1.0)
                )

    def held(self, value: int, node: int) -> int:
        """A kept value that is alive at this node."""
        key = ("held", value, node)
        if key not in self.index:
            var = self.variable(*key)
            self.at_least({var: 1.0, self.keep(value): -1.0, self.alive(value, node): -1.0}, -1.0)
        return self.index[key]

    def alive(self, value: int, node: int) -> int:
        key = ("alive", value, node)
        if key not in self.index:
            graph = self.graph
            sure = graph.last_need[value] >= node
            var = self.variable(*key, low=1.0 if sure else 0.0)
            if not sure:
                for op in graph.consumers[value]:
                    for output in graph.op_outputs[op]:
                        self.at_least(
                            {var: 1.0, self.alive(output, node): -1.0, self.keep(output): 1.0}, 0.0
                        )
        return self.index[key]

    def cached(self, value: int, event: int) -> int:
        """A rebuilt value that is there after this event: unpacked by the node that runs, or wanted
        later.
        """
        key = ("cached", value, event)
        if key not in self.index:
            graph, op = self.graph, self.graph.producer[value]
            var = self.variable(*key)
            node = self.events[event][0]
            made = self.replayed(op, event)
            in_use = any(n == node and v == value for n, v in self.events[: event + 1])
            if in_use or self.last_event.get(value, -1) > event:
                self.at_least({var: 1.0, made: -1.0, self.keep(value): 1.0}, 0.0)
            final = len(self.events) - 1
            for reader in graph.consumers[value]:
                if final > event:
                    later, now = self.replayed(reader, final), self.replayed(reader, event)
                    self.at_least(
                        {var: 1.0, made: -1.0, later: -1.0, now: 1.0, self.keep(value): 1.0}, -1.0
                    )
        return self.index[key]

    def at_most(self, terms: dict[int, float], high: float) -> None:
        self.rows.append((terms, -np.inf, high))

    def _kept_bytes(self, node: int) -> tuple[dict[int, float], int]:
        """Bytes of kept values at a node as a row, and of what the caller holds anyway."""
        graph, survives = self.graph, self.graph.survives
        terms = {
            self.held(v, node): float(graph.held_bytes[v])
            for v, op in enumerate(graph.producer)
            if op >= 0 and self.keepable[v] and not survives[v] and graph.held_bytes[v]
        }
        return terms, sum(
            graph.held_bytes[v]
            for v in range(len(survives))
            if survives[v] and not graph.overwritten[v]
        )

    def _memory(self) -> None:
        graph = self.graph
        values = [v for v, op in enumerate(graph.producer) if op >= 0]
        operations = len(graph.op_inputs)
        survivors = self._kept_bytes(0)[1] if graph.node_needs else 0
        self.constant_fits = graph.optimizer_burst_bytes + survivors <= self.room
        # Forward: what Python holds at each operation is given; kept values come on top.
        live = 0
        dying: list[list[int]] = [[] for _ in range(operations + 1)]
        for value in values:
            if not graph.overwritten[value]:
                dying[max(graph.dies[value], graph.producer[value])].append(value)
        gone: list[int] = []
        for op in range(operations):
            live += sum(graph.held_bytes[v] for v in graph.op_outputs[op])
            live -= sum(graph.held_bytes[v] for v in graph.op_overwrites[op])
            terms = (
                {self.held(v, 0): float(graph.held_bytes[v]) for v in gone if self.keepable[v]}
                if graph.node_needs
                else {}
            )
            self.at_most(terms, self.room - live - graph.op_workspace[op] - graph.op_gathered[op])
            live -= sum(graph.held_bytes[v] for v in dying[op])
            gone += dying[op]
        event = -1
        for node in range(len(graph.node_needs)):
            while event + 1 < len(self.events) and self.events[event + 1][0] == node:
                event += 1
            terms, always = self._kept_bytes(node)
            if event >= 0:
                # Events of earlier nodes are over: what they unpacked counts only if it is wanted.
                own = self.events[event][0] == node
                for value in values:
                    var = self.cached(value, event) if own else self.cached_after(value, event)
                    terms[var] = terms.get(var, 0.0) + graph.nbytes[value]
            self.at_most(terms, self.room - always - graph.node_peak[node])

    def cached_after(self, value: int, event: int) -> int:
        """As `cached`, once the event's node is done."""
        key = ("after", value, event)
        if key not in self.index:
            graph, op = self.graph, self.graph.producer[value]
            var = self.variable(*key)
            made, final = self.replayed(op, event), len(self.events) - 1
            if self.last_event.get(value, -1) > event:
                self.at_least({var: 1.0, made: -1.0, self.keep(value): 1.0}, 0.0)
            for reader in graph.consumers[value]:
                if final > event:
                    later, now = self.replayed(reader, final), self.replayed(reader, event)
                    self.at_least(
                        {var: 1.0, made: -1.0, later: -1.0, now: 1.0, self.keep(value): 1.0}, -1.0
                    )
        return self.index[key]

    def forbid(self, actions: list[int], result: Simulation) -> None:
        """Describe the moment that broke the budget; if it is described already, exclude this
        keep-set alone.
        """
        if result.phase == "sweep":
            event = next(
                e
                for e, (n, v) in enumerate(self.events)
                if n == result.index and v == result.target
            )
            if (event, result.operation) not in self.added:
                self.added.add((event, result.operation))
                self._sweep_row(event, result.operation)
                return
        bits = {
            self.keep(v): 1.0 if a == REBUILD else -1.0
            for v, a in enumerate(actions)
            if self.keepable[v]
        }
        self.at_least(
            bits, 1.0 - sum(1 for v, a in enumerate(actions) if self.keepable[v] and a == KEEP)
        )

    def _sweep_row(self, event: int, op: int) -> None:
        """Bytes while `op` runs in this event's sweep, if it does."""
        graph = self.graph
        node = self.events[event][0]
        terms, always = self._kept_bytes(node)
        values = [v for v, p in enumerate(graph.producer) if p >= 0]
        if event:
            same = self.events[event - 1][0] == node
            for value in values:
                var = self.cached(value, event - 1) if same else self.cached_after(value, event - 1)
                terms[var] = terms.get(var, 0.0) + graph.nbytes[value]

        def runs(which: int, scale: float) -> dict[int, float]:
            found = {self.replayed(which, event): scale}
            if event:
                found[self.replayed(which, event - 1)] = -scale
            return found

        for value in values:
            maker = graph.producer[value]
            if maker >= op:
                continue
            var = self.variable("live", value, event, op)
            terms[var] = float(graph.nbytes[value])
            # Made in this sweep and staying after it …
            self.at_least(
                {
                    var: 1.0,
                    **runs(maker, -1.0),
                    self.cached(value, event): -1.0,
                    self.keep(value): 1.0,
                },
                -1.0,
            )
            for reader in graph.consumers[value]:
                # … or read later in it, or now and not written over.
                if reader > op or (reader == op and value not in graph.op_overwrites[op]):
                    row = {var: 1.0, self.keep(value): 1.0, **runs(maker, -1.0)}
                    for key, scale in runs(reader, -1.0).items():
                        row[key] = row.get(key, 0.0) + scale
                    self.at_least(row, -1.0)
        own = sum(graph.nbytes[v] for v in graph.op_outputs[op]) + graph.op_workspace[op]
        room = self.room - always - graph.node_before[node] - own
        slack = float(sum(graph.nbytes) * 2 + sum(graph.held_bytes) + abs(room))
        for key, scale in runs(op, slack).items():
            terms[key] = terms.get(key, 0.0) + scale
        self.at_most(terms, room + slack)

    def solve(self, seconds: float) -> tuple[list[int] | None, float, bool] | None:
        """(actions or None if time ran out, bound, optimal), or None if infeasible."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        graph = self.graph
        if not self.constant_fits:
            return None
        if not self.events:
            fits = all(high >= 0 for terms, _, high in self.rows if not terms)
            return (
                (
                    [
                        KEEP if k or p < 0 else REBUILD
                        for k, p in zip(self.keepable, graph.producer, strict=True)
                    ],
                    0.0,
                    True,
                )
                if fits
                else None
            )
        final = len(self.events) - 1
        cost = np.zeros(len(self.lower))
        for op in range(len(graph.op_inputs)):
            cost[self.replayed(op, final)] = graph.op_seconds[op]
        data, rows, columns = [], [], []
        for number, (terms, _, _) in enumerate(self.rows):
            for column, scale in terms.items():
                rows.append(number)
                columns.append(column)
                data.append(scale)
        matrix = csr_matrix((data, (rows, columns)), shape=(len(self.rows), len(self.lower)))
        result = milp(
            cost,
            integrality=np.array(self.integer),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
            ),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
        if result.status == 2:
            return None
        bound = float(result.mip_dual_bound) if result.mip_dual_bound is not None else 0.0
        if result.x is None:
            return None, bound, False
        actions = [
            KEEP if op < 0 or (self.keepable[v] and result.x[self.keep(v)] > 0.5) else REBUILD
            for v, op in enumerate(graph.producer)
        ]
        return actions, bound, result.status == 0
