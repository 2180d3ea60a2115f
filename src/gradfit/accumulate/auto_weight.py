"""`backward(loss, weight="auto")`: the number of items that a mean loss says itself it is the mean
of.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gradfit.accumulate.loss_arguments import check_loss, read_weight
from gradfit.arguments import Number
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.same_items import are_over_same_items, rows_are_summed
from gradfit.errors import MisuseError


def read_auto_weight(weight: str, loss: Any, reduction: str) -> Number:
    """What the loss was divided by; the one number that all its terms agree on.

    Raises:
        MisuseError: it is a sum, its terms were divided by different numbers or may be of one part
            of the rows each, or what it was divided by is unknown.
    """
    _require_mean(weight, reduction)
    denominator = read_denominator(check_loss(loss))
    if denominator is None or denominator.unknown or denominator.is_nothing:
        raise _unreadable(denominator, loss)
    return _only_count(denominator)


def _unreadable(denominator: Denominator | None, loss: Any) -> MisuseError:
    unknown = denominator.unknown if denominator is not None else ()
    name = unknown[0] if unknown else _last_node(loss)
    return MisuseError(
        f"weight='auto' cannot read what this loss was divided by: it comes from {name}. Pass"
        " weight= the number of items it is the mean of, or the sum with reduction='sum'."
    )


def _require_mean(weight: str, reduction: str) -> None:
    if weight != "auto":
        raise MisuseError(
            f"weight={weight!r} is not a number. Pass how many items the loss is about, or 'auto'."
        )
    if reduction != "mean":
        raise MisuseError(
            f"weight='auto' reads a mean, and reduction={reduction!r}. Pass weight= the number of"
            " items."
        )


def _only_count(denominator: Denominator) -> Number:
    """What every term of the loss was divided by."""
    counts = [*map(_count_of, denominator.terms)]
    if all(count is None for count in counts):
        raise MisuseError(
            "weight='auto' found that this loss is a sum, divided by nothing. Pass weight= the"
            " number of items it is the sum over, with reduction='sum'."
        )
    if not all(_agree(count, counts[0]) for count in counts):
        raise MisuseError(
            f"weight='auto' found several denominators in one loss: {denominator}. Pass each by"
            " itself, terms={'name': (loss_sum, count), …}, or one weight= for all."
        )
    if len(counts) > 1 and not are_over_same_items([term.node for term in denominator.terms]):
        raise MisuseError(
            f"weight='auto' found {len(counts)} means in one loss ({denominator}) that may be of"
            " other rows each, as in a loop over rows. Pass weight= the number of items that the"
            " loss is the mean of, or terms={'name': (loss_sum, count), …}."
        )
    return read_weight(counts[0])


def _count_of(term: Term) -> Number | None:
    """What the term's sum over the rows was divided by; None if it was not."""
    count = term.count
    if rows_are_summed(term.node):  # what was divided there are means over something else
        count = term.divided
    elif count is not None and term.divided_by_tensors is not None:
        count = count * term.divided_by_tensors
    return None if count is None else read_weight(count)


def _agree(count: Number | None, other: Number | None) -> bool:
    """Counts are equal; sums of class weights up to the order in which they were added."""
    if count is None or other is None:
        return False
    is_whole = float(count).is_integer() and float(other).is_integer()
    return count == other or (not is_whole and math.isclose(count, other, rel_tol=1e-6))


def _last_node(loss: torch.Tensor) -> str:
    return "a leaf" if loss.grad_fn is None else loss.grad_fn.name()
