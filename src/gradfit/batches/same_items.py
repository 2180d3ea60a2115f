"""Whether the terms of a loss are over the same items, or over one part of the rows each.

Two means over 32 may be two tasks over the same 32 rows, `start_loss + end_loss`, or the rows' own
means over 32 tokens, added up in a loop. What the loss was divided by is the same number in both;
but a micro-batch of the first weighs 32, and one of the second as much as it has rows.

The graph tells them apart: tasks come from one trunk, so the ways back from their reductions meet
in an operation. Rows that were run one by one meet in parameters alone, and rows of one result are
cut out of it along dim 0 on the way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from gradfit.batches.denominator import reductions_below

_LEAF = "torch::autograd::AccumulateGrad"
_ALONG_DIM = {
    "SelectBackward0",
    "SliceBackward0",
    "UnbindBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "IndexSelectBackward0",
}
_OF_ANY_ROWS = {"IndexBackward0"}
_REDUCTIONS = {"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"}


def are_over_same_items(nodes: Sequence[Any]) -> bool:
    """Whether the ways back from all of these reductions meet, without rows being cut out before.

    Args:
        nodes: autograd's node of each term's reduction.

    >>> import torch
    >>> logits = torch.ones(4, 3, requires_grad=True) * 2
    >>> are_over_same_items([logits.mean().grad_fn, logits.square().mean().grad_fn])
    True
    >>> are_over_same_items([row.mean().grad_fn for row in logits])
    False
    """
    groups = _Groups(len(nodes))
    term_of: dict[Any, int] = {}  # by node; the keys keep the nodes' Python objects alive
    # Level by level from all terms at once: tasks usually meet after a few operations.
    reached = deque((node, term) for term, node in enumerate(nodes))
    while reached and groups.number > 1:
        node, term = reached.popleft()
        if node in term_of:
            groups.join(term, term_of[node])
        elif not _cuts_rows(node):  # whose results, of one node, are other rows
            term_of[node] = term
            ways = (way for way, _ in node.next_functions)
            reached.extend((way, term) for way in ways if way is not None and way.name() != _LEAF)
    return groups.number == 1


def rows_are_summed(node: Any) -> bool:
    """Whether a reduction, or one right below it, adds up rows, and there are means over other
    dimensions: `x.mean(1).sum()` is the sum of the rows' own means.

    Args:
        node: autograd's node of a term's reduction.

    >>> import torch
    >>> x = torch.ones(4, 3, requires_grad=True) * 2
    >>> [rows_are_summed(y.grad_fn) for y in (x.mean(1).sum(), x.sum(0).mean(), x.mean(0).sum())]
    [True, True, False]
    """
    if node.name() not in _REDUCTIONS:
        return False
    below = [one for one in reductions_below(node) if one.name() in _REDUCTIONS]
    if not any(one.name().startswith("Mean") for one in [node, *below]):
        return False
    of_rows = next((one for one in reversed(below) if _reduces_rows(one)), node)
    return bool(of_rows.name().startswith("Sum"))


def _reduces_rows(node: Any) -> bool:
    source, place = node.next_functions[0]
    dims = len(source._input_metadata[place].shape)
    return any(_dim(dim, dims) == 0 for dim in node._saved_dim or range(dims))


class _Groups:
    """Which terms have met."""

    def __init__(self, terms: int) -> None:
        self._parents = list(range(terms))
        self.number = terms

    def join(self, first: int, second: int) -> None:
        first, second = self._of(first), self._of(second)
        if first != second:
            self._parents[first] = second
            self.number -= 1

    def _of(self, term: int) -> int:
        while self._parents[term] != term:
            self._parents[term] = self._parents[self._parents[term]]
            term = self._parents[term]
        return term


def _cuts_rows(node: Any) -> bool:
    """Whether the operation took some of its argument's rows."""
    name = node.name()
    if name in _OF_ANY_ROWS:
        return True
    if name not in _ALONG_DIM or node.next_functions[0][0] is None:
        return False
    source, place = node.next_functions[0]
    before = source._input_metadata[place].shape
    return _dim(node._saved_dim, len(before)) == 0 and math.prod(before) != _size(node)


def _size(node: Any) -> int:
    """Of the first thing that it returned."""
    return math.prod(node._input_metadata[0].shape)


def _dim(dim: int, dims: int) -> int:
    """Counted from the front; torch gives a negative one as an unsigned number of 64 bits."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim + dims if dim < 0 else dim
