"""A micro-batch that can be taken back: its gradients are made apart from the window's, and added at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.numbers import Number
from gradfit.errors import MisuseError


@dataclass
class Total:
    """One denominator: what was weighed so far, and what the gradients are divided by meanwhile."""

    weight: Number = 0
    divisor: float | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """A loss term's own sums, by the tensor's position; the window's main sums are in `.grad`."""

    @property
    def factor(self) -> float:
        """What turns the sums into a mean; 1 if there is nothing to divide."""
        return self.divisor / self.weight if self.weight and self.divisor is not None else 1.0

    def pour_into(self, sources: Sequence[Any]) -> None:
        """Add the mean to the sources' `.grad`, and give up the sums."""
        for position, gradient in self.gradients.items():
            source = sources[position]
            source.grad = add_scaled(source.grad, gradient, self.factor)
        self.gradients = {}


class Transaction:
    """Takes the window's sums out of `.grad`, so that what comes in there is one micro-batch's alone.

    Inside, losses are backpropagated as they are; the weight is multiplied in, in the sums' own precision, when they
    are added. Taking back is putting the untouched sums back.
    """

    def __init__(self, tensors: Sequence[Any], weight: Number | None) -> None:
        self.tensors = tensors  # whose `.grad` autograd adds to
        self.declared = weight
        self.reference: Number | None = weight  # what one unit of `.grad` weighs
        self.counted: Number = 0
        self.had_pass = False
        self.terms: dict[str, Total] = {}
        self.names: set[str] = set()  # of all terms, those without weight included
        self._had_plain = False
        self._sums = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None

    @property
    def weight(self) -> Number:
        """What the micro-batch weighs."""
        return self.counted if self.declared is None else self.declared

    @property
    def is_empty(self) -> bool:
        """Whether nothing came in at all."""
        return not (self.had_pass or self.terms or self.gradients())

    def gradients(self) -> list[Tensor]:
        """The micro-batch's own gradients, terms included."""
        own = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        return own + [gradient for term in self.terms.values() for gradient in term.gradients.values()]

    def factor_for(self, weight: Number, reduction: str) -> float:
        """What to backpropagate a loss with; MisuseError if its weight contradicts the micro-batch's."""
        if self.declared is not None:
            if weight not in (1, self.declared):
                raise MisuseError(
                    f"weight={weight!r} inside micro_batch(weight={self.declared!r}). Pass the weight in one place."
                )
            return 1.0 if reduction == "mean" else 1.0 / self.declared if self.declared else 0.0
        if self.reference is None:
            self.reference = weight
        return (weight if reduction == "mean" else 1) / self.reference

    def add(self, weight: Number) -> None:
        """A weighted pass has come in."""
        self.had_pass = True
        self.counted += weight

    def add_plain(self) -> None:
        """A plain pass has come in; all of them together weigh 1 if nobody said otherwise."""
        if self.declared is None:
            if self.reference not in (None, 1):
                raise MisuseError("A plain backward() after a weighted one. Pass the weight: micro_batch(weight=n).")
            self.reference = 1
            self.counted += 0 if self._had_plain else 1
        self._had_plain = self.had_pass = True

    def roll_back(self) -> None:
        """Put the sums back as they were, bit for bit."""
        for tensor, total in zip(self.tensors, self._sums, strict=True):
            tensor.grad = total

    def commit(self, factor: float) -> None:
        """Add `factor` times the micro-batch to the sums."""
        with torch.no_grad():
            for tensor, total in zip(self.tensors, self._sums, strict=True):
                gradient = tensor.grad
                tensor.grad = total if gradient is None else add_scaled(total, gradient, factor)


def add_scaled(total: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
    """`total + factor · gradient` in place, in the total's precision; `gradient` is given up."""
    if total is None:
        return gradient if factor == 1.0 else gradient.mul_(factor)
    if total.is_sparse and not gradient.is_sparse:
        return gradient.mul_(factor).add_(total)
    return total.add_(gradient, alpha=factor)
