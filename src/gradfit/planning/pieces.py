"""Where a graph can be cut, and the pieces between two cuts as graphs of their own.

A *cut* lies between two operations; what crosses it are the values made before and read after. Cuts where little
crosses (a transformer's residual stream) are where keeping values pays: everything after them can be rebuilt without
going back further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradfit.planning.simulate import KEEP, REBUILD, Segments
from gradfit.profiling.step_graph import Graph

_FEW_CUTS = 40
_NEAR = 64  # operations; what is read from further back is the same for all blocks, such as an attention mask


@dataclass(frozen=True)
class Piece:
    """The operations `start` to `end` as a graph; `values` and `ops` map its ids to the whole graph's.

    What it reads from before is external to it. `forced` are its values that cannot but be kept: read after its end,
    held by the caller anyway, or made by what cannot be replayed.
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
    """Positions where to cut, first and last included: local minima of the bytes that cross, where all can be kept."""
    operations = len(graph.op_inputs)
    last = last_readers(graph)
    crossing = [0] * (operations + 1)
    blocked = [0] * (operations + 1)
    for value, op in enumerate(graph.producer):
        if op >= 0 and last[value] > op:
            crossing[op + 1] += graph.held_bytes[value]
            crossing[last[value] + 1] -= graph.held_bytes[value]
            if graph.overwritten[value]:
                blocked[op + 1] += 1
                blocked[last[value] + 1] -= 1
    for position in range(1, operations + 1):
        crossing[position] += crossing[position - 1]
        blocked[position] += blocked[position - 1]
    free = [position for position in range(1, operations) if not blocked[position]]
    minima = [
        position
        for position in free
        if crossing[position] <= min(crossing[max(1, position - 3) : min(operations, position + 4)])
    ]
    if len(minima) > _FEW_CUTS:  # then the best of each neighbourhood will do
        minima = [
            position
            for position in minima
            if crossing[position] <= 1.5 * min(crossing[max(1, position - 16) : min(operations, position + 17)])
        ]
    spaced: list[int] = []
    for position in minima:
        # On a plateau every third position is enough.
        if spaced and position - spaced[-1] < 3 and crossing[position] >= crossing[spaced[-1]]:
            continue
        spaced.append(position)
    if len(spaced) > most:
        step = operations / most
        best: dict[int, int] = {}
        for position in spaced:
            bucket = int(position / step)
            if bucket not in best or crossing[position] < crossing[best[bucket]]:
                best[bucket] = position
        spaced = sorted(best.values())
    return [0, *spaced, operations]


class Anatomy:
    """Tables of a graph from which its pieces are cut."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last = last_readers(graph)
        self.survives = graph.survives
        operations = len(graph.op_inputs)
        # The nodes in whose time each operation's values are used: those that need them, and those next to these.
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
        """A number that is equal for pieces alike in all but their seconds (a transformer's blocks), and their base.

        The base is the least of the bytes of gradients around, which is left out of the comparison: a step that starts
        without gradients has more of them in every block.
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
        """The operations `start` to `end` (not included) as a graph of their own, with these seconds."""
        graph, last = self.graph, self.last
        values = [value for op in range(start, end) for value in graph.op_outputs[op]]
        inner = len(values)
        local = {value: index for index, value in enumerate(values)}
        for op in range(start, end):
            for value in (*graph.op_inputs[op], *graph.op_overwrites[op]):
                if value not in local:
                    local[value] = len(values)
                    values.append(value)
        nodes = self.nodes(start, end)
        base = min((graph.node_before[node] for node in nodes), default=0)
        size = end - start
        dies = [size if self.survives[v] else min(max(graph.dies[v] - start, 0), size - 1) for v in values]
        piece = Graph(
            nbytes=[graph.nbytes[v] if i < inner else 0 for i, v in enumerate(values)],
            held_bytes=[graph.held_bytes[v] if i < inner else 0 for i, v in enumerate(values)],
            producer=[graph.producer[v] - start if i < inner else -1 for i, v in enumerate(values)],
            dies=dies,
            overwritten=[graph.overwritten[v] for v in values],
            op_inputs=[tuple([local[v] for v in graph.op_inputs[op]]) for op in range(start, end)],
            op_outputs=[tuple([local[v] for v in graph.op_outputs[op]]) for op in range(start, end)],
            op_overwrites=[tuple([local[v] for v in graph.op_overwrites[op]]) for op in range(start, end)],
            op_seconds=op_seconds,
            op_workspace=graph.op_workspace[start:end],
            op_replayable=graph.op_replayable[start:end],
            node_needs=[tuple([local[v] for v in graph.node_needs[n] if local.get(v, inner) < inner]) for n in nodes],
            node_before=[graph.node_before[n] - base for n in nodes],
            node_peak=[graph.node_peak[n] - base for n in nodes],
            node_after=[graph.node_after[n] - base for n in nodes],
            static_bytes=0,
            optimizer_burst_bytes=0,
            plain_seconds=0.0,
            transfer_seconds_per_byte=graph.transfer_seconds_per_byte,
            op_gathered=graph.op_gathered[start:end],
        )
        leaving = [i for i in range(inner) if last[values[i]] >= end]
        forced = [
            i
            for i in range(inner)
            if not graph.overwritten[values[i]]
            and (
                last[values[i]] >= end
                or self.survives[values[i]]
                or graph.held_bytes[values[i]] == 0
                or not graph.op_replayable[graph.producer[values[i]]]
            )
        ]
        return Piece(piece, start, end, values[:inner], forced, leaving)


def nest(graph: Graph, last: Sequence[int], levels: Sequence[Sequence[int]]) -> Segments:
    """Segments inside segments: `levels[d]` are the positions that split at depth d, each containing the ones before.

    A value that crosses a split of depth d belongs to the segment around it, so that it stays while both sides are
    rebuilt; any other belongs to the innermost segment that holds its operation.
    """
    parent = [-1]
    of = [0] * len(graph.nbytes)
    starts = [0]  # first operation of each segment of the level above
    numbers = [0]
    position_of: list[tuple[list[int], list[int]]] = []  # per level: sorted starts, their segment numbers
    operations = len(graph.op_inputs)
    for level in levels:
        cuts = sorted({0, *(p for p in level if 0 < p < operations)})
        new_numbers = []
        above = 0
        for cut in cuts:
            while above + 1 < len(starts) and starts[above + 1] <= cut:
                above += 1
            parent.append(numbers[above])
            new_numbers.append(len(parent) - 1)
        starts, numbers = cuts, new_numbers
        position_of.append((starts, numbers))
    lookups = []
    for starts, numbers in position_of:
        lookup = [0] * operations
        for index, first in enumerate(starts):
            stop = starts[index + 1] if index + 1 < len(starts) else operations
            lookup[first:stop] = [numbers[index]] * (stop - first)
        lookups.append(lookup)
    for value, op in enumerate(graph.producer):
        if op < 0:
            continue
        reader = min(last[value], operations - 1)
        for lookup in lookups:
            if lookup[op] != lookup[reader]:
                break
            of[value] = lookup[op]
    return Segments(of, parent)


def keep_needed(graph: Graph) -> list[int]:
    """What plain autograd does: keep whatever can be kept."""
    return [KEEP if p < 0 or not o else REBUILD for p, o in zip(graph.producer, graph.overwritten, strict=True)]
