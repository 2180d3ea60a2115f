"""`backward(loss, weight="auto")`: the number of items that a mean loss says itself it is the mean
of.

A loss is c · Σ elements / n. A mean of torch's says what n is, and numbers by which the loss
function has multiplied or divided it are the coefficient c, which must be one number in a window.
Of a sum one of these numbers must be n: one that is known to count its items (`item_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradfit.accumulate.loss_arguments import check_loss, read_weight
from gradfit.accumulate.window_state import WindowState
from gradfit.arguments import Number
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.item_counts import counts_elements, counts_items
from gradfit.batches.same_items import are_over_same_items, rows_are_summed
from gradfit.errors import MisuseError

_MOST_NAMED = 6


class _Mean(NamedTuple):
    """A term as a coefficient times a mean over some items."""

    items: Number
    coefficient: float


class AutoWeight(NamedTuple):
    """What was read from one loss."""

    items: Number
    coefficients: tuple[float, ...] = ()
    """Of each of its terms; none if they do not matter."""


def read_auto_weight(weight: str, loss: Any, reduction: str) -> AutoWeight:
    """What the loss was divided by: the one number that all its terms agree on.

    Raises:
        MisuseError: it is a sum, its terms were divided by different numbers or may be of one part
            of the rows each, or what it was divided by is unknown.
    """
    _require_mean(weight, reduction)
    denominator = read_denominator(check_loss(loss))
    if denominator is None or denominator.unknown or denominator.is_nothing:
        raise _unreadable(denominator, loss)
    means = _means(denominator)
    items = _only_count(denominator, means)
    return AutoWeight(items, tuple(mean.coefficient for mean in means) if items else ())


class WindowCoefficients:
    """The coefficients of a window's first loss, which are those of all of its losses."""

    def __init__(self) -> None:
        self._window: int | None = None  # which it was, by the windows before it
        self._first: tuple[float, ...] = ()

    def require_same(self, coefficients: tuple[float, ...], state: WindowState) -> None:
        """Refuse a loss whose coefficients are others.

        Args:
            coefficients: of a loss that is about to come in; none if it does not matter.
            state: of the window, which has begun.
        """
        if not coefficients:
            return
        if state.is_empty or self._window != state.updates:
            self._window, self._first = state.updates, coefficients
        elif not _are_close(coefficients, self._first):
            raise MisuseError(
                f"weight='auto' found {_in_words(coefficients)} times a mean, and in the window's"
                f" first loss it was {_in_words(self._first)}: a factor that changes within a"
                " window may be for the micro-batches' sizes. Leave `* len(micro) / total` out of"
                " the loss, or pass weight= the number of items, which takes the loss as it is."
            )


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


def _means(denominator: Denominator) -> list[_Mean]:
    """Each term as a mean.

    Raises:
        MisuseError: one of them is none.
    """
    by_torch = [_mean_of_torch(term) for term in denominator.terms]
    known = [mean.items for mean in by_torch if mean is not None]
    means = []
    for term, mean in zip(denominator.terms, by_torch, strict=True):
        mean = mean if mean is not None else _mean_by_hand(term, known)
        if mean is None:
            raise _no_mean(denominator, term)
        means.append(mean)
    return means


def _mean_of_torch(term: Term) -> _Mean | None:
    """A term that torch has divided by the number of its items; None if it has not."""
    if term.is_sum or rows_are_summed(term.node):  # what was divided there is something else
        return None
    assert term.count is not None
    count, scale = read_weight(term.count), abs(float(term.scale))
    _require_not_made_a_sum(term, scale)
    for divisor in map(float, term.divisors):
        # (x * mask).mean() / mask.mean(): a mean of what the mask leaves
        if divisor < 1 and count and counts_items(count * divisor, term.node):
            return _Mean(count * divisor, scale * divisor)
    return _Mean(count, scale)


def _require_not_made_a_sum(term: Term, scale: float) -> None:
    """Refuse mean * n / total, which is the sum divided by something else."""
    divided = math.prod(map(float, term.divisors))
    factor = scale * divided
    is_share = 1 < factor <= divided and float(divided).is_integer()
    if is_share and counts_elements(factor, term.node):
        raise MisuseError(
            f"weight='auto' found {term}, multiplied by {factor:g}, which is its size, and divided"
            f" by {divided:g}. Leave `* {factor:g} / {divided:g}` out of the loss, or pass"
            f" weight= the number of items, which takes the loss as it is."
        )


def _mean_by_hand(term: Term, known: Sequence[Number]) -> _Mean | None:
    """A sum that the loss function has divided by the number of its items; None if none of its
    divisors is known to be that.

    Args:
        term: a sum.
        known: what torch has divided other terms of the loss by.
    """
    divided = math.prod(map(float, term.divisors)) if term.is_sum else 1.0
    for number in map(read_weight, term.divisors):
        # of a sum over no items that is not 0, another term's 0 / 0 would hide that it is lost
        is_known = bool(number) and any(_agree(number, other) for other in known)
        items = number if is_known else counts_items(number, term.node)
        if items is not None:
            share = number / divided if divided else 1.0
            return _Mean(items, abs(float(term.scale)) * share)
    return None


def _no_mean(denominator: Denominator, term: Term) -> MisuseError:
    if not term.divisors:
        alone = len(denominator.terms) == 1
        return MisuseError(
            "weight='auto' found that this loss is a sum, divided by nothing. Pass weight= the"
            " number of items it is the sum over, with reduction='sum'."
            if alone
            else f"weight='auto' found several denominators in one loss: {denominator}. Pass each"
            " by itself, terms={'name': (loss_sum, count), …}, or one weight= for all."
        )
    numbers = " and by ".join(f"{float(number):g}" for number in term.divisors)
    return MisuseError(
        f"weight='auto' found a sum that was divided by {numbers}, and nothing shows that this"
        " counts its items: it may be a constant, or the size of the whole batch. Pass the sum as"
        " it is, backward(loss_sum, weight=n, reduction='sum'), or weight=n if this is the mean"
        " over n items."
    )


def _only_count(denominator: Denominator, means: Sequence[_Mean]) -> Number:
    """What every term of the loss was divided by."""
    count = means[0].items
    if not all(_agree(mean.items, count) for mean in means):
        raise MisuseError(
            f"weight='auto' found several denominators in one loss: {denominator}. Pass each by"
            " itself, terms={'name': (loss_sum, count), …}, or one weight= for all."
        )
    if len(means) > 1 and not are_over_same_items([term.node for term in denominator.terms]):
        raise MisuseError(
            f"weight='auto' found {len(means)} means in one loss ({denominator}) that may be of"
            " other rows each, as in a loop over rows. Pass weight= the number of items that the"
            " loss is the mean of, or terms={'name': (loss_sum, count), …}."
        )
    return read_weight(count)


def _agree(count: Number, other: Number) -> bool:
    """Counts are equal; sums of class weights up to the order in which they were added."""
    is_whole = float(count).is_integer() and float(other).is_integer()
    return count == other or (not is_whole and math.isclose(count, other, rel_tol=1e-6))


def _are_close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return len(numbers) == len(others) and all(
        math.isclose(number, other, rel_tol=1e-5)
        for number, other in zip(numbers, others, strict=True)
    )


def _in_words(coefficients: Sequence[float]) -> str:
    return ", ".join(f"{one:g}" for one in coefficients[:_MOST_NAMED]) + (
        ", …" if len(coefficients) > _MOST_NAMED else ""
    )


def _last_node(loss: torch.Tensor) -> str:
    return "a leaf" if loss.grad_fn is None else loss.grad_fn.name()
