"""Where a graph can be cut, and the pieces between two cuts as graphs of their own.

A *cut* lies between two operations; what crosses it are the values made before and read after. Cuts
where little crosses (a transformer's residual stream) are where keeping values pays: everything
after them can be rebuilt without going back further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gradfit.planning.simulate import KEEP, REBUILD, Segments
from gradfit.profiling.step_graph import Graph

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
    crossing, overwritten = _what_crosses(graph)
    free = [position for position in range(1, operations) if not overwritten[position]]
    minima = [
        position for position in free if crossing[position] <= _least_near(crossing, position, 3)
    ]
    if len(minima) > _FEW_CUTS:  # then the best of each neighbourhood will do
        minima = [p for p in minima if crossing[p] <= 1.5 * _least_near(crossing, p, 16)]
    return [0, *_at_most(most, _thinned(minima, crossing), crossing), operations]


def _what_crosses(graph: Graph) -> tuple[list[int], list[int]]:
    """For each position the bytes that are made before it and read after it, and how many values
    that are written over.

    These cannot be kept as they are, so no cut can go through them.
    """
    operations = len(graph.op_inputs)
    last = last_readers(graph)
    crossing, overwritten = [0] * (operations + 1), [0] * (operations + 1)
    for value, op in enumerate(graph.producer):
        if op < 0 or last[value] <= op:
            continue
        for counts, amount in (
            (crossing, graph.held_bytes[value]),
            (overwritten, int(graph.overwritten[value])),
        ):
            counts[op + 1] += amount
            counts[last[value] + 1] -= amount
    return list(accumulate(crossing)), list(accumulate(overwritten))


def _least_near(crossing: list[int], position: int, distance: int) -> int:
    return min(
        crossing[max(1, position - distance) : min(len(crossing) - 1, position + distance + 1)]
    )


def _thinned(minima: list[int], crossing: list[int]) -> list[int]:
    """On a plateau every third position is enough."""
    spaced: list[int] = []
    for position in minima:
        if not spaced or position - spaced[-1] >= 3 or crossing[position] < crossing[spaced[-1]]:
            spaced.append(position)
    return spaced


def _at_most(most: int, positions: list[int], crossing: list[int]) -> list[int]:
    """No more than so many positions, spread over the graph: of each stretch the one where least
    crosses.
    """
    if len(positions) <= most:
        return positions
    stretch = (len(crossing) - 1) / most
    best: dict[int, int] = {}
    for position in positions:
        number = int(position / stretch)
        if number not in best or crossing[position] < crossing[best[number]]:
            best[number] = position
    return sorted(best.values())


class Anatomy:
    """Tables of a graph from which its pieces are cut."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last = last_readers(graph)
        self.survives = graph.survives
        operations = len(graph.op_inputs)
        # The nodes in whose time each operation's values are used: those that need them, and those
        # next to these.
        self.nodes_of: list[list[int]] = [[] for _ in range(operations)]
        owner = operations - 1
        for node, needs in enumerate(graph.node_needs):
            made = {graph.producer[value] for value in needs if graph.producer[value] >= 0}
            owner = max(made) if made else owner
            for op in made | {owner}:
                self.nodes_of[op].append(node)
        self._position = [0] * len(graph.nbytes)
        for outputs in graph.op_outputs:
            for place, value in enumerate(outputs):
                self._position[value] = place

    def nodes(self, start: int, end: int) -> list[int]:
        return sorted({node for op in range(start, end) for node in self.nodes_of[op]})

    def kind(self, start: int, end: int) -> tuple[int, int]:
        """A number that is equal for pieces alike in all but their seconds (a transformer's
        blocks), and their base.

        The base is the least of the bytes of gradients around, which is left out of the comparison:
        a step that starts without gradients has more of them in every block.
        """
        graph, position = self.graph, self._position
        nodes = self.nodes(start, end)
        base = min((graph.node_before[node] for node in nodes), default=0)
        low = start

        def near(value: int) -> tuple[int, int]:
            op = graph.producer[value]
            if op >= 0 and low - op <= _NEAR:
                return op - low, position[value]
            return -_NEAR - 1, 0 if op < 0 else 1

        ops = tuple(
            (
                tuple(near(v) for v in graph.op_inputs[op]),
                tuple(near(v) for v in graph.op_overwrites[op]),
                graph.op_workspace[op],
                graph.op_gathered[op],
                graph.op_replayable[op],
                tuple(
                    (
                        graph.nbytes[v],
                        graph.held_bytes[v],
                        graph.overwritten[v],
                        self.last[v] - op,
                        self.survives[v] or min(graph.dies[v] - op, _NEAR),
                    )
                    for v in graph.op_outputs[op]
                ),
            )
            for op in range(start, end)
        )
        needs = tuple(
            (
                tuple(near(v) for v in graph.node_needs[n]),
                graph.node_before[n] - base,
                graph.node_peak[n] - base,
            )
            for n in nodes
        )
        return hash((ops, needs)), base

    def piece(self, start: int, end: int, op_seconds: list[float]) -> Piece:
        """The operations `start` to `end` (not included) as a graph of their own, with these
        seconds.
        """
        made = [value for op in range(start, end) for value in self.graph.op_outputs[op]]
        forced = [index for index, value in enumerate(made) if self._is_forced(value, end)]
        leaving = [index for index, value in enumerate(made) if self.last[value] >= end]
        return Piece(
            self._graph_of(start, end, made, op_seconds), start, end, made, forced, leaving
        )

    def _is_forced(self, value: int, end: int) -> bool:
        """Whether a piece that ends here cannot but keep this value."""
        graph = self.graph
        return not graph.overwritten[value] and (
            self.last[value] >= end
            or self.survives[value]
            or graph.held_bytes[value] == 0
            or not graph.op_replayable[graph.producer[value]]
        )

    def _graph_of(self, start: int, end: int, made: list[int], op_seconds: list[float]) -> Graph:
        """The piece as a graph: its first values are `made`, then come those that it reads from
        before, of no bytes.
        """
        graph, size, inner = self.graph, end - start, len(made)
        read = [
            v for op in range(start, end) for v in (*graph.op_inputs[op], *graph.op_overwrites[op])
        ]
        values = list(dict.fromkeys([*made, *read]))
        local = {value: index for index, value in enumerate(values)}
        from_before = [0] * (len(values) - inner)
        nodes = self.nodes(start, end)
        base = min((graph.node_before[node] for node in nodes), default=0)

        def renumbered(lists: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
            return [tuple([local[value] for value in one]) for one in lists[start:end]]

        def dies(value: int) -> int:
            return (
                size if self.survives[value] else min(max(graph.dies[value] - start, 0), size - 1)
            )

        return Graph(
            nbytes=[graph.nbytes[v] for v in made] + from_before,
            held_bytes=[graph.held_bytes[v] for v in made] + from_before,
            producer=[graph.producer[v] - start for v in made] + [-1] * len(from_before),
            dies=[dies(v) for v in values],
            overwritten=[graph.overwritten[v] for v in values],
            op_inputs=renumbered(graph.op_inputs),
            op_outputs=renumbered(graph.op_outputs),
            op_overwrites=renumbered(graph.op_overwrites),
            op_seconds=op_seconds,
            op_workspace=graph.op_workspace[start:end],
            op_replayable=graph.op_replayable[start:end],
            node_needs=[
                tuple([local[v] for v in graph.node_needs[node] if local.get(v, inner) < inner])
                for node in nodes
            ],
            node_before=[graph.node_before[node] - base for node in nodes],
            node_peak=[graph.node_peak[node] - base for node in nodes],
            node_after=[graph.node_after[node] - base for node in nodes],
            static_bytes=0,
            optimizer_burst_bytes=0,
            plain_seconds=0.0,
            transfer_seconds_per_byte=graph.transfer_seconds_per_byte,
            op_gathered=graph.op_gathered[start:end],
        )


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
        numbers = [0] * operations
        for start, stop in pairwise([*starts, operations]):
            parent.append(segment_of_op[-1][start] if operations else 0)
            numbers[start:stop] = [len(parent) - 1] * (stop - start)
        segment_of_op.append(numbers)
    of = [0] * len(graph.nbytes)
    for value, op in enumerate(graph.producer):
        if op >= 0:
            of[value] = _innermost(segment_of_op, op, min(last[value], operations - 1))
    return Segments(of, parent)


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
        for p, o in zip(graph.producer, graph.overwritten, strict=True)
    ]
