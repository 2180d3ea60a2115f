"""The logarithm of the probability of each row's label, computed in the memory of the logits
themselves.

`F.cross_entropy` and its backward hold four tensors of the logits' size. A tile's logits are nobody
else's, so they can become their own logarithmic softmax, and that the gradient: two. The kernels
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


class LabelLogProbability:
    """`log_softmax(logits).gather(-1, label)`; the logits are used up."""

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        # Where autocast is on, a cross-entropy is computed in float32.
        is_narrow = logits.dtype in (torch.float16, torch.bfloat16)
        if is_narrow and AutocastState.now(logits.device).enabled:
            logits = logits.float()
        if logits.dtype not in (torch.float32, torch.float64) or logits.device.type != "cpu":
            return self.plain(logits, label)
        log_probability: Tensor = _InPlace.apply(logits, label)  # type: ignore[no-untyped-call]
        return log_probability

    def plain(self, logits: Tensor, label: Tensor) -> Tensor:
        """The same, which can be differentiated again."""
        return F.log_softmax(logits, -1).gather(-1, label)


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
        of_log_softmax = torch.zeros_like(numbers).scatter_(-1, ctx.label, gradient)
        return log_softmax_backward(of_log_softmax, numbers, out=numbers), None
