"""The logarithm of the probability of each row's label, computed in the memory of the logits
themselves.

`F.cross_entropy` and its backward hold four tensors of the logits' size. A tile's logits are nobody
else's, so they can become their own logarithmic softmax, and that the gradient: one. The kernels
are torch's own, so each row has the bits of the untiled run; that they may write where they read
was tested on the CPU, and is done there only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit._torch import log_softmax_backward
from gradfit.tiling.expression import Applied, AutocastState, Expression, Projection

# The results of these are new, and autograd does not save them: they may be written over.
_UNSAVED = {
    Tensor.to,
    Tensor.mul,
    Tensor.div,
    torch.mul,
    torch.div,
    Tensor.__mul__,
    Tensor.__truediv__,
    Tensor.add,
    torch.add,
    Tensor.__add__,
    Tensor.__rmul__,
    Tensor.__radd__,
}


_NUMBERS_AT_ONCE, _MOST_STEPS = 1 << 19, 8


class LabelLoss:
    """Minus the logarithm of the probability of each row's label, times a factor if there is one; 0
    where the label is ignored. The logits are used up.
    """

    def __call__(
        self, logits: Tensor, label: Tensor, ignored: Tensor, factor: Tensor | None = None
    ) -> Tensor:
        # Where autocast is on, a cross-entropy is computed in float32.
        is_narrow = logits.dtype in (torch.float16, torch.bfloat16)
        if is_narrow and AutocastState.now(logits.device).enabled:
            logits = logits.float()
        if logits.dtype not in (torch.float32, torch.float64) or logits.device.type != "cpu":
            return self.plain(logits, label, ignored, factor)
        log_probability: Tensor = _InPlace.apply(logits, label)  # type: ignore[no-untyped-call]
        return _loss(log_probability, ignored, factor)

    def plain(
        self, logits: Tensor, label: Tensor, ignored: Tensor, factor: Tensor | None = None
    ) -> Tensor:
        """The same, which can be differentiated again."""
        return _loss(F.log_softmax(logits, -1).gather(-1, label), ignored, factor)


def _loss(log_probability: Tensor, ignored: Tensor, factor: Tensor | None) -> Tensor:
    losses = -log_probability.squeeze(-1)
    if factor is not None:
        losses = losses * factor
    return losses.masked_fill(ignored, 0)


def may_use_up(expression: Expression) -> bool:
    """Whether nobody else reads an expression's result."""
    if isinstance(expression, Applied):
        return expression.function in _UNSAVED
    return isinstance(expression, Projection)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor) -> Tensor:
        numbers = logits.detach()
        torch.log_softmax(numbers, -1, out=numbers)
        ctx.numbers, ctx.label = numbers, label
        return numbers.gather(-1, label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        numbers, ctx.numbers = ctx.numbers, None
        # A few rows at a time: their gradients, zeros but for the labels', stay in the cache.
        rows, words = numbers.shape
        few = max(1, min(rows, max(-(-rows // _MOST_STEPS), _NUMBERS_AT_ONCE // max(1, words))))
        of_log_softmax = numbers.new_zeros(few, words)
        for begin in range(0, rows, few):
            part, label = numbers[begin : begin + few], ctx.label[begin : begin + few]
            sparse = of_log_softmax[: part.shape[0]]
            sparse.scatter_(-1, label, gradient[begin : begin + few])
            log_softmax_backward(sparse, part, out=part)
            sparse.scatter_(-1, label, 0)
        return numbers, None
