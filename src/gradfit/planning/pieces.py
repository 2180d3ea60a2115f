"""Where a graph can be cut, and the pieces between two cuts as graphs of their own.

A *cut* lies between two operations; what crosses it are the values made before and read after. Cuts
where little crosses (a transformer's residual stream) are where keeping values pays: everything
after them can be rebuilt without going back further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

from gradfit.planning.simulate import KEEP, REBUILD, Segments
from gradfit.profiling.step_graph import Graph

_T = TypeVar("_T")
_FEW_CUTS = 40
# operations; what is read from further back is the same for all blocks, such as an attention mask
_NEAR = 64


@dataclass(frozen=True)
class Piece:
    """The operations `start` to `end` as a graph; `values` and `ops` map its ids to the whole
    graph's.

    What it reads from before is external to it. `forced` are its values that cannot but be kept:
    read after its end, held by the caller anyway, or made by what cannot be replayed.
    """

    graph: Graph
    start: int
    end: int
    values: list[int]
    forced: list[int]
    leaving: list[int]  # of the forced ones, those read after the end


def last_readers(graph: Graph) -> list[int]:
    """For each value the last operation that reads it, or the one that makes it."""
    last = list(graph.producer)
    for op, inputs in enumerate(graph.op_inputs):
        for value in inputs:
            last[value] = op
    return last


def find_cuts(graph: Graph, *, most: int = 400) -> list[int]:
    """Positions where to cut, first and last included: local minima of the bytes that cross, where
    all can be kept.
    """
    operations = len(graph.op_inputs)
    crossing, unkeepable, idle = _what_crosses(graph)
    free = [position for position in range(1, operations) if not unkeepable[position]]
    minima = _near_the_least(free, crossing, distance=3)
    if len(minima) > _FEW_CUTS:  # then the best of each neighbourhood will do
        minima = _near_the_least(minima, crossing, distance=16, slack=1.5)
    return [0, *_at_most(most, _thinned(minima, crossing, idle), crossing), operations]


def _what_crosses(graph: Graph) -> tuple[list[int], list[int], list[int]]:
    """For each position the bytes that are made before it and read after it; how many values that
    cannot be kept (they are written over, say): no cut can go through these; and of the bytes those
    that backward does not ask for, which are kept for the cut's sake alone.
    """
    operations = len(graph.op_inputs)
    last = last_readers(graph)
    crossing, unkeepable, idle = ([0] * (operations + 1) for _ in range(3))
    # Where each value begins and ends to cross; added up, that is what crosses at each position.
    for value, op in enumerate(graph.producer):
        if 0 <= op < last[value]:
            first, beyond = op + 1, last[value] + 1
            crossing[first] += graph.held_bytes[value]
            crossing[beyond] -= graph.held_bytes[value]
            unkeepable[first] += graph.unkeepable[value]
            unkeepable[beyond] -= graph.unkeepable[value]
            if graph.last_need[value] < 0:
                idle[first] += graph.held_bytes[value]
                idle[beyond] -= graph.held_bytes[value]
    return list(accumulate(crossing)), list(accumulate(unkeepable)), list(accumulate(idle))


def _near_the_least(
    positions: Sequence[int], crossing: list[int], *, distance: int, slack: float = 1
) -> list[int]:
    """The positions where not much more crosses than anywhere within the distance."""
    return [p for p in positions if crossing[p] <= slack * _least_near(crossing, p, distance)]


def _least_near(crossing: list[int], position: int, distance: int) -> int:
    return min(
        crossing[max(1, position - distance) : min(len(crossing) - 1, position + distance + 1)]
    )


def _thinned(minima: list[int], crossing: list[int], idle: list[int]) -> list[int]:
    """On a plateau every third position is enough; of those in between the one where most of what
    crosses is asked for by backward, too: behind a block's last ReLU rather than before it.
    """
    spaced = minima[:1]
    for position in minima[1:]:
        last = spaced[-1]
        if position - last >= 3 or crossing[position] < crossing[last]:
            spaced.append(position)
        elif crossing[position] == crossing[last] and idle[position] < idle[last]:
            spaced[-1] = position
    return spaced


def _at_most(most: int, positions: list[int], crossing: list[int]) -> list[int]:
    """No more than so many positions, spread over the graph: of each few in a row the one where
    least crosses. They are told apart by their number, not by where they are, so that blocks that
    repeat are cut alike, and a piece is solved once for all that are like it.
    """
    few = -(-len(positions) // most) or 1
    rows = [positions[first : first + few] for first in range(0, len(positions), few)]
    return [min(row, key=crossing.__getitem__) for row in rows]


class Anatomy:
    """Tables of a graph from which its pieces are cut."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last = last_readers(graph)
        self.survives = graph.survives
        self.nodes_of = _nodes_of_operations(graph)
        self._position = _places_among_results(graph)
        self.lingering = _lingering(graph, self.last)

    def nodes(self, start: int, end: int) -> list[int]:
        return sorted({node for op in range(start, end) for node in self.nodes_of[op]})

    def kind(self, start: int, end: int) -> tuple[int, int | None]:
        """A number that is equal for pieces alike in all but their seconds (a transformer's
        blocks), and their base.

        The base is the least of the bytes of gradients around, which is left out of the comparison:
        a step that starts without gradients has more of them in every block. None: in no node's
        time is anything of it used.
        """
        nodes = self.nodes(start, end)
        base = self._bytes_around(nodes)
        ops = tuple([self._operation_kind(op, start) for op in range(start, end)])
        # A hash instead of the tuple itself, which is compared for each piece of each menu.
        return hash((ops, tuple([self._node_kind(node, start, base) for node in nodes]))), (
            base if nodes else None
        )

    def _bytes_around(self, nodes: Sequence[int]) -> int:
        """The least of the bytes of gradients that are around in the time of these nodes."""
        return min((self.graph.node_before[node] for node in nodes), default=0)

    def _operation_kind(self, op: int, start: int) -> tuple[object, ...]:
        graph = self.graph
        return (
            self._places(graph.op_inputs[op], start),
            self._places(graph.op_overwrites[op], start),
            graph.op_workspace[op],
            graph.op_gathered[op],
            graph.op_replayable[op],
            tuple([self._value_kind(value, op) for value in graph.op_outputs[op]]),
        )

    def _value_kind(self, value: int, op: int) -> tuple[object, ...]:
        graph = self.graph
        return (
            graph.nbytes[value],
            graph.held_bytes[value],
            graph.overwritten[value],
            graph.fixed.get(value),
            self.last[value] - op,
            self.survives[value] or min(graph.dies[value] - op, _NEAR),
        )

    def _node_kind(self, node: int, start: int, base: int) -> tuple[object, ...]:
        graph = self.graph
        places = self._places(graph.node_needs[node], start)
        return places, graph.node_before[node] - base, graph.node_peak[node] - base

    def _places(self, values: Sequence[int], start: int) -> tuple[tuple[int, int], ...]:
        return tuple([self._place(value, start) for value in values])

    def _place(self, value: int, start: int) -> tuple[int, int]:
        """Which result of which operation a value is, seen from the start of a piece; all that is
        far away is alike.
        """
        op = self.graph.producer[value]
        if op >= 0 and start - op <= _NEAR:
            return op - start, self._position[value]
        return -_NEAR - 1, int(op >= 0)

    def piece(self, start: int, end: int, op_seconds: list[float]) -> Piece:
        """The operations `start` to `end` (not included) as a graph of their own, with these
        seconds.
        """
        values = list(chain.from_iterable(self.graph.op_outputs[start:end]))
        forced = [index for index, value in enumerate(values) if self._is_forced(value, end)]
        leaving = [index for index, value in enumerate(values) if self.last[value] >= end]
        return Piece(
            self._graph_of(start, end, values, op_seconds), start, end, values, forced, leaving
        )

    def _is_forced(self, value: int, end: int) -> bool:
        """Whether a piece that ends here cannot but keep this value."""
        graph = self.graph
        return not graph.unkeepable[value] and (
            self.last[value] >= end
            or self.survives[value]
            or graph.held_bytes[value] == 0
            or not graph.op_replayable[graph.producer[value]]
        )

    def _graph_of(self, start: int, end: int, inner: list[int], op_seconds: list[float]) -> Graph:
        """The piece as a graph: first the values made in it (`inner`), then those that it reads
        from before, of no bytes.
        """
        graph, nodes = self.graph, self.nodes(start, end)
        values = list(dict.fromkeys([*inner, *self._values_read(start, end)]))
        local = {value: index for index, value in enumerate(values)}
        from_before = [0] * (len(values) - len(inner))
        base = self._bytes_around(nodes)
        own = set(inner)
        needs = [[value for value in graph.node_needs[node] if value in own] for node in nodes]
        return Graph(
            nbytes=_at(graph.nbytes, inner) + from_before,
            held_bytes=_at(graph.held_bytes, inner) + from_before,
            producer=[graph.producer[v] - start for v in inner] + [-1] * len(from_before),
            dies=[self._dies_in_piece(v, start, end) for v in values],
            overwritten=_at(graph.overwritten, values),
            op_inputs=_renumbered(graph.op_inputs[start:end], local),
            op_outputs=_renumbered(graph.op_outputs[start:end], local),
            op_overwrites=_renumbered(graph.op_overwrites[start:end], local),
            op_seconds=op_seconds,
            op_workspace=graph.op_workspace[start:end],
            op_replayable=graph.op_replayable[start:end],
            node_needs=_renumbered(needs, local),
            node_before=_above(base, _at(graph.node_before, nodes)),
            node_peak=_above(base, _at(graph.node_peak, nodes)),
            node_after=_above(base, _at(graph.node_after, nodes)),
            static_bytes=0,
            optimizer_burst_bytes=0,
            plain_seconds=0.0,
            transfer_seconds_per_byte=graph.transfer_seconds_per_byte,
            node_seconds=_at(graph.node_seconds, nodes),
            op_gathered=graph.op_gathered[start:end],
            fixed={index: graph.fixed[v] for index, v in enumerate(inner) if v in graph.fixed},
            may_offload=graph.may_offload,
        )

    def _values_read(self, start: int, end: int) -> list[int]:
        graph = self.graph
        both = zip(graph.op_inputs[start:end], graph.op_overwrites[start:end], strict=True)
        return [value for inputs, written in both for value in (*inputs, *written)]

    def _dies_in_piece(self, value: int, start: int, end: int) -> int:
        if self.survives[value]:
            return end - start
        return min(max(self.graph.dies[value] - start, 0), end - start - 1)


