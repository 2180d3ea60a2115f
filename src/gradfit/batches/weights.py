"""What each micro-batch of one batch weighs, by what was measured of the loss; and whether that
still holds.

The measurement was of other rows. So each micro-batch's loss is asked again what it was divided by,
and what does not fit together (padding that the sample did not have, in a loss of two denominators)
stops the batch before its update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gradfit._torch_compile import is_made_inside
from gradfit.batches.additivity_record import Additivity, go_together, is_close
from gradfit.batches.denominator import Denominator, Number
from gradfit.batches.loss import PartLoss
from gradfit.batches.shares import PartShare, scale_terms
from gradfit.errors import MisuseError

_TRACE = 2.0**-52


class Weight(NamedTuple):
    """As `GradientAccumulator.backward` takes it."""

    number: Number
    reduction: str
    of_logs: float | None = None
    """What its logs weigh, if not the same."""


class UnreadableLoss(MisuseError):
    """A part's loss does not say what it was divided by, though the sample's did."""


class CountFirst(Exception):
    """What a part was divided by may be no count, but a floor: the batch must be counted before it
    is weighed.
    """


def must_count(additivity: Additivity | None, parts: int) -> bool:
    """Whether the parts of a batch must be counted before the first of them is run."""
    return additivity is not None and additivity.over == "terms" and parts > 1


def may_count(additivity: Additivity | None, parts: int) -> bool:
    """Whether it may turn out, while parts are run, that they must be counted first."""
    return must_count(additivity, parts) or (_may_be_floor(additivity) and parts > 1)


def _may_be_floor(additivity: Additivity | None) -> bool:
    """Whether parts are weighted by a number of the loss function's own."""
    return additivity is not None and additivity.over == "divisor" and additivity.by_hand


