"""The graph behind a loss as a record: operations in the order in which they ran, as table, DOT and
JSON.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradfit import _torch, records
from gradfit.arguments import read_index, read_instance, read_list, read_tensor
from gradfit.errors import GraphError, MisuseError
from gradfit.toolbox.autograd_nodes import backward_order, leaf_of, operation_name
from gradfit.toolbox.origin import OriginRecorder, find_origin
from gradfit.toolbox.saved_by_autograd import SavedTensor, parameter_storages, saved_by, storage_of
from gradfit.units import format_bytes


@dataclass(frozen=True)
class Leaf:
    """A value that no operation made: a parameter, or an input that requires a gradient."""

    value: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GradientEntry:
    """One operation: the values it took and made, and what it saved for its backward.

    Only values that carry a gradient are in the graph, so constants are not among the inputs.

    Attributes:
        op: autograd's name of it.
        inputs: numbers of the values it took.
        outputs: numbers of the values it made.
        shapes: of the outputs.
        saved_tensors: what it holds for its backward.
        module: that ran it, if that is known.
        source: file and line that ran it, if that is known.
    """

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    saved_tensors: tuple[SavedTensor, ...]
    module: str = ""
    source: str = ""

    @property
    def operation(self) -> str:
        return self.op

    @property
    def output(self) -> int:
        """The first of the outputs; most operations have one."""
        return self.outputs[0]

    @property
    def saved_bytes(self) -> int:
        """The bytes of what it saved, each storage once, without parameters."""
        return _bytes_of_storages(self.saved_tensors)


def _bytes_of_storages(tensors: Iterable[SavedTensor]) -> int:
    """Each storage once, without parameters."""
    return sum({one.storage: one.nbytes for one in tensors if not one.is_parameter}.values())


@dataclass(frozen=True)
class AutogradGraph:
    """The operations behind a loss, each after those it depends on; prints itself as a table.

    Attributes:
        entries: the operations, each after those it depends on.
        leaves: what the loss is differentiated by.
    """

    entries: tuple[GradientEntry, ...]
    leaves: tuple[Leaf, ...]

    def __iter__(self) -> Iterator[GradientEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, position: int) -> GradientEntry:
        return self.entries[read_index(position, "position", len(self.entries))]

    @property
    def saved_bytes(self) -> int:
        """The bytes of everything saved, each storage once, without parameters."""
        return _bytes_of_storages(saved for entry in self.entries for saved in entry.saved_tensors)

    def to_json(self) -> str:
        return records.to_json(self)

    @staticmethod
    def from_json(text: str) -> AutogradGraph:
        """Read what `to_json` wrote; running no code.

        Args:
            text: a JSON document.
        """
        return records.from_json(AutogradGraph, text)

    def to_table(self) -> str:
        """One line per operation."""
        names = {leaf.value: leaf.name for leaf in self.leaves if leaf.name}
        header = ("value", "operation", "inputs", "shape", "saved", "module", "source line")
        rows = [header, *(_row(entry, names) for entry in self.entries)]
        widths = [min(44, max(map(len, column))) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(_fit, row, widths)).rstrip() for row in rows)

    def to_dot(self) -> str:
        """For Graphviz: operations as boxes, leaves as ellipses, edges as values."""
        lines = ["digraph autograd {", "  rankdir=TB; node [fontname=monospace, shape=box];"]
        lines += map(_leaf_in_dot, self.leaves)
        lines += itertools.starmap(_operation_in_dot, enumerate(self.entries))
        return "\n".join([*lines, *self._edges_in_dot(), "}"])

    def _edges_in_dot(self) -> Iterator[str]:
        makers = {leaf.value: f"leaf{leaf.value}" for leaf in self.leaves}
        for at, entry in enumerate(self.entries):
            makers |= dict.fromkeys(entry.outputs, f"op{at}")
        for at, entry in enumerate(self.entries):
            for value in entry.inputs:
                yield f"  {makers[value]} -> op{at} [label={_quoted(f'%{value}')}];"

    def __str__(self) -> str:
        return self.to_table()


def topological_sort(entries: Iterable[GradientEntry]) -> list[int]:
    """The positions of the entries in an order of the backward pass: each before those whose
    results it took.

    >>> x = GradientEntry("Exp", (0,), (1,), ((),), ())
    >>> y = GradientEntry("Sum", (1,), (2,), ((),), ())
    >>> topological_sort([x, y]), topological_sort([y, x])
    ([1, 0], [0, 1])

    Args:
        entries: the operations of a graph in any order, `AutogradContext.graph(loss)` for example.

    Raises:
        GraphError: an operation needs its own result.
    """
    given = read_list(entries, "entries", "AutogradContext.graph(loss)")
    makers = _makers_of_values(given)
    needs = {
        at: [makers[value] for value in entry.inputs if value in makers]
        for at, entry in enumerate(given)
    }
    try:
        return list(graphlib.TopologicalSorter(needs).static_order())[::-1]
    except graphlib.CycleError as error:
        circle = ", ".join(given[at].op for at in error.args[1])
        raise GraphError(
            f"entries hold a circle: {circle}. Pass those of AutogradContext.graph(loss)."
        ) from error


def _makers_of_values(entries: list[GradientEntry]) -> dict[int, int]:
    """The position of the entry that made each value, of which there is one."""
    makers: dict[int, int] = {}
    for position, entry in enumerate(entries):
        read_instance(entry, f"entries[{position}]", GradientEntry, "AutogradContext.graph(loss)")
        for value in entry.outputs:
            if makers.setdefault(value, position) != position:
                raise MisuseError(
                    f"entries[{makers[value]}] and entries[{position}] both have the output"
                    f" {value}. Pass the entries of one graph, each once."
                )
    return makers


def _row(entry: GradientEntry, names: dict[int, str]) -> tuple[str, ...]:
    """One operation's cells in the table; `names` are those of leaves, by value."""
    return (
        ", ".join(f"%{value}" for value in entry.outputs),
        entry.op,
        ", ".join(names.get(value, f"%{value}") for value in entry.inputs),
        " ".join(_show_shape(shape) or "scalar" for shape in entry.shapes),
        format_bytes(entry.saved_bytes) if entry.saved_bytes else "",
        entry.module,
        entry.source,
    )