def _lingering(graph: Graph, last: Sequence[int]) -> list[int]:
    """By position, the bytes that no operation from there on reads and Python still holds: the
    argument of a module that is not left yet, or the first activation for the whole forward.
    """
    operations = len(graph.op_inputs)
    change = [0] * (operations + 1)
    for value, op in enumerate(graph.producer):
        dies = min(graph.dies[value], operations - 1)
        stays = not (graph.survives[value] or graph.overwritten[value])
        if stays and op >= 0 and last[value] < dies:
            change[last[value] + 1] += graph.held_bytes[value]
            change[dies + 1] -= graph.held_bytes[value]
    return list(accumulate(change))


def _places_among_results(graph: Graph) -> list[int]:
    """For each value, which of its operation's results it is."""
    places = [0] * len(graph.nbytes)
    for outputs in graph.op_outputs:
        for place, value in enumerate(outputs):
            places[value] = place
    return places


def _at(numbers: Sequence[_T], places: Sequence[int]) -> list[_T]:
    return [numbers[place] for place in places]


def _above(base: int, numbers: Sequence[int]) -> list[int]:
    return [number - base for number in numbers]


def _renumbered(lists: Sequence[Sequence[int]], local: Mapping[int, int]) -> list[tuple[int, ...]]:
    return [tuple([local[value] for value in values]) for values in lists]


