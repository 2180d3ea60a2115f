"""The cross-entropy of each row by its label, computed in the memory of the logits themselves.

`F.cross_entropy` and its backward hold four tensors of the logits' size. A tile's logits are nobody else's, so they can
become their own logarithmic softmax, and that the gradient: two. The kernels are torch's own, so each row has the bits
of the untiled run; that they may write where they read was tested on the CPU, and is done there only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit._torch import log_softmax_backward
from gradfit.tiling.expression import AutocastState, Expression, Projection

# The results of these are new, and autograd does not save them: they may be written over.
_UNSAVED = {Tensor.to, Tensor.mul, Tensor.div, torch.mul, torch.div, Tensor.__mul__, Tensor.__truediv__, Tensor.add,
            torch.add, Tensor.__add__, Tensor.__rmul__, Tensor.__radd__}  # fmt: skip


class RowCrossEntropy:
    """`F.cross_entropy(…, reduction="none")` of labels, without smoothing; the logits are used up.

    Args:
        ignore_index: the label of rows that do not count.
    """

    def __init__(self, ignore_index: int) -> None:
        self._ignore_index = ignore_index

    def __call__(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        # Where autocast is on, a cross-entropy is computed in float32.
        if logits.dtype in (torch.float16, torch.bfloat16) and AutocastState.now(logits.device).enabled:
            logits = logits.float()
        if logits.dtype not in (torch.float32, torch.float64) or logits.device.type != "cpu":
            return self.plain(logits, target, weight)
        losses: Tensor = _InPlace.apply(logits, target, weight, self._ignore_index)  # type: ignore[no-untyped-call]
        return losses

    def plain(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """The same, which can be differentiated again."""
        return F.cross_entropy(logits, target, weight, ignore_index=self._ignore_index, reduction="none")


def may_use_up(expression: Expression) -> bool:
    """Whether nobody else reads an expression's result."""
    return isinstance(expression, Projection) or expression.function in _UNSAVED


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
        numbers = logits.detach()
        torch.log_softmax(numbers, -1, out=numbers)
        ignored = target == ignore_index
        label = torch.where(ignored, 0, target).unsqueeze(-1)
        losses = -numbers.gather(-1, label)[:, 0]
        share = None if weight is None else weight[label[:, 0]]
        ctx.numbers, ctx.rows = numbers, (label, share, ignored)
        return (losses if share is None else losses * share).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        label, share, ignored = ctx.rows
        numbers, ctx.numbers = ctx.numbers, None
        gradient = (-gradient if share is None else -gradient * share).masked_fill(ignored, 0)
        of_log_softmax = torch.zeros_like(numbers).scatter_(-1, label, gradient.unsqueeze(-1))
        return log_softmax_backward(of_log_softmax, numbers, out=numbers), None, None, None
