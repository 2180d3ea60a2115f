"""`AutogradContext`: look at what autograd does and holds, and stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradfit import _torch
from gradfit.errors import GraphError, MisuseError
from gradfit.toolbox.autograd_graph import AutogradGraph, graph_of
from gradfit.toolbox.autograd_nodes import backward_order, operation_name
from gradfit.toolbox.origin import OriginRecorder
from gradfit.toolbox.saved_by_autograd import live_results
from gradfit.toolbox.saved_memory import MemoryStats, measure

P = ParamSpec("P")
R = TypeVar("R")


class _OnClassToo(Generic[P, R]):
    """A method that can be called on the class as well: it then gets None for its context."""

    def __init__(self, function: Callable[Concatenate[AutogradContext | None, P], R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, context: AutogradContext | None, owner: type) -> Callable[P, R]:
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return self.function(context, *args, **kwargs)

        bound.__doc__ = self.__doc__
        return bound


class AutogradContext:
    """What autograd did and what it holds, for the forward passes inside `with AutogradContext() as
    context:`.

    A context counts what was made inside its block, so neither parameters nor a batch that was
    there before. On the class itself (`AutogradContext.memory_stats()`) the methods speak of every
    graph alive in the process; what only a recording can know (module, source line, cost of
    rebuilding, what was there before) is then left out.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> with AutogradContext() as context:
    ...     loss = model(torch.ones(16, 4)).sum()
    >>> context.memory_stats().by_module  # ReLU's result, and the batch, which was made inside
    {'1': 512, '0': 256}
    >>> [(entry.op, entry.module) for entry in context.graph(loss)][-3:]
    [('T', '2'), ('Addmm', '2'), ('Sum', '')]
    """

    def __init__(self) -> None:
        self._recorder: OriginRecorder | None = None
        self._entered = False

    def __enter__(self) -> AutogradContext:
        if self._entered:
            raise MisuseError(
                "This AutogradContext is entered already. Make another for a nested block."
            )
        self._recorder = self._recorder or OriginRecorder()
        self._recorder.__enter__()
        self._entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered = False
        if self._recorder is not None:
            self._recorder.__exit__(*error)

    @staticmethod
    def no_grad() -> torch.no_grad:
        """A block, or a function, in which nothing is recorded: `torch.no_grad()`.

        >>> w = torch.ones(2, requires_grad=True)
        >>> with AutogradContext.no_grad():
        ...     (w * 2).requires_grad
        False
        """
        return torch.no_grad()

    @_OnClassToo
    def memory_stats(self: AutogradContext | None) -> MemoryStats:
        """What is held for backward passes still to come: by operation, by module, by source
        line.
        """
        return measure(_nodes(self), self._recorder if self is not None else None)

    @_OnClassToo
    def graph(self: AutogradContext | None, loss: Tensor) -> AutogradGraph:
        """The operations behind a loss, in the order in which they ran."""
        return graph_of(loss, self._recorder if self is not None else None)

    @_OnClassToo
    def clear(self: AutogradContext | None) -> None:
        """Give back what the graphs hold, and forget what was recorded.

        A loss that is kept (in a list, for a plot) keeps its whole graph; this frees the
        activations all the same. A backward pass through a cleared graph is a `GraphError`.
        Gradients, and what a `CheckpointScope` keeps to rebuild from, are left alone.
        """
        if self is not None and self._entered:
            raise MisuseError(
                "clear() inside the block would lose what is being recorded. Call it after the"
                " block."
            )
        # The slots of the nodes, not the nodes: whoever holds a loss holds its whole graph.
        for node in _nodes(self):
            _release(node)
        if self is not None:
            self._recorder = None


def _release(node: Node) -> None:
    """Give back what a node saved, and let a backward pass through it say so."""
    for slot in _torch.saved_slots(node):
        slot.release(_Cleared(operation_name(node)))


class _Cleared:
    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __call__(self, packed: object) -> NoReturn:
        raise GraphError(
            f"{self.operation} cannot run backward: AutogradContext.clear() has given back what it"
            " saved. Compute the loss again, and call backward before clear()."
        )


def _nodes(context: AutogradContext | None) -> list[Node]:
    """The nodes that are alive, first operation first: those of a recording, or all."""
    nodes = backward_order(*live_results())[::-1]
    recorder = context._recorder if context is not None else None
    return (
        nodes
        if recorder is None
        else [node for node in nodes if recorder.origin_of(node) is not None]
    )
