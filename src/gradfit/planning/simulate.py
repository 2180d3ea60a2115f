"""What the engine will do with a keep-set, without doing it: peak bytes, extra seconds, and where
the peak is.

Every solver here trusts this function and nothing else, so it follows the engine step by step, by
these rules:

1. Forward: a kept value that something needs is held from its creation; any other leaves when
   Python drops it.
2. A value is *alive* while a backward node that has not run needs it, or a live rebuilt value's
   operation reads it.
3. Backward: a node unpacks what it needs, in order. A value that is not there is rebuilt by a
   *sweep*: the operations between what is there and it, in forward order. A transient is freed
   after its last use in the sweep.
4. A value is *wanted* if a node has still to unpack it, or an operation reads it to make a rebuilt
   value that is wanted and not there. A value rebuilt on the way to v is cached iff it is wanted
   and its segment is v's or above it.
5. A cached value that a sweep reads, or a node unpacks, is dropped at the sweep's or node's end if
   no longer wanted. Any cached value is dropped once it is not alive.
6. In place: replay writes over the old version's bytes if they are a transient's last use, else
   over a copy.
7. An offloaded value is copied out when made and copied back like a rebuilt one, by an operation
   without inputs. Copies run beside computation, one after the other. A value on its way out is
   held until `IN_FLIGHT` others have begun to go out after it, and none longer than the last
   operation of which something is not kept: then computation waits for its copy. When one has come
   back, the fetch of another begins, of those not asked for yet that went out last, if none is
   there already that nobody has asked for; it holds its bytes from then on.

A plan that would replay what cannot be replayed takes infinite seconds. Cost: one pass over the
forward and one over what is replayed, some 2 to 3 µs for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import add

from gradfit.profiling.step_graph import Graph

IN_FLIGHT = 2  # offloaded values on their way out, beside what the operation that runs makes
KEEP, REBUILD, OFFLOAD = 0, 1, 2
ACTION_NAMES = ("keep", "rebuild", "offload")


@dataclass(frozen=True)
class Segments:
    """A tree of segments: the segment of each value, and each segment's parent (-1 for the root,
    0).

    A parent's number is smaller than its children's.
    """

    of: Sequence[int]
    parent: Sequence[int] = (-1,)

    def intervals(self) -> tuple[list[int], list[int]]:
        """For each segment the half-open range of its descendants in depth-first order."""
        children: list[list[int]] = [[] for _ in self.parent]
        size = [1] * len(self.parent)
        for segment in range(len(self.parent) - 1, 0, -1):  # children come before their parent
            children[self.parent[segment]].append(segment)
            size[self.parent[segment]] += size[segment]
        start = _starts(children, size)
        return start, list(map(add, start, size))


def _starts(children: Sequence[Sequence[int]], size: Sequence[int]) -> list[int]:
    """Where each segment comes in depth-first order; a parent's number is smaller than its
    children's.
    """
    start = [0] * len(children)
    for segment, below in enumerate(children):
        position = start[segment] + 1
        for child in below:
            start[child] = position
            position += size[child]
    return start


@dataclass(frozen=True)
class Simulation:
    """The outcome: the peak, what it is made of, and the seconds that recomputation and transfers
    add.
    """

    peak_bytes: int
    extra_seconds: float
    phase: str  # "forward", "sweep", "backward" or "optimizer"
    index: int  # of the operation (forward) or the backward node (otherwise)
    kept_bytes: int  # of the peak: values kept
    rebuilt_bytes: int  # of the peak: values cached, or in use, after having been rebuilt
    other_bytes: int  # of the peak: gradients in flight, workspaces, values that only Python holds
    replays: list[int] = field(repr=False)  # how often each operation runs again
    saved_bytes: int = 0  # kept between the passes
    forward_bytes: int = 0  # the highest moment of each pass
    backward_bytes: int = 0
    target: int = -1  # in a sweep: the value being rebuilt, and the operation running
    operation: int = -1


def alive_until(graph: Graph, actions: Sequence[int]) -> list[int]:
    """The last node up to whose end each value is alive; -1 if nothing needs it (rule 2)."""
    return Simulator(graph).alive_until(actions)


def simulate(
    graph: Graph,
    actions: Sequence[int],
    segments: Segments | None = None,
    *,
    timeline: list[tuple[str, int, int]] | None = None,
) -> Simulation:
    """Run one micro-batch and the optimizer on paper; a `timeline` list gets (phase, index, bytes)
    of each moment.
    """
    return Simulator(graph).run(actions, segments, timeline=timeline)


class Simulator:
    """What is the same for every plan of a graph, worked out once: solvers ask thousands of
    times.
    """

    def __init__(self, graph: Graph) -> None:
        producer = graph.producer
        self.graph = graph
        self.handles = _handle_counts(graph)
        self.needs = [tuple([v for v in needs if producer[v] >= 0]) for needs in graph.node_needs]
        self.external = [value for value, op in enumerate(producer) if op < 0]
        self.latest_first = _latest_first(producer)
        # after which operation a value that is not kept goes; -1: no operation makes it
        self.dies = list(map(_last_operation, graph.dies, producer))
        self.curve, self.surviving = _curve_of_keeping_nothing(graph, self.dies)
        self.least_peak_bytes = self._least_peak()

    def _least_peak(self) -> int:
        """What no plan can stay below: the highest moment if nothing is kept and rebuilding takes
        nothing.
        """
        graph = self.graph
        in_backward = self.surviving + max(graph.node_peak, default=0)
        beside_static = max(in_backward, graph.optimizer_burst_bytes)
        return max([*self.curve, graph.static_bytes + beside_static])

    @cached_property
    def op_ends(self) -> list[float]:
        """When each operation of the forward ends, in seconds, if nothing is waited for."""
        return list(accumulate(self.graph.op_seconds))

    @cached_property
    def node_starts(self) -> list[float]:
        """When each backward node begins, if nothing is rebuilt or waited for."""
        return list(accumulate(self.graph.node_seconds, initial=0.0))

    @cached_property
    def made_from(self) -> list[list[int]]:
        """For each value the results of the operations that read it."""
        outputs = self.graph.op_outputs
        return [[v for op in readers for v in outputs[op]] for readers in self.graph.consumers]

    def alive_until(self, actions: Sequence[int]) -> list[int]:
        graph = self.graph
        until, inputs, producer = list(graph.last_need), graph.op_inputs, graph.producer
        for value in self.latest_first:
            if actions[value] == REBUILD and (last := until[value]) >= 0:
                for source in inputs[producer[value]]:
                    if until[source] < last:
                        until[source] = last
        return until

    def run(
        self,
        actions: Sequence[int],
        segments: Segments | None = None,
        *,
        timeline: list[tuple[str, int, int]] | None = None,
    ) -> Simulation:
        graph = self.graph
        run = _Run(self, actions, segments, timeline)
        run.forward()
        saved, forward = run.kept, (run.peak, run.where)
        run.peak = -1
        run.backward()
        backward_bytes = run.peak
        if forward[0] >= backward_bytes:
            run.peak, run.where = forward
        run.see(
            "optimizer", 0, graph.static_bytes + run.surviving + graph.optimizer_burst_bytes, 0, 0
        )
        phase, index, kept, rebuilt, target, operation = run.where
        return Simulation(
            peak_bytes=run.peak,
            extra_seconds=run.extra_seconds,
            phase=phase,
            index=index,
            kept_bytes=kept,
            rebuilt_bytes=rebuilt,
            other_bytes=run.peak - graph.static_bytes - kept - rebuilt,
            replays=run.replays,
            saved_bytes=saved,
            forward_bytes=forward[0],
            backward_bytes=backward_bytes,
            target=target,
            operation=operation,
        )


def _latest_first(producer: Sequence[int]) -> list[int]:
    """The values that operations make, those of the last one first."""
    results = [value for value, op in enumerate(producer) if op >= 0]
    return sorted(results, key=lambda value: -producer[value])


def _last_operation(dies: int, op: int) -> int:
    return max(dies, op) if op >= 0 else -1


def _handle_counts(graph: Graph) -> list[int]:
    """How often the backward pass unpacks each value."""
    counts = [0] * len(graph.nbytes)
    for value in chain.from_iterable(graph.node_needs):
        counts[value] += 1
    return counts


def _curve_of_keeping_nothing(graph: Graph, dies: Sequence[int]) -> tuple[list[int], int]:
    """Bytes while each operation of the forward runs, and those that are left after the last."""
    held, freed = graph.held_bytes, _bytes_freed_after(graph, dies)
    curve = []
    live = graph.static_bytes
    for op, outputs in enumerate(graph.op_outputs):
        live += sum([held[v] for v in outputs]) - sum([held[v] for v in graph.op_overwrites[op]])
        curve.append(live + graph.op_workspace[op] + graph.op_gathered[op])
        live -= freed[op]
    return curve, live - graph.static_bytes


def _bytes_freed_after(graph: Graph, dies: Sequence[int]) -> list[int]:
    """By operation, and after the last: the bytes of values that go. What is written over does not:
    its bytes pass to its next version.
    """
    operations = len(graph.op_inputs)
    freed = [0] * (operations + 1)
    for value, overwritten in enumerate(graph.overwritten):
        if dies[value] >= 0 and not overwritten:
            freed[min(dies[value], operations)] += graph.held_bytes[value]
    return freed


_IS_KEPT = bytes([1]) + bytes(255)  # for bytes.translate


class _Run:
    """The state of one simulation. All byte counts but `peak` leave out the static bytes.

    Solvers spend most of their time here, so the loops over operations stay in one function each,
    with attributes bound to local names: a call costs as much as the arithmetic of an operation.
    """

    def __init__(
        self,
        of: Simulator,
        actions: Sequence[int],
        segments: Segments | None,
        timeline: list[tuple[str, int, int]] | None,
    ) -> None:
        graph = of.graph
        count = len(graph.nbytes)
        self.of, self.graph, self.actions, self.timeline = of, graph, actions, timeline
        self.until = of.alive_until(actions)
        self.peak, self.where = -1, ("forward", 0, 0, 0, -1, -1)
        self.extra_seconds = 0.0
        self.replays = [0] * len(graph.op_inputs)
        self.kept = 0  # bytes of kept values that something still needs
        self.surviving = 0  # bytes of other values that the caller holds through the backward
        self.cached = 0  # bytes of values rebuilt and still there
        # What a sweep can start from: external, kept or cached values.
        self.present = bytearray(bytes(actions).translate(_IS_KEPT))
        for value in of.external:
            self.present[value] = 1
        self.pending = list(of.handles)  # handles not yet unpacked
        nodes = len(graph.node_needs)
        self.kept_until = [0] * nodes  # bytes of kept values that are not alive after this node
        self.drops: list[list[int]] = [[] for _ in range(nodes)]  # the same, other values
        self.back: _WayBack | None = None  # of offloaded values
        self.first, self.end = _segment_intervals(segments)
        # Stamps, so that nothing is cleared between sweeps.
        self.sweep = 0
        self.op_mark = [0] * len(graph.op_inputs)
        self.made_in = [0] * count  # the sweep that makes this value
        self.last_use = [-1] * count  # the last operation of that sweep that reads it
        self.decided = [0] * count  # the sweep in which it is wanted; negative: is not wanted

    def see(
        self,
        phase: str,
        index: int,
        now: int,
        kept: int,
        rebuilt: int,
        target: int = -1,
        operation: int = -1,
    ) -> None:
        if self.timeline is not None:
            self.timeline.append((phase, index, now))
        if now > self.peak:
            self.peak, self.where = now, (phase, index, kept, rebuilt, target, operation)

    def forward(self) -> None:
        """Rule 1: the curve of keeping nothing, plus each kept value from where it would have
        gone.
        """
        actions, until, overwritten = self.actions, self.until, self.graph.overwritten
        stays, moved, last_op = [], [], -1
        for value in self.of.latest_first:
            if (last := until[value]) < 0:
                continue
            action = actions[value]
            if action != KEEP:
                self.drops[last].append(value)
                if last_op < 0:
                    last_op = self.graph.producer[value]
                if action == OFFLOAD:
                    moved.append(value)
            elif not overwritten[value]:
                stays.append(value)
        longer = self.hold(stays)
        if moved:
            self.move_out(moved, last_op, longer)
        self.see_forward(stays, list(map(add, self.of.curve, accumulate(longer))))

    def move_out(self, moved: list[int], last_op: int, longer: list[int]) -> None:
        """Rule 7, the way out: the seconds for which computation waits, and the bytes that are held
        for it, which come on top from each operation on.
        """
        graph, ends = self.graph, self.of.op_ends
        producer, nbytes = graph.producer, graph.nbytes
        moved.sort(key=lambda value: (producer[value], value))
        waited = free = 0.0  # `free`: when the last copy so far is done
        done: list[float] = []
        for number, value in enumerate(moved):
            op = producer[value]
            now = ends[op] + waited
            if number >= IN_FLIGHT:
                self.let_go_of_moved(moved[number - IN_FLIGHT], op, longer)
                waited += max(0.0, done[number - IN_FLIGHT] - now)
                now = ends[op] + waited
            free = max(now, free) + nbytes[value] * graph.transfer_seconds_per_byte
            done.append(free)
        for value in moved[-IN_FLIGHT:]:
            self.let_go_of_moved(value, last_op, longer)
        self.extra_seconds += waited + max(0.0, free - (ends[last_op] + waited))
        self.back = _WayBack(self, moved)

    def let_go_of_moved(self, value: int, op: int, longer: list[int]) -> None:
        """It is held until the operation is done; from where Python drops it, that is more. Before
        somebody writes over it, it has gone.
        """
        dies = self.of.dies[value]
        if dies < op and not self.graph.overwritten[value]:
            size = self.graph.held_bytes[value]
            longer[dies + 1] += size
            longer[op + 1] -= size

    def hold(self, stays: Sequence[int]) -> list[int]:
        """Hold kept values to their last use; gives the bytes that come on top of the curve of
        keeping nothing, from each operation on.
        """
        held, dies, until = self.graph.held_bytes, self.of.dies, self.until
        operations = len(self.graph.op_inputs)
        longer = [0] * (operations + 1)
        surviving = self.of.surviving
        for value in stays:
            size = held[value]
            self.kept += size
            if dies[value] < operations:
                longer[dies[value] + 1] += size
                self.kept_until[until[value]] += size
            else:  # the caller holds it anyway
                surviving -= size
        self.surviving = surviving
        return longer

    def see_forward(self, stays: Sequence[int], curve: list[int]) -> None:
        """The forward's highest moment, or all of them for a timeline."""
        held, producer = self.graph.held_bytes, self.graph.producer
        if self.timeline is not None:
            moments: Iterable[int] = range(len(self.graph.op_inputs))
        else:
            moments = [curve.index(max(curve))] if curve else []
        for op in moments:
            kept = sum([held[v] for v in stays if producer[v] <= op])
            self.see("forward", op, curve[op], kept, 0)

    def backward(self) -> None:
        """Rules 3 to 5, node by node."""
        graph, actions, present, pending = self.graph, self.actions, self.present, self.pending
        always = graph.static_bytes + self.surviving
        unpacked: dict[int, None] = {}  # these live while the node runs, cached or not
        for node, needs in enumerate(self.of.needs):
            for value in needs:
                if actions[value] == KEEP:
                    continue
                pending[value] -= 1
                self.sweep += 1
                if present[value]:
                    present[value] = self.wanted(value, node)
                elif value not in unpacked:
                    present[value] = self.rebuild(value, node, unpacked)
                unpacked[value] = None
            now = always + self.kept + self.cached + graph.node_peak[node]
            if now > self.peak or self.timeline is not None:
                self.see("backward", node, now, self.kept, self.cached)
            if unpacked:
                self.let_go(unpacked)
            self.kept -= self.kept_until[node]
            if self.drops[node]:
                self.drop(self.drops[node])
            if self.back is not None and self.back.last_node == node:
                self.cached -= self.back.let_go()

    def let_go(self, unpacked: dict[int, None]) -> None:
        """At a node's end, forget what it unpacked and nothing else wants (rule 5)."""
        for value in unpacked:
            if not self.present[value]:
                self.cached -= self.graph.nbytes[value]
        unpacked.clear()

    def drop(self, values: Iterable[int]) -> None:
        """Forget cached values that are no longer alive (rule 5)."""
        for value in values:
            if self.present[value]:
                self.present[value] = 0
                self.cached -= self.graph.nbytes[value]

    def wanted(self, value: int, node: int) -> bool:
        """Rule 4: can a handle that is not yet unpacked be reached through rebuilt values that are
        not there?
        """
        pending, decided, sweep = self.pending, self.decided, self.sweep
        if pending[value] > 0:
            return True
        made_from, present, actions, until = (
            self.of.made_from,
            self.present,
            self.actions,
            self.until,
        )
        stack: list[int] = [value]
        seen: list[int] = []
        while stack:
            for output in made_from[stack.pop()]:
                if present[output] or actions[output] != REBUILD or until[output] < node:
                    continue
                if pending[output] > 0 or decided[output] == sweep:
                    for other in seen:
                        decided[other] = 0  # not decided after all
                    decided[value] = sweep
                    return True
                if decided[output] != -sweep:
                    decided[output] = -sweep
                    seen.append(output)
                    stack.append(output)
        decided[value] = -sweep
        return False

    def rebuild(self, value: int, node: int, unpacked: Container[int]) -> bool:
        """One sweep, rules 3 to 6; True if the value is to stay cached after this node."""
        steps, loads, read = self.operations_to(value)
        stays = self.wanted(value, node)
        self.present[value] = 1
        self.choose_cached(value, node, steps, loads)
        dropped = [source for source in dict.fromkeys(read) if not self.wanted(source, node)]
        self.replay(value, node, steps, loads)
        for source in dropped:
            self.present[source] = 0
            if source not in unpacked:
                self.cached -= self.graph.nbytes[source]
        return stays

    def operations_to(self, value: int) -> tuple[list[int], dict[int, list[int]], list[int]]:
        """The steps of a sweep, walking back from the value to what is there.

        Gives the operations in forward order, the offloaded values to copy back by the operation
        that made them (at whose place they come back), and the cached values that are read.
        """
        op_inputs, op_outputs, producer = (
            self.graph.op_inputs,
            self.graph.op_outputs,
            self.graph.producer,
        )
        actions, present, op_mark, sweep = self.actions, self.present, self.op_mark, self.sweep
        made_in, last_use = self.made_in, self.last_use
        ops: list[int] = []
        read: list[int] = []
        loads: dict[int, list[int]] = {}
        stack = [value]
        while stack:
            target = stack.pop()
            op = producer[target]
            if actions[target] == OFFLOAD:
                self.copy_back(target, loads)
            elif op_mark[op] != sweep:
                op_mark[op] = sweep
                ops.append(op)
                for output in op_outputs[op]:
                    if not present[output] and actions[output] == REBUILD:
                        made_in[output], last_use[output] = sweep, -1
                for source in op_inputs[op]:
                    if not present[source]:
                        stack.append(source)
                    elif actions[source] != KEEP and producer[source] >= 0:
                        read.append(source)
        ops.sort()
        for op in ops:
            for source in op_inputs[op]:
                last_use[source] = op
        return (sorted({*ops, *loads}) if loads else ops), loads, read

    def copy_back(self, value: int, loads: dict[int, list[int]]) -> None:
        """Mark an offloaded value as one that this sweep copies back (rule 7)."""
        if self.made_in[value] != self.sweep:
            self.made_in[value], self.last_use[value] = self.sweep, -1
            loads.setdefault(self.graph.producer[value], []).append(value)

    def choose_cached(
        self, value: int, node: int, steps: list[int], loads: dict[int, list[int]]
    ) -> None:
        """Mark as present what the sweep makes and leaves cached (rule 4).

        It is asked from the last operation to the first, so that whatever a value could be wanted
        for is decided.
        """
        op_outputs, present, until = self.graph.op_outputs, self.present, self.until
        made_in, sweep, first, end = self.made_in, self.sweep, self.first, self.end
        inside = first[value] if first is not None else 0
        for op in reversed(steps):
            for output in (*op_outputs[op], *loads[op]) if op in loads else op_outputs[op]:
                if made_in[output] != sweep or present[output] or until[output] < node:
                    continue
                # a value's segment is the sweep's, or above it
                if self.wanted(output, node) and (
                    first is None or first[output] <= inside < end[output]
                ):
                    present[output] = 1

    def replay(self, value: int, node: int, steps: list[int], loads: dict[int, list[int]]) -> None:
        """Run the steps of a sweep. `present` says by now what stays afterwards, `made_in` what is
        new.
        """
        graph, nbytes, replays = self.graph, self.graph.nbytes, self.replays
        op_outputs, op_seconds, workspace = graph.op_outputs, graph.op_seconds, graph.op_workspace
        now, seconds = self.cached, self.extra_seconds
        highest, widest = 0, -1  # bytes, and the operation that runs then
        for op in steps:
            if op in loads:
                now, seconds = self.bring_back(loads[op], node, now, seconds)
                if now > highest:
                    highest, widest = now, op
                if self.op_mark[op] != self.sweep:
                    continue  # copied back only, not run again
            seconds += op_seconds[op] if graph.op_replayable[op] else math.inf
            replays[op] += 1
            for output in op_outputs[op]:
                now += nbytes[output]
            if overwritten := graph.op_overwrites[op]:
                now -= self.free_after(op, overwritten)  # rule 6
            if now + workspace[op] > highest:
                highest, widest = now + workspace[op], op
            now -= self.free_after(op, graph.op_inputs[op]) + self.free_unused_outputs(op)
        bytes_around = graph.static_bytes + self.surviving + self.kept + graph.node_before[node]
        if bytes_around + highest > self.peak or self.timeline is not None:
            self.see("sweep", node, bytes_around + highest, self.kept, highest, value, widest)
        self.cached, self.extra_seconds = now, seconds

    def bring_back(
        self, targets: Iterable[int], node: int, now: int, seconds: float
    ) -> tuple[int, float]:
        """Rule 7, the way back of some values: bytes and extra seconds when they are there."""
        start = self.of.node_starts[node]
        assert self.back is not None
        for target in targets:
            arrived, more_bytes = self.back.bring(target, node, start + seconds)
            now, seconds = now + more_bytes, arrived - start
        return now, seconds

    def free_after(self, op: int, values: Iterable[int]) -> int:
        """Bytes of those of the values that this sweep made, needs for the last time here, and does
        not keep.
        """
        freed, made_in, last_use = 0, self.made_in, self.last_use
        for value in values:
            if last_use[value] == op and made_in[value] == self.sweep and not self.present[value]:
                freed += self.graph.nbytes[value]
                made_in[value] = 0
        return freed

    def free_unused_outputs(self, op: int) -> int:
        """Bytes of results that are a second copy of what is there, or that this sweep has no use
        for.
        """
        freed, made_in, actions = 0, self.made_in, self.actions
        for output in self.graph.op_outputs[op]:
            used = self.last_use[output] >= 0 or self.present[output]
            if used and made_in[output] == self.sweep and actions[output] != OFFLOAD:
                continue
            freed += self.graph.nbytes[output]
            if actions[output] == REBUILD:
                made_in[output] = 0
        return freed