def graph_of(loss: Tensor, recorder: OriginRecorder | None) -> AutogradGraph:
    """Write down the graph behind a tensor."""
    read_tensor(loss, "loss", "the tensor that the model's loss returned")
    if not loss.requires_grad:
        raise GraphError(
            "loss has no graph. Compute it with requires_grad=True, outside no_grad()."
        )
    writer = _GraphWriter(backward_order(loss)[::-1], recorder)
    return AutogradGraph(tuple(writer.entries), tuple(writer.leaves))


class _GraphWriter:
    """Numbers values and storages in the order of the nodes, first operation first."""

    def __init__(self, nodes: list[Node], recorder: OriginRecorder | None) -> None:
        self.entries: list[GradientEntry] = []
        self.leaves: list[Leaf] = []
        self._recorder = recorder
        self._owned = parameter_storages(nodes)
        self._storages: dict[int, int] = {}
        self._values: dict[tuple[Node, int], int] = {}
        for node in nodes:
            leaf = leaf_of(node)
            if leaf is None:
                self.entries.append(self._describe_operation(node))
            else:
                self.leaves.append(self._describe_leaf(node, leaf))

    def _describe_leaf(self, node: Node, leaf: Tensor) -> Leaf:
        (value,) = self._number(node, 1)
        name = self._recorder.names.get(id(leaf), "") if self._recorder else ""
        return Leaf(value, name, tuple(leaf.shape))

    def _describe_operation(self, node: Node) -> GradientEntry:
        shapes = tuple(_torch.result_shapes(node))
        outputs = self._number(node, len(shapes))
        origin = find_origin(self._recorder, node)
        return GradientEntry(
            operation_name(node),
            self._numbers_of_inputs(node),
            outputs,
            shapes,
            tuple(self._describe_saved(name, tensor) for name, tensor in saved_by(node)),
            origin.module,
            origin.source,
        )

    def _number(self, node: Node, count: int) -> tuple[int, ...]:
        """The numbers of the values that a node made, counted over the whole graph."""
        return tuple(self._values.setdefault((node, at), len(self._values)) for at in range(count))

    def _numbers_of_inputs(self, node: Node) -> tuple[int, ...]:
        """Those that carry a gradient, which other nodes have made."""
        edges = node.next_functions
        return tuple(self._values[child, at] for child, at in edges if child is not None)

    def _describe_saved(self, name: str, tensor: Tensor) -> SavedTensor:
        storage, nbytes = storage_of(tensor)
        number = self._storages.setdefault(storage, len(self._storages))
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_parameter = storage in self._owned
        return SavedTensor(name, tuple(tensor.shape), dtype, nbytes, number, is_parameter)


def _leaf_in_dot(leaf: Leaf) -> str:
    label = f"{leaf.name or 'leaf'} {_show_shape(leaf.shape)}"
    return f"  leaf{leaf.value} [shape=ellipse, label={_quoted(label)}];"


def _operation_in_dot(position: int, entry: GradientEntry) -> str:
    label = "\n".join(filter(None, (entry.op, entry.module, format_bytes(entry.saved_bytes))))
    return f"  op{position} [label={_quoted(label)}];"


def _show_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else "…" + text[1 - width :]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