def _nodes_of_operations(graph: Graph) -> list[list[int]]:
    """For each operation the nodes in whose time its values are used: those that need them, and
    those next to these.
    """
    nodes: list[list[int]] = [[] for _ in graph.op_inputs]
    owner = len(graph.op_inputs) - 1  # of nodes that need nothing: the operation of the node before
    for node, needs in enumerate(graph.node_needs):
        producers = {graph.producer[value] for value in needs} - {-1}
        owner = max(producers, default=owner)
        for op in producers | {owner}:
            nodes[op].append(node)
    return nodes


def nest(graph: Graph, last: Sequence[int], levels: Sequence[Sequence[int]]) -> Segments:
    """Segments inside segments: `levels[d]` are the positions that split at depth d, each
    containing the ones before.

    A value that crosses a split of depth d belongs to the segment around it, so that it stays while
    both sides are rebuilt; any other belongs to the innermost segment that holds its operation.
    """
    operations = len(graph.op_inputs)
    parent = [-1]
    segment_of_op = [[0] * operations]  # per depth, the root's first
    for level in levels:
        starts = sorted({0, *(position for position in level if 0 < position < operations)})
        segment_of_op.append(_split(segment_of_op[-1], starts, parent))
    of = [0] * len(graph.nbytes)
    for value, op in enumerate(graph.producer):
        if op >= 0:
            of[value] = _innermost(segment_of_op, op, min(last[value], operations - 1))
    return Segments(of, parent)


def together(graph: Graph, actions: Sequence[int], segments: Segments) -> Segments:
    """The same with all results of an operation in one segment, the outermost of theirs: the engine
    gives an operation one.
    """
    if len(segments.parent) == 1:
        return segments
    of = list(segments.of)
    for outputs in graph.op_outputs:
        if len(outputs) > 1:
            rebuilt = [of[value] for value in outputs if actions[value] == REBUILD]
            # a parent's number is smaller than its children's
            outermost = min(rebuilt, default=0)
            for value in outputs:
                of[value] = outermost
    return Segments(of, segments.parent)


def _split(around: list[int], starts: list[int], parent: list[int]) -> list[int]:
    """The segment of each operation one level below `around`; adds each new one's parent."""
    operations = len(around)
    numbers = [0] * operations
    for start, stop in pairwise([*starts, operations]):
        parent.append(around[start] if operations else 0)
        numbers[start:stop] = [len(parent) - 1] * (stop - start)
    return numbers


def _innermost(segment_of_op: list[list[int]], op: int, reader: int) -> int:
    """The deepest segment that holds both operations, where all those around it do."""
    innermost = 0
    for numbers in segment_of_op:
        if numbers[op] != numbers[reader]:
            break
        innermost = numbers[op]
    return innermost


def keep_needed(graph: Graph) -> list[int]:
    """What plain autograd does: keep whatever can be kept."""
    return [
        KEEP if p < 0 or not o else REBUILD
        for p, o in zip(graph.producer, graph.unkeepable, strict=True)
    ]
