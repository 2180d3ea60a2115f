"""What the parts of one batch weigh, and that readings which do not go together stop it."""

from __future__ import annotations

import pytest
import torch

import gradfit as gf
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.loss import PartLoss, read_loss
from gradfit.batches.totals import LossTotals, means_of
from gradfit.batches.weights import BatchWeights, CountFirst


def part(rows: int, items: int, *, second: int | None = None, count: int | None = None) -> PartLoss:
    """The mean of `items` elements, and of `second` more."""
    loss = torch.ones(items, requires_grad=True).mean()
    if second is not None:
        loss = loss + torch.ones(second, requires_grad=True).mean()
    return read_loss(loss if count is None else (loss, count), rows)


def test_a_mean_is_weighted_by_what_it_was_divided_by() -> None:
    weights = BatchWeights(Additivity("divisor", roles=("adds",)), 8)
    assert [weights.of(part(4, n))[:2] for n in (20, 7)] == [(20, "mean"), (7, "mean")]


def test_rows_and_counts() -> None:
    assert BatchWeights(Additivity("rows"), 8).of(part(3, 20))[:2] == (3, "mean")
    assert BatchWeights(None, 8).of(part(3, 20))[:2] == (3, "mean")
    assert BatchWeights(Additivity("items"), 8).of(part(3, 20, count=17))[:2] == (17, "sum")


def test_the_weights_of_a_sum_are_one_together() -> None:
    weights = BatchWeights(Additivity("sum"), 8, ranks=2)
    assert sum(float(weights.of(part(n, 5)).number) for n in (3, 5)) == 0.5


def test_terms_that_grow_alike_go_together() -> None:
    weights = BatchWeights(Additivity("divisor", roles=("adds", "adds")), 8)
    assert [weights.of(part(n, 3 * n, second=n)).number for n in (3, 5)] == [9, 15]


def test_padding_that_comes_later_in_a_loss_of_two_denominators_stops_it() -> None:
    weights = BatchWeights(Additivity("divisor", roles=("adds", "adds")), 8)
    weights.of(part(4, 12, second=4))
    with pytest.raises(
        gf.MisuseError,
        match=r"mean over 12 \+ mean over 4 and mean over 9 \+ mean over 4.*gf\.Loss",
    ):
        weights.of(part(4, 9, second=4))


def test_a_loss_that_can_no_longer_be_read_stops_it() -> None:
    weights = BatchWeights(Additivity("divisor", read="mean over 4", roles=("adds",)), 8)
    unreadable = read_loss(torch.ones(3, requires_grad=True).norm(), 4)
    with pytest.raises(gf.MisuseError, match="cannot be read; the sample's was mean over 4"):
        weights.of(unreadable)
    # in one piece
    assert BatchWeights(Additivity("divisor", roles=("adds",)), 4).of(unreadable)[:2] == (4, "mean")


def test_a_sum_divided_by_nothing_is_lost_and_said() -> None:
    weights = BatchWeights(Additivity("divisor", roles=("adds",)), 8)
    with pytest.raises(gf.MisuseError, match="divided by 0 is lost"):
        weights.of(read_loss(torch.ones(3, requires_grad=True).sum() / torch.tensor(0.0), 4))


def over_none() -> PartLoss:
    """A sum that is not 0 and one that is, both divided by no items: infinite and NaN."""
    none = torch.tensor(0.0)
    ones, zeros = (make(3, requires_grad=True) for make in (torch.ones, torch.zeros))
    return read_loss(ones.sum() / none + zeros.sum() / none, 4)


def test_what_is_lost_is_not_hidden_by_another_terms_nan() -> None:
    measured = Additivity("divisor", roles=("adds", "adds"), by_hand=True)
    with pytest.raises(gf.MisuseError, match="divided by 0 is lost"):
        BatchWeights(measured, 8).of(over_none())
    with pytest.raises(CountFirst):
        BatchWeights(measured, 8, may_repeat=True).of(over_none())


def test_a_sum_over_no_items_is_taken_with_next_to_no_weight() -> None:
    weights = BatchWeights(Additivity("items"), 8)
    number, reduction, _ = weights.of(part(4, 3, count=0))
    assert reduction == "sum"
    assert 0 < float(number) < 1e-15
    nothing = read_loss((torch.zeros(3, requires_grad=True).sum(), 0), 4)
    assert weights.of(nothing).number == 0


def test_totals_are_means_over_the_items() -> None:
    totals = LossTotals()
    weights = BatchWeights(Additivity("divisor", roles=("adds",)), 8)
    for items, accuracy in ((2, 0.0), (6, 1.0)):
        one = PartLoss(part(4, items).loss, None, 4, {"accuracy": accuracy})
        totals.add(one, weights.of(one))
    loss, logs = means_of(totals.read())
    assert loss == 1.0
    assert logs == {"accuracy": 0.75}


def test_a_part_without_weight_adds_nothing_to_the_totals() -> None:
    totals = LossTotals()
    empty = read_loss((torch.ones(1, requires_grad=True).sum() * float("nan"), 0), 4)
    totals.add(empty, BatchWeights(Additivity("items"), 8).of(empty))
    assert totals.read() == {"loss": 0.0, "items": 0.0}
