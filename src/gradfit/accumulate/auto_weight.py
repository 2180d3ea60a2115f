"""`backward(loss, weight="auto")`: the number of items that a mean loss says itself it is the mean
of.
"""

from __future__ import annotations

from typing import Any

import torch

from gradfit.accumulate.loss_arguments import check_loss, read_weight
from gradfit.arguments import Number
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.same_items import are_over_same_items
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
    if denominator.is_sum:
        raise MisuseError(
            "weight='auto' found that this loss is a sum, divided by nothing. Pass weight= the"
            " number of items it is the sum over, with reduction='sum'."
        )
    if any(count is None or count != counts[0] for count in counts):
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
    return None if term.count is None else read_weight(term.count)


def _last_node(loss: torch.Tensor) -> str:
    return "a leaf" if loss.grad_fn is None else loss.grad_fn.name()
