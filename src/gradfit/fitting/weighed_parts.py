"""The losses of a step's parts on their way into the window, each with what it weighs.

Weights are read one by one; or, where they are on an accelerator and sums have room for it, all at
once when every part is in, so that the host waits for the device only once in a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gradfit.accumulate.accumulator import BareAccumulator
from gradfit.accumulate.unread_numbers import UnreadNumbers
from gradfit.batches.denominator import Denominator
from gradfit.batches.late_weights import LATE_TYPES, LateWeights, ReadEach
from gradfit.batches.loss import PartLoss
from gradfit.batches.runner import Part
from gradfit.batches.totals import LossTotals
from gradfit.batches.weights import BatchWeights
from gradfit.fitting.batch_rows import BatchRows
from gradfit.norms import norm_of, norms_of_each


class WeighedParts:
    """Takes the parts of one batch.

    Args:
        accumulator: whose window they go into.
        rows: of the batch.
        parts: of the batch.
        first: position of the part that is run first.
        weights_of: what weighs the parts of a batch of so many rows.
        totals: losses and logs are added to these.
        may_wait: nobody asks for weights before all parts are in.
    """

    def __init__(
        self,
        accumulator: BareAccumulator,
        rows: BatchRows,
        parts: Sequence[Part],
        first: int,
        weights_of: Callable[[int], BatchWeights],
        totals: LossTotals,
        *,
        may_wait: bool,
    ) -> None:
        self._accumulator, self._rows, self._first = accumulator, rows, first
        self._is_whole, self._may_wait = len(parts) == 1, may_wait
        self._weights_of, self._totals = weights_of, totals
        self._is_counted = rows.is_counted  # else parts are said to have no fewer than they have
        self._weights = weights_of(sum(part.rows for part in parts))
        self._late: LateWeights | None = None

    def backward(self, part: PartLoss, position: int) -> None:
        """Run the backward pass of a part."""
        divisor = None if self._is_counted else self._divisor_of_uncounted(part)
        if not self._is_counted and self._weights.depends_on_rows(part, divisor):
            part = self._counted(part, position)
        part = self._weights.shared(part, position)
        if position == self._first and self._may_weigh_late(part.loss):
            self._late = LateWeights(
                self._weights, whole=self._is_whole, is_scaled=self._accumulator.is_scaled
            )
        if self._late is not None:
            late = self._late.take(part)
            if late.times is None:
                self._accumulator.backward(late.loss, late.weight, late.reduction)
            else:
                self._accumulator.backward_times(late.times, late.loss, part.rows)
            return
        weight = self._weights.of(part, divisor)
        self._totals.add(part, weight)
        self._accumulator.backward_one(part.loss, weight.number, weight.reduction)

    def _divisor_of_uncounted(self, part: PartLoss) -> Denominator | None:
        """What says how many items a part has whose rows nobody has counted."""
        if part.count is not None:
            return None
        read = part.denominator
        if read is None or self._weights.adding_divisor(read) is None:
            return None
        return read

    def _counted(self, part: PartLoss, position: int) -> PartLoss:
        """The part with its own rows, which are what it weighs."""
        if self._weights.rows != self._rows.exact:
            self._weights = self._weights_of(self._rows.exact)
        return dataclasses.replace(part, rows=self._rows.of_part(position))

    def _may_weigh_late(self, loss: torch.Tensor) -> bool:
        """Whether the weights can stay on an accelerator until all parts are in."""
        if loss.is_cpu or not self._may_wait:
            return False
        ranks, is_scaled = self._accumulator.window.ranks, self._accumulator.is_scaled
        is_alone = ranks.size == 1 and not (is_scaled and ranks.reduces)
        return is_alone and self._is_wide(loss)

    def _is_wide(self, loss: torch.Tensor) -> bool:
        """Whether sums have room for what is not yet divided; those of scaled losses are means of
        the first part's divisor.
        """
        return not self._accumulator.window.narrow and loss.dtype in LATE_TYPES

    @property
    def is_late(self) -> bool:
        """Whether numbers are still on an accelerator."""
        return self._late is not None

    def weigh_with(self, others: Sequence[float | torch.Tensor]) -> list[float]:
        """Read all weights and losses, and these numbers, at once.

        Raises:
            ReadEach: nothing weighs anything.
        """
        assert self._late is not None
        total, numbers = self._settled(self._late, others)
        if not total:
            raise ReadEach
        return numbers

    def weigh(self) -> None:
        """Read all weights, losses and the norm at once, if they are still on an accelerator, and
        put them where they are looked for.
        """
        if self._late is not None:
            self._settle(self._late, self._norms())

    def unread(self) -> UnreadNumbers | None:
        """What the update can be launched with before the numbers are read; None if they must be
        read before, or are.
        """
        if self._late is None or not self._is_on_one_device():
            return None
        late, norms = self._late, self._norms()
        divisor = self._accumulator.window.state.main.divisor
        factor = 1.0 if self._is_whole or divisor is None else divisor / late.total
        late.send(norms)  # so that the update is not waited for
        norm = norms[0] if self._accumulator.clips_by_norm else None
        return UnreadNumbers(factor, norm, partial(self._settle_launched, late))

    def _is_on_one_device(self) -> bool:
        """Whether all gradients are dense, on one accelerator that knows double precision."""
        gradients = self._gradients()
        devices = {one.device for one in gradients}
        one = len(devices) == 1 and next(iter(devices)).type not in ("cpu", "mps")
        return one and all(gradient.layout is torch.strided for gradient in gradients)

    def _gradients(self) -> list[torch.Tensor]:
        tensors = self._accumulator.window.tensors
        return [one for tensor in tensors if (one := tensor.grad) is not None]

    def _norms(self) -> list[torch.Tensor]:
        """Of each gradient: with the other numbers they are one copy to the host, which makes one
        of them. Where the device clips by it, that one.
        """
        norms = norms_of_each(self._gradients())
        return [norm_of(norms)] if self._accumulator.clips_by_norm else norms

    def _settle(self, late: LateWeights, norms: Sequence[torch.Tensor] = ()) -> float:
        """Read everything, the norms too if they were not sent; gives what all parts weigh
        together.
        """
        total, numbers = self._settled(late, norms)
        number = math.hypot(*numbers)
        if math.isfinite(number):  # else the update looks closer
            self._accumulator.window.norm_ahead = number
        return total

    def _settled(
        self, late: LateWeights, others: Sequence[float | torch.Tensor]
    ) -> tuple[float, list[float]]:
        """Read everything; gives what all parts weigh together, and the numbers of `others`."""
        weighed, numbers = late.read(others)
        for part, weight in weighed:
            self._totals.add(part, weight)
        total = sum(float(weight.number) for _, weight in weighed)
        window = self._accumulator.window
        divisor = window.state.main.divisor
        in_weights = None if divisor is None else late.divisor_of(divisor)
        window.settle_weight(total, whole=self._is_whole, divisor=in_weights)
        return total, numbers

    def _settle_launched(self, late: LateWeights) -> float:
        """The same when the update is launched; gives the norm.

        Raises:
            ReadEach: it should not have been, or not with these numbers.
        """
        total = self._settle(late)
        number = self._accumulator.window.norm_ahead
        # up to the order of adding: Python's sum() is compensated from 3.12 on
        as_supposed = self._is_whole or math.isclose(total, late.read_total, rel_tol=1e-12)
        if number is None or not total or not as_supposed:
            raise ReadEach
        return number
