"""Walking autograd's graph from a result back to its leaves."""

from __future__ import annotations

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
    done: list[Node] = []
    seen: set[Node] = set()
    for result in results:
        root = result.grad_fn
        stack = [] if root is None or root in seen else [(root, iter(root.next_functions))]
        seen.update(node for node, _ in stack)
        while stack:
            # One child at a time: a node is done once everything that it took its inputs from is,
            # which is why what is left of its children waits on the stack with it.
            node, rest = stack[-1]
            for child, _ in rest:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, iter(child.next_functions)))
                    break
            else:
                done.append(node)
                stack.pop()
    return done[::-1]


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
