"""The losses of a step's parts on their way into the window, each with what it weighs.

Weights are read one by one; or, where they are on an accelerator and sums have room for it, all at
once when every part is in, so that the host waits for the device only once in a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.accumulate.scaling import norm_on_device
from gradfit.batches.denominator import Denominator
from gradfit.batches.late_weights import LateWeights
from gradfit.batches.loss import PartLoss
from gradfit.batches.runner import Part
from gradfit.batches.totals import LossTotals
from gradfit.batches.weights import BatchWeights
from gradfit.fitting.batch_rows import BatchRows


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
        accumulator: GradientAccumulator,
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
        self._weights = weights_of(parts[0].rows if self._is_whole else rows.exact)
        self._late: LateWeights | None = None

    def backward(self, part: PartLoss, position: int) -> None:
        """Run the backward pass of a part."""
        divisor = self._divisor_of_uncounted(part)
        if divisor is None and part.count is None and not self._rows.is_counted:
            # its rows are what it weighs
            part = dataclasses.replace(part, rows=self._rows.exact)
            self._weights = self._weights_of(self._rows.exact)
        part = self._weights.shared(part, position)
        if position == self._first and self._may_weigh_late(part.loss):
            self._late = LateWeights(self._weights, whole=self._is_whole)
        if self._late is not None:
            self._accumulator.backward(*self._late.take(part))
            return
        weight = self._weights.of(part, divisor)
        self._totals.add(part, weight)
        self._accumulator.backward(part.loss, weight=weight.number, reduction=weight.reduction)

    def _divisor_of_uncounted(self, part: PartLoss) -> Denominator | None:
        """What says how many items a part has whose rows nobody has counted."""
        if self._rows.is_counted or part.count is not None:
            return None
        read = part.denominator
        if read is None or self._weights.adding_divisor(read) is None:
            return None
        return read

    def _may_weigh_late(self, loss: torch.Tensor) -> bool:
        """Whether the weights can stay on an accelerator until all parts are in."""
        is_alone = self._accumulator.window.ranks.size == 1
        return self._may_wait and loss.device.type != "cpu" and self._is_wide(loss) and is_alone

    def _is_wide(self, loss: torch.Tensor) -> bool:
        """Whether sums have room for what is not yet divided."""
        window = self._accumulator.window
        if window.narrow or window.scaler is not None:
            return False
        return loss.dtype in (torch.float32, torch.float64)

    def weigher(self) -> Callable[[], None]:
        """What reads the weights that are still on an accelerator, once all parts are in."""
        return _nothing if self._late is None else self._weigh

    def _weigh(self) -> None:
        """Read all weights, losses and the norm at once, and put them where they are looked for."""
        assert self._late is not None
        window = self._accumulator.window
        gradients = [one for tensor in window.tensors if (one := tensor.grad) is not None]
        weighed, (norm,) = self._late.read(norm_on_device(gradients))
        for part, weight in weighed:
            self._totals.add(part, weight)
        total = sum(float(weight.number) for _, weight in weighed)
        window.settle_weight(total, whole=self._is_whole)
        if math.isfinite(norm):  # else the update looks closer
            window.norm_ahead = norm


def _nothing() -> None:
    pass