class BatchWeights:
    """Weighs the parts of one batch, one after the other.

    Args:
        additivity: what was measured of this loss; None if nothing was.
        rows: of the whole batch, on this process.
        ranks: how many processes add up their batches.
        exact: False to go on where the readings do not fit together.
        shares: of the parts, where they were counted before.
        may_repeat: whether the caller can begin anew, counting first; else what cannot be weighed
            is refused.
    """

    def __init__(
        self,
        additivity: Additivity | None,
        rows: int,
        *,
        ranks: int = 1,
        exact: bool = True,
        shares: Sequence[PartShare] | None = None,
        may_repeat: bool = False,
    ) -> None:
        self._additivity = additivity if additivity is not None else Additivity("rows")
        self.rows, self._ranks, self._exact, self._shares = rows, ranks, exact, shares
        self._log_share: float | None = None  # of the part that was scaled last
        self._may_repeat = may_repeat and exact and ranks == 1
        self._first: tuple[float, ...] | None = None
        self._first_text = ""

    def shared(self, part: PartLoss, position: int) -> PartLoss:
        """The part with its terms scaled, if the parts were counted; to be asked once, before it is
        weighed.

        Raises:
            MisuseError: its loss is not what was counted.
        """
        if self._shares is None:
            return part
        share, read = self._shares[position], part.denominator
        self._log_share = share.log_share
        if read is None or not _is_as_counted(read, share):
            raise _is_another(part, share)
        if read.is_nothing:
            return part
        return dataclasses.replace(part, loss=scale_terms(part, share, read))

    def asks(self, part: PartLoss, *, is_empty: bool) -> bool:
        """Whether it matters what this part's loss was divided by. Multiplied by 0 (`is_empty`) it
        has no terms.
        """
        roles, over = self._additivity.roles, self._additivity.over
        if over == "sum" and part.rows == 1:
            return False  # where a product may stand for the sum
        return bool(roles) and not is_empty and (part.rows < self.rows or over == "divisor")

    def depends_on_rows(self, part: PartLoss, read: Denominator | None) -> bool:
        """Whether it must be known exactly how many rows the part and the batch have: nothing else
        says what the part weighs. `read` is what it was divided by, if that tells its items.
        """
        if self._shares is not None or self._additivity.over == "sum":
            return True
        return part.count is None and read is None

    def adding_divisor(self, read: Denominator) -> Number | None:
        """The divisor that grows with the items; None if there is none, or the terms are not those
        of the sample.
        """
        roles = self._additivity.roles
        if self._additivity.over == "sum" or "adds" not in roles or len(read.terms) != len(roles):
            return None
        return read.terms[roles.index("adds")].divisor

    def of(self, part: PartLoss, denominator: Denominator | None = None) -> Weight:
        """What this part weighs.

        Args:
            part: the part's loss.
            denominator: what it was divided by, if that was read before; else it is read from the
                loss.

        Raises:
            MisuseError: what this part's loss was divided by does not go together with the parts
                before it.
            CountFirst: that cannot be told of this part alone.
        """
        if self._shares is not None:
            return Weight(self._share_of_rows(part), "sum", self._log_share)
        # multiplied by 0, a loss has no terms to read
        is_empty = part.count is not None and not int(part.count)
        divisors = self._read(part, denominator) if self.asks(part, is_empty=is_empty) else None
        if divisors == ():
            return Weight(0, "mean")  # multiplied by 0, as is written where a part has no items
        if divisors is not None:
            self._require_no_floor(part, divisors)
        return self.weigh(part, divisors)

    def _share_of_rows(self, part: PartLoss) -> float:
        """All of them together are 1, so that nothing is divided by."""
        return part.rows / self.rows / self._ranks

    def weigh(self, part: PartLoss, divisors: tuple[Number, ...] | None) -> Weight:
        """What this part weighs, if its terms were divided by these numbers; whether they fit is
        not asked.
        """
        roles, over = self._additivity.roles, self._additivity.over
        if part.count is not None:
            return _weight_of_count(part.count, part.loss)
        if over == "sum":
            return Weight(self._share_of_rows(part), "sum")
        if divisors is not None and "adds" in roles:
            return Weight(_whole_if_it_is(divisors[roles.index("adds")], part), "mean")
        return Weight(part.rows, "mean")

    def _require_no_floor(self, part: PartLoss, divisors: tuple[Number, ...]) -> None:
        """Count first if the divisor that grows with the items may be the least that it can be, and
        not their number.
        """
        if not self._could_be_counted or part.count is not None or part.rows == self.rows:
            return
        number = float(divisors[self._additivity.roles.index("adds")])
        is_zero = float(part.loss.detach()) == 0.0
        if number > 0 and (is_zero or number <= self._additivity.floor):
            raise CountFirst

    @property
    def _could_be_counted(self) -> bool:
        """Whether there is something to count, and the batch may be begun anew."""
        measured = self._additivity
        return self._may_repeat and measured.by_hand and "adds" in measured.roles

    def _read(self, part: PartLoss, denominator: Denominator | None) -> tuple[Number, ...] | None:
        """The divisors of the part's terms, if they are as they were measured to be."""
        read = part.denominator if denominator is None else denominator
        roles, is_part = self._additivity.roles, part.rows < self.rows
        if is_part and _was_multiplied_by_0(read, part):
            return ()
        if read is None or len(read.terms) != len(roles) or self._is_sum_now(read):
            self._refuse_unreadable(part, read)
            return None
        if roles == ("adds",):  # nothing to compare, so it may stay on its device
            return (read.terms[0].divisor,)
        if is_part:
            self._require_not_hidden(part, read)
        return self._compared_with_first(read)

    def _require_not_hidden(self, part: PartLoss, read: Denominator) -> None:
        """Count first where one of several sums was divided by no items, and the loss is NaN: that
        sum may be lost, if it was not 0, and another term's NaN hides it.
        """
        by_0 = any(term.is_sum and not float(term.divisor) for term in read.terms)
        if not by_0 or not self._exact or not bool(part.loss.detach().isnan()):
            return
        if self._may_repeat:
            raise CountFirst
        raise _lost(part)

    def _is_sum_now(self, read: Denominator) -> bool:
        """Whether a term that was a mean of torch's is not divided any more. One that the loss
        function divides by a number of its own looks the same where that number is 1.
        """
        terms = zip(read.terms, self._additivity.roles, strict=True)
        return not self._additivity.by_hand and any(
            role == "adds" and term.count is None and not term.is_divided_by_hand
            for term, role in terms
        )

    def _refuse_unreadable(self, part: PartLoss, read: Denominator | None) -> None:
        if read is None and part.count is not None and is_made_inside(part.loss):
            return  # its count was found to be right where the same code ran as it was written
        if self._exact and part.rows < self.rows:
            raise UnreadableLoss(
                f"This micro-batch's loss is {read or _UNREAD}; the sample's was"
                f" {self._additivity.read}. {_NEXT}"
            )

    def _compared_with_first(self, read: Denominator) -> tuple[float, ...]:
        """The divisors, if they go together with those of the batch's first part."""
        divisors = tuple(float(term.divisor) for term in read.terms)
        if self._first is None:
            self._first, self._first_text = divisors, str(read)
        elif self._exact and not go_together(self._additivity.roles, self._first, divisors):
            raise self._not_together(read)
        return divisors

    def _not_together(self, read: Denominator) -> Exception:
        """What to raise: each term could be counted for itself, or nothing helps."""
        terms_add_up = set(self._additivity.roles) <= {"adds", "same"}
        if self._may_repeat and terms_add_up and not read.unknown:
            return CountFirst()
        return MisuseError(
            "Two micro-batches of this batch are divided by numbers that do not go together:"
            f" {self._first_text} and {read}. {_NEXT}"
        )


