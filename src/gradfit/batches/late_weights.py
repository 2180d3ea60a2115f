"""The weights of a batch's parts where the losses are on an accelerator: nothing is read before all
parts are in.

A number that is read from a device makes the host wait until the device has come so far, and the
device then waits for the host. So each part is backpropagated as the sum over its items, which
needs no number, and all weights, losses and logs are read together at the end, in one copy. Only
then is it known whether they fit together: `BatchWeights` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfit.batches.denominator import Denominator, Number, Term
from gradfit.batches.device_numbers import MOST_WAITING, DeviceNumbers, widest_on
from gradfit.batches.loss import PartLoss
from gradfit.batches.weights import BatchWeights, Weight

# of losses: others have no room for sums that are not divided yet
LATE_TYPES = (torch.float32, torch.float64)


class ReadEach(Exception):
    """The batch must be run again, reading each part's numbers when it comes: one without items was
    added to the gradients with others, or the update was launched and should not have been.
    """


class Backpropagated(NamedTuple):
    """What goes into a backward pass: a loss, a weight for now, and how the loss was reduced."""

    loss: Tensor
    weight: Number
    reduction: str
    times: Tensor | None = None
    """By what the loss is multiplied: its own gradient begins with it."""


class _Taken(NamedTuple):
    """A part with its numbers still to be read."""

    rows: int
    loss: Any
    count: Any
    logs: dict[str, Any]
    terms: list[tuple[Any, Any, Term]] | None
    """Count and scale of each, with what else was read of it; None if nobody asks."""
    unknown: tuple[str, ...]


class LateWeights:
    """Takes the parts of one batch, and weighs them when all are in.

    Args:
        weights: what is asked in the end.
        whole: the batch is one part, so that its weight does not matter for its gradient.
        is_scaled: the losses are scaled as far as float16 goes, so that what is backpropagated must
            not be larger than a mean: a part weighs what it weighs over the first one.
    """

    def __init__(self, weights: BatchWeights, *, whole: bool, is_scaled: bool = False) -> None:
        self._weights, self._whole = weights, whole
        self._is_scaled = is_scaled and not whole
        # rows over weight, of the first part, where that is on a device: what each is multiplied by
        self._unit: Number | None = None
        self._first: tuple[int, Any] | None = None  # its rows and the place of its weight
        self._taken: list[_Taken] = []
        self._numbers = DeviceNumbers()
        self._last: list[Any] = []  # places of what is read beside the parts
        # what all parts of several weigh together, if it is as it seems before numbers are read:
        # numbers, and what is on a device, which is added up at the end
        self._known_total: int | float = 0
        self._to_add_up: list[Tensor] = []
        self._weight_places: list[Any] = []

    def take(self, part: PartLoss) -> Backpropagated:
        """What to backpropagate for this part. Nothing is read from its device."""
        asked = self._weights.asks(part, is_empty=False)
        read = part.denominator if asked else None
        self._taken.append(self._with_places(part, read))
        if isinstance(part.count, Tensor):
            self._add_to_total(part.count)
            return self._sum_over(part, part.count)
        if part.count is not None or read is None:
            return self._as_it_is(part, None)
        return self._by_divisor(part, read)

    def _with_places(self, part: PartLoss, read: Denominator | None) -> _Taken:
        """A part without its tensors, and so without its graph, which would hold the part's
        activations until the batch's end.
        """
        add = self._numbers.add
        terms = None if read is None else [
            (add(one.count), add(one.scale), Term(None, 1, one.reduction, is_sum=one.is_sum))
            for one in read.terms
        ]  # fmt: skip
        logs = {name: add(value) for name, value in part.logs.items()}
        unknown = () if read is None else read.unknown
        return _Taken(part.rows, add(part.loss), add(part.count), logs, terms, unknown)

    def _add_to_total(self, weight: Number) -> None:
        """In double precision, as numbers that were read are added up."""
        if self._whole:
            return
        if not isinstance(weight, Tensor) or weight.is_cpu:
            self._known_total += weight.item() if isinstance(weight, Tensor) else weight
            return
        self._weight_places.append(self._numbers.add(weight))
        if len(self._to_add_up) == MOST_WAITING:
            self._to_add_up = [_added_up(self._to_add_up)]
        self._to_add_up.append(weight.detach().reshape(()))

    @property
    def total(self) -> Number:
        """What all parts of several weigh together, perhaps on their device, if it is as it seems
        before the numbers are read.
        """
        if not self._to_add_up:
            return self._known_total
        total = _added_up(self._to_add_up)
        return total + self._known_total if self._known_total else total

    @property
    def read_total(self) -> float:
        """The same, when the numbers are read."""
        return self._known_total + sum(map(self._numbers.of, self._weight_places))

    def _by_divisor(self, part: PartLoss, read: Denominator) -> Backpropagated:
        divisor = self._weights.adding_divisor(read)
        if isinstance(divisor, Tensor):
            self._add_to_total(divisor)
            return self._mean_over(part, divisor)
        divisors = None if divisor is None else tuple(term.divisor for term in read.terms)
        return self._as_it_is(part, divisors)

    def _as_it_is(self, part: PartLoss, divisors: tuple[Number, ...] | None) -> Backpropagated:
        weight = self._weights.weigh(part, divisors)
        self._add_to_total(weight.number)
        if self._is_scaled:
            return self._in_units(part, weight.number, weight.reduction)
        return Backpropagated(part.loss, weight.number, weight.reduction)

    def _sum_over(self, part: PartLoss, count: Tensor) -> Backpropagated:
        if self._whole:
            return Backpropagated(part.loss / count, part.rows, "mean")
        if self._is_scaled:
            return self._in_units(part, count, "sum")
        return Backpropagated(part.loss, part.rows, "sum")

    def _mean_over(self, part: PartLoss, divisor: Tensor) -> Backpropagated:
        if self._whole:
            return Backpropagated(part.loss, part.rows, "mean")
        if self._is_scaled:
            return self._in_units(part, divisor, "mean")
        return Backpropagated(part.loss, part.rows, "sum", divisor)

    def _in_units(self, part: PartLoss, weight: Number, reduction: str) -> Backpropagated:
        """A part of several, by its weight over the first one's. If that one is a number, it is
        what the window divides by; else by the rows that stand for it.
        """
        if isinstance(weight, Tensor):
            weight = weight.item() if weight.is_cpu else weight.detach().reshape(())
        if self._unit is None:
            self._unit = self._begin_unit(part, weight)
        times = self._unit if reduction == "sum" else self._unit * weight
        if isinstance(times, Tensor):
            return Backpropagated(part.loss, part.rows, "sum", times)
        return Backpropagated(
            part.loss, part.rows if isinstance(weight, Tensor) else weight, reduction
        )

    def _begin_unit(self, part: PartLoss, weight: Number) -> Number:
        if not isinstance(weight, Tensor):
            return 1.0
        self._first = part.rows, self._weight_places[-1]
        return part.rows / weight.to(widest_on(weight.device))

    def divisor_of(self, divisor: float) -> float:
        """What the sums were divided by, in weights, once numbers are read; `divisor` is in what
        stood for them.
        """
        if self._first is None:
            return divisor
        rows, place = self._first
        return divisor * self._numbers.of(place) / rows

    def send(self, others: Sequence[Tensor]) -> None:
        """No more parts come: all numbers go to the host, with those of `others`, and `read` waits
        for nothing that is launched from here on.
        """
        self._last = self._numbers.add_together(others)
        self._numbers.send()

    def read(
        self, others: Sequence[float | Tensor] = ()
    ) -> tuple[list[tuple[PartLoss, Weight]], list[float]]:
        """All parts and what they weigh, as numbers, and the numbers of `others`, of these or of
        those that were sent; one copy from each device.

        Raises:
            MisuseError: what the parts were divided by does not go together.
            ReadEach: a part of several has no items, so its gradient should not be there.
        """
        places = self._last or self._numbers.add_together(others)
        self._numbers.read()
        weighed = [self._weigh(taken) for taken in self._taken]
        return weighed, [self._numbers.of(place) for place in places]

    def _weigh(self, taken: _Taken) -> tuple[PartLoss, Weight]:
        part = self._read_part(taken)
        weight = self._weights.of(part, self._read_denominator(taken))
        # As a sum it came in all the same: NaN, perhaps, where a mean over nothing was taken.
        if not weight.number and not self._whole:
            raise ReadEach
        return part, weight

    def _read_part(self, taken: _Taken) -> PartLoss:
        number = self._numbers.of
        loss = torch.tensor(number(taken.loss), dtype=torch.float64, device="cpu")
        count = None if taken.count is None else int(number(taken.count))
        logs = {name: number(value) for name, value in taken.logs.items()}
        return PartLoss(loss, count, taken.rows, logs)

    def _read_denominator(self, taken: _Taken) -> Denominator | None:
        if taken.terms is None:
            return None
        number = self._numbers.of
        terms = (
            replace(term, count=None if count is None else number(count), scale=number(scale))
            for count, scale, term in taken.terms
        )
        return Denominator(tuple(terms), taken.unknown)


def _added_up(numbers: Sequence[Tensor]) -> Tensor:
    """The sum of scalars of one device, in double precision where that has it: two kernels if they
    are of one type, however many they are.
    """
    wide = widest_on(numbers[0].device)
    alike = len({one.dtype for one in numbers}) == 1
    return torch.stack([one if alike else one.to(wide) for one in numbers]).sum(dtype=wide)
