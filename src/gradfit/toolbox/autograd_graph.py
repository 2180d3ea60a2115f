"""The graph behind a loss as a record: operations in the order in which they ran, as table, DOT and
JSON.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradfit import _torch, records
from gradfit.arguments import read_index, read_instance, read_list, read_tensor
from gradfit.errors import GraphError, MisuseError
from gradfit.toolbox.autograd_nodes import backward_order, leaf_of, operation_name
from gradfit.toolbox.origin import Origin, OriginRecorder
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
        return sum({s.storage: s.nbytes for s in self.saved_tensors if not s.is_parameter}.values())


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
        saved = (
            one for entry in self.entries for one in entry.saved_tensors if not one.is_parameter
        )
        return sum({one.storage: one.nbytes for one in saved}.values())

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
        names = {leaf.value: leaf.name or f"%{leaf.value}" for leaf in self.leaves}
        header = ("value", "operation", "inputs", "shape", "saved", "module", "source line")
        rows = [header, *(_row(entry, names) for entry in self.entries)]
        widths = [min(44, max(map(len, column))) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(_fit(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def to_dot(self) -> str:
        """For Graphviz: operations as boxes, leaves as ellipses, edges as values."""
        lines = ["digraph autograd {", "  rankdir=TB; node [fontname=monospace, shape=box];"]
        maker = {
            value: f"op{at}" for at, entry in enumerate(self.entries) for value in entry.outputs
        }
        for leaf in self.leaves:
            maker[leaf.value] = f"leaf{leaf.value}"
            label = f"{leaf.name or 'leaf'} {'×'.join(map(str, leaf.shape))}"
            lines.append(f"  leaf{leaf.value} [shape=ellipse, label={_quoted(label)}];")
        for at, entry in enumerate(self.entries):
            label = "\n".join(
                text for text in (entry.op, entry.module, format_bytes(entry.saved_bytes)) if text
            )
            lines.append(f"  op{at} [label={_quoted(label)}];")
        for at, entry in enumerate(self.entries):
            lines += [
                f"  {maker[value]} -> op{at} [label={_quoted(f'%{value}')}];"
                for value in entry.inputs
            ]
        return "\n".join([*lines, "}"])

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
    maker: dict[int, int] = {}
    for position, entry in enumerate(given):
        read_instance(entry, f"entries[{position}]", GradientEntry, "AutogradContext.graph(loss)")
        for value in entry.outputs:
            if maker.setdefault(value, position) != position:
                raise MisuseError(
                    f"entries[{maker[value]}] and entries[{position}] both have the output {value}."
                    " Pass the entries of one graph, each once."
                )
    needs = {
        at: [maker[value] for value in entry.inputs if value in maker]
        for at, entry in enumerate(given)
    }
    try:
        return list(graphlib.TopologicalSorter(needs).static_order())[::-1]
    except graphlib.CycleError as error:
        circle = ", ".join(given[at].op for at in error.args[1])
        raise GraphError(
            f"entries hold a circle: {circle}. Pass those of AutogradContext.graph(loss)."
        ) from error


def _row(entry: GradientEntry, names: dict[int, str]) -> tuple[str, ...]:
    """One operation's cells in the table; `names` are those of leaves, by value."""
    return (
        ", ".join(f"%{value}" for value in entry.outputs),
        entry.op,
        ", ".join(names.get(value, f"%{value}") for value in entry.inputs),
        " ".join("×".join(map(str, shape)) or "scalar" for shape in entry.shapes),
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
    nodes = backward_order(loss)[::-1]
    owned = parameter_storages(nodes)
    storages: dict[int, int] = {}
    values: dict[tuple[Node, int], int] = {}
    entries: list[GradientEntry] = []
    leaves: list[Leaf] = []
    for node in nodes:
        leaf = leaf_of(node)
        shapes = tuple(_torch.result_shapes(node)) if leaf is None else (tuple(leaf.shape),)
        made = tuple(values.setdefault((node, at), len(values)) for at in range(len(shapes)))
        if leaf is not None:
            leaves.append(
                Leaf(
                    made[0], recorder.names.get(id(leaf), "") if recorder else "", tuple(leaf.shape)
                )
            )
            continue
        origin = (recorder.origin_of(node) if recorder else None) or Origin()
        saved = []
        for name, tensor in saved_by(node):
            storage, nbytes = storage_of(tensor)
            known = storages.setdefault(storage, len(storages))
            dtype = str(tensor.dtype).removeprefix("torch.")
            saved.append(
                SavedTensor(name, tuple(tensor.shape), dtype, nbytes, known, storage in owned)
            )
        inputs = tuple(values[child, at] for child, at in node.next_functions if child is not None)
        entries.append(
            GradientEntry(
                operation_name(node),
                inputs,
                made,
                shapes,
                tuple(saved),
                origin.module,
                origin.source,
            )
        )
    return AutogradGraph(tuple(entries), tuple(leaves))


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else "…" + text[1 - width :]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
