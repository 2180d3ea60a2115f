"""The weights of a batch's parts where the losses are on an accelerator: nothing is read before all
parts are in.

A number that is read from a device makes the host wait until the device has come so far, and the
device then waits for the host. So each part is backpropagated as the sum over its items, which
needs no number, and all weights, losses and logs are read together at the end, in one copy. Only
then is it known whether they fit together: `BatchWeights` checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfit.batches.denominator import Denominator, Number, Term
from gradfit.batches.loss import PartLoss
from gradfit.batches.weights import BatchWeights, Weight


class ZeroWeight(Exception):
    """A part without items was added to the gradients with others: the batch must be run again,
    reading each weight.
    """


class Backpropagated(NamedTuple):
    """What goes into a backward pass: a loss, a weight for now, and how the loss was reduced."""

    loss: Tensor
    weight: Number
    reduction: str


class _Taken(NamedTuple):
    part: PartLoss
    denominator: Denominator | None

    def scalars(self) -> list[Any]:
        part, read = self.part, self.denominator
        terms = () if read is None else read.terms
        of_terms = [number for term in terms for number in (term.count, term.scale)]
        return [part.loss, part.count, *part.logs.values(), *of_terms]


class LateWeights:
    """Takes the parts of one batch, and weighs them when all are in.

    Args:
        weights: what is asked in the end.
        whole: the batch is one part, so that its weight does not matter for its gradient.
    """

    def __init__(self, weights: BatchWeights, *, whole: bool) -> None:
        self._weights, self._whole = weights, whole
        self._taken: list[_Taken] = []

    def take(self, part: PartLoss) -> Backpropagated:
        """What to backpropagate for this part. Nothing is read from its device."""
        asked = self._weights.asks(part, is_empty=False)
        read = part.denominator if asked else None
        # Without its graph, which would hold the part's activations until the batch's end.
        kept = dataclasses.replace(part, loss=part.loss.detach())
        self._taken.append(_Taken(kept, read))
        if isinstance(part.count, Tensor):
            return self._sum_over(part, part.count)
        if part.count is not None or read is None:
            return self._as_it_is(part, None)
        return self._by_divisor(part, read)

    def _by_divisor(self, part: PartLoss, read: Denominator) -> Backpropagated:
        divisor = self._weights.adding_divisor(read)
        if isinstance(divisor, Tensor):
            return self._mean_over(part, divisor)
        divisors = None if divisor is None else tuple(term.divisor for term in read.terms)
        return self._as_it_is(part, divisors)

    def _as_it_is(self, part: PartLoss, divisors: tuple[Number, ...] | None) -> Backpropagated:
        weight = self._weights.weigh(part, divisors)
        return Backpropagated(part.loss, weight.number, weight.reduction)

    def _sum_over(self, part: PartLoss, count: Tensor) -> Backpropagated:
        if self._whole:
            return Backpropagated(part.loss / count, part.rows, "mean")
        return Backpropagated(part.loss, part.rows, "sum")

    def _mean_over(self, part: PartLoss, divisor: Tensor) -> Backpropagated:
        if self._whole:
            return Backpropagated(part.loss, part.rows, "mean")
        return Backpropagated(part.loss * divisor, part.rows, "sum")

    def read(self, *others: Tensor) -> tuple[list[tuple[PartLoss, Weight]], list[float]]:
        """All parts and what they weigh, as numbers, and the numbers of `others`; one copy from
        each device.

        Raises:
            MisuseError: what the parts were divided by does not go together.
            ZeroWeight: a part of several has no items, so its gradient should not be there.
        """
        numbers = _Numbers()
        for taken in self._taken:
            numbers.add(*taken.scalars())
        numbers.add(*others)
        numbers.read()
        weighed = [self._weigh(taken, numbers) for taken in self._taken]
        return weighed, [numbers.of(one) for one in others]

    def _weigh(self, taken: _Taken, numbers: _Numbers) -> tuple[PartLoss, Weight]:
        part, read = _as_numbers(taken.part, numbers), taken.denominator
        weight = self._weights.of(part, None if read is None else _read_as_numbers(read, numbers))
        # As a sum it came in all the same: NaN, perhaps, where a mean over nothing was taken.
        if not weight.number and not self._whole:
            raise ZeroWeight
        return part, weight


def _as_numbers(part: PartLoss, numbers: _Numbers) -> PartLoss:
    count = None if part.count is None else int(numbers.of(part.count))
    loss = torch.tensor(numbers.of(part.loss), dtype=torch.float64, device="cpu")
    return PartLoss(
        loss, count, part.rows, {name: numbers.of(value) for name, value in part.logs.items()}
    )


def _read_as_numbers(read: Denominator, numbers: _Numbers) -> Denominator:
    terms = (
        Term(
            None if one.count is None else numbers.of(one.count),
            numbers.of(one.scale),
            one.reduction,
        )
        for one in read.terms
    )
    return Denominator(tuple(terms), read.unknown)


class _Numbers:
    """Scalars on devices, read in one copy per device."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._read: dict[int, float] = {}

    def add(self, *values: Any) -> None:
        self._waiting += [value for value in values if isinstance(value, Tensor)]

    def read(self) -> None:
        by_device: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
        for one in self._waiting:
            by_device.setdefault(one.device, {}).setdefault(one.dtype, []).append(one)
        for kinds in by_device.values():
            ones = chain.from_iterable(kinds.values())
            numbers = _together(list(kinds.values())).tolist()
            self._read.update(zip(map(id, ones), numbers, strict=True))

    def of(self, value: Any) -> float:
        """The number behind a tensor that was added; any other number as it is."""
        return self._read[id(value)] if isinstance(value, Tensor) else float(value)


def _together(kinds: Sequence[Sequence[Tensor]]) -> Tensor:
    """One vector in double precision, which holds every float32 and every count; Apple's devices
    have none. Those of one type go together: each call is a kernel.
    """
    wide = torch.float32 if kinds[0][0].device.type == "mps" else torch.float64
    with torch.no_grad():
        stacked = [torch.stack([one.detach().reshape(()) for one in kind]) for kind in kinds]
        return torch.cat([one.to(wide) for one in stacked])
