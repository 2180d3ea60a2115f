"""Adds up what an expression makes of each row, and computes the gradients in the same visit of
each tile.

A loss is mostly such a sum, divided afterwards: what comes back to it in the backward pass is one
number, so that the gradients of hidden states and weights are known up to that factor as soon as a
tile's logits are there. They take three matrix products, as those of logits that exist, where
making the logits once more takes four; in memory they are as large as what the backward pass begins
with anyway. To whoever listens the sum is one operation, of which the gradients are results: a plan
may keep them, or rebuild them.

Not where that would be inexact or in vain (`_may_come_early`): float16 would lose small numbers
before the scale of a loss scaler comes, a narrow gradient would be rounded twice, and a forward of
`torch.utils.checkpoint` is run again. There the gradients are computed in the backward pass, as
`reduce_rows` does. So they are, of all rows at once, where they are differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch import (
    FakeTensor,
    inside_torch_checkpoint,
    keeps_graph,
    saved_tensor,
    with_autograd,
)
from gradfit._torch_listen import dispatch_modes
from gradfit._torch_one_operation import OneOperation, telling
from gradfit.tiling.cut import Cut
from gradfit.tiling.expression import (
    Expression,
    Operands,
    Program,
    dtype_of,
    without_autocast,
)
from gradfit.tiling.gradient_sum import in_places
from gradfit.tiling.reduce_rows import TileGradients, differentiable_backward, evaluate_tiles

_WIDE = (torch.float32, torch.float64)


class EarlyGradients:
    """A sum's gradients, computed with it: they are there as long as this is referred to."""


def sum_rows(
    expression: Expression, cut: Cut, early: EarlyGradients | None
) -> tuple[Tensor, torch.dtype]:
    """The sum over all rows of an expression that makes one number of each, not narrower than
    float32; and the type of these numbers.

    Args:
        expression: what to do.
        cut: how many rows at a time.
        early: the gradients are computed at once where they may be, and this is referred to by what
            keeps them; None: in the backward pass.
    """
    operands = Operands(expression)
    tensors = operands.tensors()
    if early is not None and not _may_come_early(expression, operands.program, tensors):
        early = None
    with without_autocast(operands.projections[0].hidden.device):
        total, dtype = _SumOfTiles.apply(operands.program, cut, early, *tensors)  # type: ignore[no-untyped-call]
    return total, dtype


def _may_come_early(
    expression: Expression, program: Program, tensors: Sequence[Tensor | None]
) -> bool:
    """Whether gradients that are multiplied later are as exact, and will not be computed in
    vain.
    """
    trained = {each.dtype for each in tensors if each is not None and each.requires_grad}
    return (
        torch.is_grad_enabled()
        and trained.issubset(_WIDE)
        and torch.float16 not in program.dtypes
        and not isinstance(tensors[0], FakeTensor)
        and not dispatch_modes()
        and not inside_torch_checkpoint()
        # `logits.float()` of a model in float64: the factor belongs into what float32 rounds.
        and (torch.float64 not in trained or dtype_of(expression) is torch.float64)
    )


class _SumOfTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, program: Program, cut: Cut, early: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, torch.dtype]:
        needed = ctx.needs_input_grad[3:]
        ctx.program, ctx.cut, ctx.early = program, cut, early if any(needed) else None
        if ctx.early is None:
            ctx.save_for_backward(*tensors)
            (rows,) = evaluate_tiles(program, cut, tensors)
            return _added_up(rows), rows.dtype
        operation = _SumWithGradients(program, cut, needed)
        total, *gradients = operation(*tensors)
        ctx.save_for_backward(*tensors, *gradients)
        return total, operation.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        needed: tuple[bool, ...] = ctx.needs_input_grad[3:]
        # torch runs a backward with gradients on if `create_graph` was passed, else never.
        if ctx.early is not None and not torch.is_grad_enabled():
            return None, None, None, *in_places(_multiplied(ctx, needed, gradient), needed)
        tensors = ctx.saved_tensors[: len(needed)]
        of_rows = (gradient.expand(tensors[0].shape[0]),)
        with without_autocast(gradient.device):
            if torch.is_grad_enabled():
                found = differentiable_backward(ctx.program, tensors, needed, of_rows)
            else:
                found = TileGradients(ctx.program, tensors, needed).run(ctx.cut, of_rows)
        return None, None, None, *found


def _multiplied(ctx: Any, needed: Sequence[bool], factor: Tensor) -> list[Tensor]:
    """The gradients that were computed early, of which the factor is now known. In their own memory
    if nobody may ask for them again.
    """
    first = len(needed)
    kept = [saved_tensor(ctx, first + at) for at in range(sum(needed))]
    if keeps_graph():
        return [each * factor for each in kept]
    ctx.early = None
    # A tensor of its own: autograd takes it for `.grad` without a copy.
    return [each.mul_(factor).detach() for each in kept]


class _SumWithGradients(OneOperation):
    """The sum over all rows, then the gradient of each operand that needs one."""

    def __init__(self, program: Program, cut: Cut, needed: Sequence[bool]) -> None:
        self._program, self._cut, self._needed = program, cut, tuple(needed)
        self.dtype = torch.float32  # of the rows, once it was run

    def __str__(self) -> str:
        return "gradfit.sum_of_tiles"

    __repr__ = __str__

    def _run(self, *tensors: Any) -> list[Tensor]:
        # What autograd saves in a tile is nobody else's, and used at once.
        own_saves = saved_tensors_hooks(_without_graph, _same)
        without_cast = without_autocast(tensors[0].device)
        with with_autograd(), telling(), torch.no_grad(), own_saves, without_cast:
            gradients = TileGradients(self._program, tensors, self._needed)
            rows, found = gradients.run_with_results(self._cut)
            self.dtype = rows.dtype
            return [_added_up(rows), *found]


def _without_graph(tensor: Tensor) -> Tensor:
    """A node that saves its own result would hold itself, for good if its backward is not run to
    the end.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _added_up(rows: Tensor) -> Tensor:
    """In the width of the sum, as torch's own kernels add."""
    return rows.sum(dtype=None if rows.dtype in _WIDE else torch.float32)