class _WayBack:
    """Rule 7, the way back: which offloaded value is fetched ahead, and when it is there."""

    def __init__(self, run: _Run, moved: list[int]) -> None:
        self.graph, self.until = run.graph, run.until
        self.not_asked_for = moved  # the last is the next that is fetched
        self.asked_for = bytearray(len(run.graph.nbytes))
        self.coming = -1
        self.arrives = 0.0
        # nobody can ask for anything after it
        self.last_node = max([self.until[value] for value in moved])

    def bring(self, value: int, node: int, now: float) -> tuple[float, int]:
        """When the value is there that is asked for at this moment, and the bytes that come on
        top, with what is fetched from then on.
        """
        self.asked_for[value] = 1
        if value == self.coming:
            self.coming, more_bytes = -1, 0
            now = max(now, self.arrives)
        else:
            dropped = self.coming >= 0 and self.until[self.coming] < node
            more_bytes = self.graph.nbytes[value] - (self.let_go() if dropped else 0)
            seconds = self._seconds(value)
            if self.arrives > now:  # the other copy goes on beside this one
                self.arrives += seconds
            now += seconds
        return now, more_bytes + self._fetch_ahead(node, now)

    def _fetch_ahead(self, node: int, now: float) -> int:
        """Begin to fetch another one; gives its bytes."""
        rest = self.not_asked_for
        while rest and self.coming < 0:
            value = rest.pop()
            if not self.asked_for[value] and self.until[value] >= node:
                self.coming = value
                self.arrives = max(now, self.arrives) + self._seconds(value)
                return self.graph.nbytes[value]
        return 0

    def let_go(self) -> int:
        """Forget what was fetched for nobody; gives its bytes."""
        value, self.coming = self.coming, -1
        return self.graph.nbytes[value] if value >= 0 else 0

    def _seconds(self, value: int) -> float:
        return self.graph.nbytes[value] * self.graph.transfer_seconds_per_byte


def _segment_intervals(segments: Segments | None) -> tuple[list[int] | None, list[int]]:
    """For each value where its segment's descendants begin and end; None if all are in the root."""
    if segments is None or len(segments.parent) == 1:
        return None, []
    starts, ends = segments.intervals()
    return [starts[segment] for segment in segments.of], [ends[segment] for segment in segments.of]
