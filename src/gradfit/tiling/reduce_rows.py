"""Evaluates an expression tile by tile, forward and backward: the logits never exist whole.

Forward: for each tile of rows, make its logits, reduce them, drop them. Backward: make them again,
tile by tile, and add up the weights' gradient in place. That is one matrix product more than
keeping them (four for three), and less traffic to memory. The same trade as in Cut Cross-Entropy
(Wijmans et al., 2024, https://arxiv.org/abs/2411.09009), without its filter of small gradients,
which is not exact. Where the rows are only added up, `sum_rows` saves that product.

The functions that are evaluated are torch's own, so that rounding within a row is that of the
untiled run.

`F.linear_cross_entropy` (torch 2.13) is not used. On the CPU it took 2.3 times a plain pass where
tiles took 1.1 (1 × 1,024 × 32,000, benchmarks/results/tile_frontier.txt); it makes the logits
whole for label smoothing, adds up bfloat16 in bfloat16, allows one backward pass, and pays all
twice where its node is rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit.tiling.cut import Cut
from gradfit.tiling.expression import Expression, Operands, Program, without_autocast
from gradfit.tiling.gradient_sum import GradientSum, in_places


def reduce_rows(expression: Expression, cut: Cut) -> tuple[Tensor, ...]:
    """The results of an expression that makes a few numbers of each row; each has the flat rows
    first.

    Args:
        expression: what to do; it gives a tensor or a tuple of tensors.
        cut: how many rows at a time.
    """
    operands = Operands(expression)
    tensors = operands.tensors()
    # The products are cast by hand, weights once for all tiles; each function of the program
    # enters the autocast under which it was written down.
    with without_autocast(operands.projections[0].hidden.device):
        results: tuple[Tensor, ...] = _TiledProgram.apply(operands.program, cut, *tensors)  # type: ignore[no-untyped-call]
    return results


class _TiledProgram(torch.autograd.Function):
    """One node for all tiles, so that each parameter's gradient arrives once."""

    @staticmethod
    def forward(
        ctx: Any, program: Program, cut: Cut, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.program, ctx.cut = program, cut
        ctx.save_for_backward(*tensors)
        results = evaluate_tiles(program, cut, tensors)
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        needed: tuple[bool, ...] = ctx.needs_input_grad[2:]
        with without_autocast(tensors[0].device):
            # torch runs a backward with gradients on if `create_graph` was passed, else never.
            if torch.is_grad_enabled():
                return (
                    None,
                    None,
                    *differentiable_backward(ctx.program, tensors, needed, gradients),
                )
            return None, None, *TileGradients(ctx.program, tensors, needed).run(ctx.cut, gradients)


def evaluate_tiles(
    program: Program, cut: Cut, tensors: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """The results for all rows, of one tile after the other."""
    operands = _Tensors(program, tensors)
    tiles: list[tuple[Tensor, ...]] = []
    for begin, end in cut.bounds(operands.count):
        logits = operands.logits(operands.hidden(begin, end))
        rows = [tensor[begin:end] for tensor in operands.rows]
        tiles.append(program.evaluate(logits, rows, operands.constants))
        del logits  # before the next tile's are made
    return tuple(map(_joined, zip(*tiles, strict=True)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class _Tensors:
    """A flat list of operands: hidden states, weight and bias of each projection, what has rows,
    constants.
    """

    def __init__(self, program: Program, tensors: tuple[Any, ...]) -> None:
        self._dtypes = program.dtypes
        self.rows_at = 3 * len(program.dtypes)
        self.constants_at = self.rows_at + program.row_tensors
        self._hidden = tensors[0 : self.rows_at : 3]
        self.rows = list(tensors[self.rows_at : self.constants_at])
        self.constants = list(tensors[self.constants_at :])
        self.count: int = tensors[0].shape[0]
        # In the type of the product: what autocast casts, cast once for all tiles.
        self.weights: list[Any] = [
            tuple(_cast(each, dtype) for each in tensors[3 * at + 1 : 3 * at + 3])
            for at, dtype in enumerate(program.dtypes)
        ]

    def hidden(self, begin: int, end: int) -> list[Tensor]:
        """A tile of each projection's hidden states."""
        return [
            each[begin:end].to(dtype)
            for each, dtype in zip(self._hidden, self._dtypes, strict=True)
        ]

    def logits(self, hidden: list[Tensor]) -> list[Tensor]:
        """Those of these hidden states, by projection."""
        return [
            F.linear(states, *weights) for states, weights in zip(hidden, self.weights, strict=True)
        ]

    def has_rows(self, at: int) -> bool:
        """Whether the operand at this place has rows, or is read whole by every tile."""
        return at % 3 == 0 if at < self.rows_at else at < self.constants_at


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class TileGradients:
    """The gradients of everything that was read, tile by tile."""

    def __init__(
        self, program: Program, tensors: tuple[Any, ...], needed: tuple[bool, ...]
    ) -> None:
        self._program, self._needed = program, needed
        self._operands = _Tensors(program, tensors)
        # What has rows gets its gradient tile by tile, into one tensor; what every tile reads, as a
        # sum.
        wanted = [at for at, is_needed in enumerate(needed) if is_needed]
        self._by_row = {
            at: torch.empty_like(tensors[at]) for at in wanted if self._operands.has_rows(at)
        }
        self._sums = {
            at: GradientSum(tensors[at]) for at in wanted if not self._operands.has_rows(at)
        }

    def run(self, cut: Cut, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """One gradient, or None, for each operand."""
        for begin, end in self._bounds(cut):
            self._tile(begin, end, [_part(each, begin, end) for each in gradients])
        return self._gradients()

    def run_with_results(self, cut: Cut) -> tuple[Tensor, list[Tensor]]:
        """The first result, and the gradients of its sum, for each operand that needs one."""
        tiles = [self._tile(begin, end, None)[0].detach() for begin, end in self._bounds(cut)]
        return _joined(tiles), [each for each in self._gradients() if each is not None]

    def _bounds(self, cut: Cut) -> list[tuple[int, int]]:
        # Where there are no rows at all, an empty tile makes the gradients zeros.
        bounds = cut.bounds(self._operands.count)
        return [(begin, end) for begin, end in bounds if begin < end or not begin]

    def _gradients(self) -> list[Tensor | None]:
        return [self._gradient_of(at) for at in range(len(self._needed))]

    def _gradient_of(self, at: int) -> Tensor | None:
        return self._sums[at].result() if at in self._sums else self._by_row.get(at)

    def _tile(
        self, begin: int, end: int, gradients: list[Tensor | None] | None
    ) -> tuple[Tensor, ...]:
        """Add what one tile gives, and return its results; without `gradients`, of the sum of the
        first of them.
        """
        hidden = self._operands.hidden(begin, end)
        results, of_operands = self._differentiate(hidden, begin, end, gradients)
        for at, states in enumerate(hidden):
            gradient = of_operands.pop(3 * at, None)
            if gradient is not None:
                self._through_projection(3 * at, gradient, states, begin, end)
            del gradient
        for at, other in of_operands.items():
            if at in self._by_row:
                self._by_row[at][begin:end] = other
            else:
                self._sums[at].add(other)
        return results

    def _differentiate(
        self, hidden: list[Tensor], begin: int, end: int, gradients: list[Tensor | None] | None
    ) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        """The results; and by operand, the gradients of this tile's logits, of its rows of other
        tensors, and of constants.
        """
        operands = self._operands
        leaves: dict[int, Tensor] = {}
        logits = operands.logits(hidden)
        for at, tile in enumerate(logits):
            if any(self._needed[3 * at : 3 * at + 3]):
                leaves[3 * at] = tile.requires_grad_()
        rows = [
            self._leaf(leaves, operands.rows_at + n, each[begin:end])
            for n, each in enumerate(operands.rows)
        ]
        constants = [
            self._leaf(leaves, operands.constants_at + n, each)
            for n, each in enumerate(operands.constants)
        ]
        with torch.enable_grad():
            results = self._program.evaluate(logits, rows, constants)
        if gradients is None:
            gradients = [torch.ones_like(results[0])]
        return results, _gradients_of(results, gradients, leaves)

    def _leaf(self, leaves: dict[int, Tensor], at: int, tensor: Tensor) -> Tensor:
        if not self._needed[at]:
            return tensor
        leaves[at] = leaf = tensor.detach().requires_grad_()
        return leaf

    def _through_projection(
        self, at: int, gradient: Tensor, hidden: Tensor, begin: int, end: int
    ) -> None:
        if at in self._by_row:
            self._by_row[at][begin:end] = gradient @ self._operands.weights[at // 3][0]
        if at + 1 in self._sums:
            self._sums[at + 1].add_product(gradient.t(), hidden)
        if at + 2 in self._sums:
            self._sums[at + 2].add_rows(gradient)


def _part(gradient: Tensor | None, begin: int, end: int) -> Tensor | None:
    return None if gradient is None else gradient[begin:end]


def _gradients_of(
    results: tuple[Tensor, ...], gradients: list[Tensor | None], leaves: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Of each leaf; zeros where a result does not depend on it."""
    pairs = _differentiable(results, gradients)
    if not pairs:
        return {at: torch.zeros_like(leaf) for at, leaf in leaves.items()}
    outputs, initial = zip(*pairs, strict=True)
    of_leaves = torch.autograd.grad(outputs, list(leaves.values()), initial, allow_unused=True)
    return {
        at: torch.zeros_like(leaf) if gradient is None else gradient
        for (at, leaf), gradient in zip(leaves.items(), of_leaves, strict=True)
    }


def _differentiable(
    results: tuple[Tensor, ...], gradients: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """The results that a gradient has come for, with it."""
    return [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None and result.requires_grad
    ]


def differentiable_backward(
    program: Program,
    tensors: tuple[Any, ...],
    needed: tuple[bool, ...],
    gradients: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Where the gradient is differentiated again (`create_graph`): autograd's own, of all rows at
    once.
    """
    results = evaluate_whole(program, tensors)
    outputs, initial = zip(*_differentiable(results, gradients), strict=True)
    inputs = list(compress(tensors, needed))
    of_inputs = torch.autograd.grad(outputs, inputs, initial, create_graph=True, allow_unused=True)
    return list(in_places(of_inputs, needed))


def evaluate_whole(program: Program, tensors: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The results for all rows at once, with autograd's own graph."""
    operands = _Tensors(program, tensors)
    logits = operands.logits(operands.hidden(0, operands.count))
    return program.evaluate(logits, operands.rows, operands.constants, plain=True)
