"""Walking autograd's graph from a result back to its leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node


def backward_order(*results: Tensor) -> list[Node]:
    """Every operation behind `results`, each before those it took its inputs from: the order of the
    backward pass.

    A reversed depth-first postorder, with a stack of its own: a graph may be deeper than Python's.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [operation_name(node) for node in backward_order((x * 2).sum())]
    ['Sum', 'Mul', 'AccumulateGrad']
    """
    seen: set[Node] = set()
    done = [node for result in results for node in _postorder(result.grad_fn, seen)]
    return done[::-1]


def _postorder(root: Node | None, seen: set[Node]) -> Iterator[Node]:
    """The nodes from `root` on that were not seen, each after those it took its inputs from."""
    stack = [(node, _inputs_of(node, seen)) for node in _unseen([root], seen)]
    while stack:
        # One input at a time: a node is done once all of its inputs are, which is why what is left
        # of them waits on the stack with it.
        node, inputs = stack[-1]
        child = next(inputs, None)
        if child is None:
            stack.pop()
            yield node
        else:
            stack.append((child, _inputs_of(child, seen)))


def _inputs_of(node: Node, seen: set[Node]) -> Iterator[Node]:
    return _unseen((child for child, _ in node.next_functions), seen)


def _unseen(nodes: Iterable[Node | None], seen: set[Node]) -> Iterator[Node]:
    """Those that nobody has been given yet; asked one by one, since others are given meanwhile."""
    for node in nodes:
        if node is not None and node not in seen:
            seen.add(node)
            yield node


def leaf_of(node: Node) -> Tensor | None:
    """The leaf tensor a node accumulates a gradient into; None for an operation."""
    # By type, not by attribute: the context of a custom Function holds whatever its author puts
    # there.
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


def operation_name(node: Node) -> str:
    """The operation a node is the backward of, as its author called it.

    >>> import torch
    >>> operation_name(torch.ones(1, requires_grad=True).sum().grad_fn)
    'Sum'
    """
    name = type(node).__name__ if not node.name() else node.name()
    name = name.rpartition("::")[2]
    stem, marker, _ = name.rpartition("Backward")
    return stem if marker and stem else name