def _is_as_counted(read: Denominator, share: PartShare) -> bool:
    if read.is_nothing:
        return share.is_nothing
    now = [float(term.divisor) for term in read.terms]
    return len(now) == len(share.divisors) and all(map(is_close, now, share.divisors))


def _is_another(part: PartLoss, share: PartShare) -> UnreadableLoss:
    was = ", ".join(f"{divisor:g}" for divisor in share.divisors)
    return UnreadableLoss(
        f"This micro-batch's loss is {read_text(part)}; when it was counted it was divided"
        f" by {was}, so nothing was updated. What a loss is divided by must not depend on"
        " random numbers. Return gf.Loss(sum=…, count=…), or pass"
        " fit(micro_batch='whole')."
    )


def _was_multiplied_by_0(read: Denominator | None, part: PartLoss) -> bool:
    return read is not None and read.is_nothing and not float(part.loss.detach())


def _whole_if_it_is(number: Number, part: PartLoss) -> Number:
    """A divisor as a weight: an int where it is whole. One that stays on its device is not read."""
    if isinstance(number, Tensor):
        return number
    if not number:
        _require_not_lost(part)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _require_not_lost(part: PartLoss) -> None:
    """Refuse a sum that was divided by 0."""
    if bool(part.loss.detach().isinf()):
        raise _lost(part)


def _lost(part: PartLoss) -> MisuseError:
    return MisuseError(
        f"A micro-batch's loss is {read_text(part)}: what was divided by 0 is lost, so nothing was"
        " updated. Return gf.Loss(sum=…, count=…), whose sum is not divided."
    )


def _weight_of_count(count: int | Tensor, loss: Tensor) -> Weight:
    number = _count_or_trace(count, loss)
    return Weight(number, "sum", None if number is count else 0.0)


def _count_or_trace(count: int | Tensor, loss: Tensor) -> Number:
    """The count; of a sum that is not 0 over no items (negatives alone, where positives count) next
    to nothing.

    A weight of 0 would leave the sum out. This one is lost in the rounding of all others.
    """
    return count if int(count) or not _is_finite_and_not_0(float(loss.detach())) else _TRACE


def _is_finite_and_not_0(value: float) -> bool:
    return math.isfinite(value) and value != 0


def read_text(part: PartLoss) -> str:
    """What the part's loss was divided by, in words."""
    return str(part.denominator or _UNREAD)


_UNREAD = "divided by what cannot be read"
_NEXT = (
    "One weight cannot be right for all terms, so nothing was updated. Return gf.Loss(sum=…,"
    " count=…) with one count, or pass fit(micro_batch='whole')."
)
