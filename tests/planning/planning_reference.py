"""The engine's rules once more, as objects and sets, slow and literal: what `simulate` is tested
against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments
from gradfit.profiling.step_graph import Graph


@dataclass(eq=False)
class Val:
    id: int
    size: int
    held: int
    action: int
    maker: Op | None = None
    readers: list[Op] = field(default_factory=list)
    # nodes that have not unpacked it, one entry per need
    handles: list[int] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)  # nodes that need it and have not run
    path: tuple[int, ...] = (0,)  # segments from the root down
    dies: int = 0
    overwritten: bool = False


@dataclass(eq=False)
class Op:
    id: int
    inputs: list[Val]
    outputs: list[Val]
    overwrites: list[Val]


class Reference:
    def __init__(self, graph: Graph, actions: list[int], segments: Segments | None = None) -> None:
        self.graph = graph
        self.vals = [
            Val(
                i,
                graph.nbytes[i],
                graph.held_bytes[i],
                actions[i],
                dies=graph.dies[i],
                overwritten=graph.overwritten[i],
            )
            for i in range(len(actions))
        ]
        self.ops = []
        for i in range(len(graph.op_inputs)):
            pick = [
                [self.vals[v] for v in g[i]]
                for g in (graph.op_inputs, graph.op_outputs, graph.op_overwrites)
            ]
            op = Op(i, *pick)
            self.ops.append(op)
            for v in op.outputs:
                v.maker = op
            for v in op.inputs:
                v.readers.append(op)
        for n, needs in enumerate(graph.node_needs):
            for needed in needs:
                self.vals[needed].handles.append(n)
                self.vals[needed].nodes.add(n)
        if segments is not None:
            for v in self.vals:
                s, path = segments.of[v.id], []
                while s >= 0:
                    path.append(s)
                    s = segments.parent[s]
                v.path = tuple(reversed(path))
        self.cache: set[Val] = set()
        self.peak = 0
        self.seconds = 0.0
        self.elapsed = 0.0  # of what is not extra, since the pass began
        self.going: list[tuple[Val, float]] = []  # on their way out, and when that is done
        self.fetched: Val | None = None  # ahead, for nobody yet
        self.arrives = 0.0
        self.asked: set[Val] = set()

    def note(self, total: int) -> None:
        self.peak = max(self.peak, total)

    def alive(self, v: Val) -> bool:
        return bool(v.nodes) or any(
            w.action == REBUILD and self.alive(w) for op in v.readers for w in op.outputs
        )

    def there(self, v: Val) -> bool:
        return v.maker is None or v.action == KEEP or v in self.cache

    def wanted(self, v: Val) -> bool:
        return bool(v.handles) or any(
            w.action == REBUILD and not self.there(w) and self.alive(w) and self.wanted(w)
            for op in v.readers
            for w in op.outputs
        )

    def kept_now(self) -> int:
        last = len(self.ops)
        return sum(
            v.held
            for v in self.vals
            if v.maker is not None
            and not v.overwritten
            and (v.dies >= last or (v.action == KEEP and self.alive(v)))
        )

    def run(self) -> Reference:
        graph = self.graph
        needed = {v for v in self.vals if self.alive(v)}
        for op in self.ops:
            # Each storage's newest version so far, if Python or the engine holds it.
            overwritten_later = {v for other in self.ops[op.id + 1 :] for v in other.overwrites}
            total = graph.static_bytes + graph.op_workspace[op.id]
            for v in self.vals:
                if v.maker is None or v.maker.id > op.id:
                    continue
                in_python = (
                    max(v.dies, v.maker.id) >= op.id
                    if not v.overwritten
                    else v in overwritten_later
                )
                going = v in [other for other, _ in self.going]
                if in_python or going or (v.action == KEEP and v in needed):
                    total += v.held
            self.note(total)
            self.elapsed += graph.op_seconds[op.id]
            self.move_out([v for v in op.outputs if v.action == OFFLOAD and v in needed])
            if not any(
                v.action != KEEP and v in needed
                for later in self.ops[op.id + 1 :]
                for v in later.outputs
            ):
                while self.going:
                    self.wait_for_first()
        self.elapsed = -self.seconds  # the clock of the way back
        for n, needs in enumerate(graph.node_needs):
            self.used: set[Val] = set()
            for i in needs:
                v = self.vals[i]
                v.handles.remove(n)
                if v.maker is None or v.action == KEEP:
                    continue
                if not self.there(v) and v not in self.used:
                    self.sweep(v, n)
                self.used.add(v)
                if v in self.cache and not self.wanted(v):
                    self.cache.discard(v)
            self.note(
                graph.static_bytes
                + graph.node_peak[n]
                + self.kept_now()
                + sum(v.size for v in self.cache | self.used)
                + self.ahead()
            )
            self.elapsed += graph.node_seconds[n]
            for i in needs:
                self.vals[i].nodes.discard(n)
            self.cache = {v for v in self.cache if self.alive(v)}
            if not any(v.action == OFFLOAD and self.alive(v) for v in self.vals):
                self.fetched = None
        self.used = set()
        survivors = sum(
            v.held
            for v in self.vals
            if v.maker is not None and v.dies >= len(self.ops) and not v.overwritten
        )
        self.note(graph.static_bytes + graph.optimizer_burst_bytes + survivors)
        return self

    def copy_seconds(self, v: Val) -> float:
        return v.size * self.graph.transfer_seconds_per_byte

    def now(self) -> float:
        return self.elapsed + self.seconds

    def move_out(self, values: list[Val]) -> None:
        for v in values:
            if len(self.going) == 2:
                self.wait_for_first()
            begins = max([self.now(), *[done for _, done in self.going]])
            self.going.append((v, begins + self.copy_seconds(v)))

    def wait_for_first(self) -> None:
        _, done = self.going.pop(0)
        self.seconds += max(0.0, done - self.now())

    def ahead(self) -> int:
        return 0 if self.fetched is None else self.fetched.size

    def bring_back(self, v: Val) -> None:
        self.asked.add(v)
        if self.fetched is v:
            self.seconds += max(0.0, self.arrives - self.now())
            self.fetched = None
        else:
            if self.fetched is not None and not self.alive(self.fetched):
                self.fetched = None
            if self.arrives > self.now():
                self.arrives += self.copy_seconds(v)
            self.seconds += self.copy_seconds(v)
        if self.fetched is None:
            self.fetch_ahead()

    def fetch_ahead(self) -> None:
        moved = [v for v in self.vals if v.action == OFFLOAD and v not in self.asked]
        alive = [v for v in moved if self.alive(v)]
        if alive:
            self.fetched = max(alive, key=lambda v: (v.maker.id, v.id))  # type: ignore[union-attr]
            self.arrives = max(self.now(), self.arrives) + self.copy_seconds(self.fetched)

    def sweep(self, target: Val, n: int) -> None:
        graph = self.graph
        rebuilt: set[Val] = set()
        replay: set[Op] = set()
        read: set[Val] = set()

        def need(v: Val) -> None:
            if self.there(v):
                read.add(v)
            elif v.action == OFFLOAD:
                rebuilt.add(v)
            else:
                assert v.maker is not None
                replay.add(v.maker)
                rebuilt.update(
                    w for w in v.maker.outputs if w.action == REBUILD and not self.there(w)
                )
                for u in v.maker.inputs:
                    need(u)

        need(target)
        before = set(self.cache)
        # Decide what stays, from the last value to the first, with the target counted as there.
        self.cache.add(target)
        for v in sorted(rebuilt - {target}, key=lambda v: (v.maker.id, v.id), reverse=True):  # type: ignore[union-attr]
            if v.path == target.path[: len(v.path)] and self.alive(v) and self.wanted(v):
                self.cache.add(v)
        drop = {v for v in read & before if not self.wanted(v)}
        stay = (self.cache & rebuilt) | {target}

        held = self.kept_now() + sum(v.size for v in before | self.used)
        around = graph.static_bytes + graph.node_before[n]
        live: set[Val] = set()  # new bytes of this sweep
        order = sorted(
            replay | {v.maker for v in rebuilt if v.action == OFFLOAD}, key=lambda op: op.id
        )  # type: ignore[union-attr]
        for position, op in enumerate(order):
            for v in [v for v in op.outputs if v.action == OFFLOAD and v in rebuilt]:
                live.add(v)
                self.bring_back(v)
            self.note(around + held + sum(v.size for v in live) + self.ahead())
            if op not in replay:
                continue
            self.seconds += graph.op_seconds[op.id] if graph.op_replayable[op.id] else math.inf
            used_later = {
                u for later in order[position + 1 :] if later in replay for u in later.inputs
            }
            during = set(live)
            for old in op.overwrites:
                if old in live and old in op.inputs and old not in used_later and old not in stay:
                    during.discard(old)
            copies = sum(v.size for v in op.outputs if v not in rebuilt or v.action == OFFLOAD)
            during |= {v for v in op.outputs if v in rebuilt and v.action == REBUILD}
            self.note(
                around
                + held
                + sum(v.size for v in during)
                + copies
                + graph.op_workspace[op.id]
                + self.ahead()
            )
            live = {v for v in during if v in stay or v in used_later}
        self.note(around + held + sum(v.size for v in live) + self.ahead())
        self.cache -= drop
