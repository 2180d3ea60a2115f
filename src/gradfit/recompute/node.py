"""`GraphNode` and `CheckpointNode`: recorded operations as a user sees them, and nodes of a user's
own making.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradfit._torch import detached
from gradfit.arguments import read_callable, read_flag, read_instance, read_tensor
from gradfit.errors import MisuseError
from gradfit.tape import replay
from gradfit.tape.values import Tape, TapeOperation, TapeValue
from gradfit.tape.version_counters import version_of

RecomputeFunction = Callable[[], Sequence[torch.Tensor] | torch.Tensor]


class GraphNode:
    """An operation, its result, and the operations whose results it read (`children`).

    >>> import torch
    >>> x = GraphNode(torch.ones(2), "input")
    >>> y = GraphNode(x.output.exp(), "exp", x)
    >>> y.children[0].operation, y.nbytes
    ('input', 8)

    Args:
        output: the operation's result; None if nobody holds it.
        operation: what was done: an operator of `torch.ops.aten`, or any name.
        children: the nodes whose results it read.
    """

    def __init__(self, output: torch.Tensor | None, operation: Any, *children: GraphNode) -> None:
        if output is not None:
            read_tensor(output, "output", "the operation's result, or None")
        for child in children:
            read_instance(child, "children", GraphNode, "GraphNodes or CheckpointNodes")
        self.operation = operation
        self.children: tuple[GraphNode, ...] = children
        self._output = output

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.operation}, {len(self.children)} children>"

    @property
    def output(self) -> torch.Tensor | None:
        """The result, as long as it is there."""
        return self._output

    @property
    def nbytes(self) -> int:
        """What keeping the result takes."""
        output = self.output
        return 0 if output is None else output.untyped_storage().nbytes()


class CheckpointNode(GraphNode):
    """A node whose result can be kept, or made again.

    `CheckpointScope.nodes()` lists one for each operation that the scope can replay; they hold
    nothing alive. A node can also be made by hand, with functions that make its activations again:

    Args:
        output: the result; None if it is not held.
        operation: its name, or the operator.
        children: the nodes whose results it takes.

    >>> import torch
    >>> x = torch.ones(2)
    >>> node = CheckpointNode(x.exp(), "exp")
    >>> node.add_recompute_function(lambda: [x.exp()])
    >>> [tensor.shape for tensor in node.recompute()]
    [torch.Size([2])]
    """

    def __init__(self, output: torch.Tensor | None, operation: Any, *children: GraphNode) -> None:
        super().__init__(output, operation, *children)
        self.saved_activations: list[torch.Tensor] = []
        self.recompute_functions: list[RecomputeFunction] = []
        self._is_checkpoint = False
        self._values: list[weakref.ref[TapeValue]] = []

    @classmethod
    def of(cls, op: TapeOperation, children: Iterable[CheckpointNode]) -> CheckpointNode:
        """The node of a recorded operation.

        Args:
            op: as the tape has it.
            children: the nodes whose results it takes.
        """
        node = cls(None, op.func, *children)
        node._values = [reference for reference in op.outputs if reference is not None]
        return node

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{', kept' if self.is_checkpoint else ''}>"

    @property
    def output(self) -> torch.Tensor | None:
        """The result, as long as it is there; `recompute()` makes it again."""
        if not self._values:
            return super().output
        value = self._values[0]()
        if value is None:
            return None
        tensor = _unchanged(value)
        return value.tensor if tensor is None else tensor

    @property
    def nbytes(self) -> int:
        """What keeping the results takes."""
        if not self._values:
            return super().nbytes
        total = 0
        for value in self._live():
            size, _, _, dtype = value.geometry
            total += size.numel() * dtype.itemsize
        return total

    @property
    def is_checkpoint(self) -> bool:
        """Whether recomputation starts from here. Set it to keep a recorded result, or to let it go
        again.
        """
        if self._values:
            return any(value.tensor is not None for value in self._live())
        return self._is_checkpoint

    @is_checkpoint.setter
    def is_checkpoint(self, kept: bool) -> None:
        self._is_checkpoint = read_flag(kept, "is_checkpoint")
        for value in self._live():
            if kept:
                _keep(value)
            elif value.op is not None:
                value.tensor = None

    def save_activations(self, *activations: torch.Tensor) -> None:
        """Hold these until `clear_saved_activations()`.

        Args:
            activations: beside those that are held already.
        """
        for activation in activations:
            read_tensor(activation, "activations", "tensors")
        self.saved_activations.extend(activations)

    def add_recompute_function(self, function: RecomputeFunction) -> None:
        """Add a function that returns activations; `recompute()` calls them in the order they were
        added.

        Args:
            function: takes nothing, returns a list of tensors.
        """
        self.recompute_functions.append(
            read_callable(function, "function", "a function that returns tensors", arguments=0)
        )

    def recompute(self) -> list[torch.Tensor]:
        """Make the activations again: by the node's functions, or by replaying the recorded
        operation.

        A node with neither gives what was saved.
        """
        if self.recompute_functions:
            return self._call_functions()
        values = self._live()
        if values:
            return [_replayed(value) for value in values]
        if self.saved_activations:
            return list(self.saved_activations)
        raise MisuseError(
            f"{self!r} cannot be recomputed: its graph is gone, and it has no functions and nothing"
            " saved. Call add_recompute_function() or save_activations() first."
        )

    def _call_functions(self) -> list[torch.Tensor]:
        activations: list[torch.Tensor] = []
        for function in self.recompute_functions:
            result = function()
            activations.extend([result] if isinstance(result, torch.Tensor) else result)
        return activations

    def clear_saved_activations(self) -> None:
        """Let go of what was saved."""
        self.saved_activations.clear()

    def _live(self) -> list[TapeValue]:
        return [value for reference in self._values if (value := reference()) is not None]


def _keep(value: TapeValue) -> None:
    if value.tensor is None:
        there = _unchanged(value)
        tensor = _replayed(value) if there is None else detached(there)
        value.tensor, value.held_version = tensor, tensor._version


def _replayed(value: TapeValue) -> torch.Tensor:
    """What a value is, checked if it is there and rebuilt if it is not."""
    if value.tensor is not None:
        return replay.content(value)
    return replay.rebuild(value, Tape.alone(), retain=False)


def _unchanged(value: TapeValue) -> torch.Tensor | None:
    """The tensor that the forward saw, if nobody has written to it since."""
    tensor = value.unmoved_forward_tensor()
    if tensor is None or value.write_pending or value.version < 0:
        return None
    return tensor if version_of(tensor) == value.version else None


def nodes_from(values: Iterable[TapeValue]) -> list[CheckpointNode]:
    """The nodes of everything that these values are made from, in the order of the forward pass."""
    nodes: dict[TapeOperation, CheckpointNode] = {}
    for op in sorted(_operations_behind(values), key=lambda op: op.index):
        makers = dict.fromkeys(value.op for value in op.inputs)
        nodes[op] = CheckpointNode.of(op, [nodes[maker] for maker in makers if maker in nodes])
    return list(nodes.values())


def _operations_behind(values: Iterable[TapeValue]) -> Iterable[TapeOperation]:
    """All that these values are made by, over whatever steps."""
    operations: dict[TapeOperation, None] = {}
    stack = list(values)
    while stack:
        op = stack.pop().op
        if op is not None and op not in operations:
            operations[op] = None
            stack.extend(op.inputs)
    return operations
