"""A micro-batch that can be taken back: its gradients are made apart from the window's, and added
at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.gradient_marks import drop_gradients
from gradfit.accumulate.identities import identities, without
from gradfit.accumulate.window_state import Total, add_scaled
from gradfit.arguments import Number
from gradfit.errors import MisuseError


class Transaction:
    """Takes the window's sums out of `.grad`, so that what comes in there is one micro-batch's
    alone.

    Inside, losses are backpropagated as they are; the weight is multiplied in, in the sums' own
    precision, when they are added. Taking back is putting the untouched sums back.
    """

    def __init__(self, tensors: Sequence[Any], weight: Number | None) -> None:
        self.tensors = list(tensors)  # whose `.grad` autograd adds to
        self.declared = weight
        self.reference: Number | None = None  # what one unit of `.grad` weighs: the first pass says
        self.counted: Number = 0
        self.had_pass = False
        self.terms: dict[str, Total] = {}
        self.names: set[str] = set()  # of all terms, those without weight included
        self._had_plain = False
        self.adds_up = False  # the sums are being changed: there is no way back
        self._sums: list[Tensor | None] = [tensor.grad for tensor in tensors]
        drop_gradients(tensors)

    def extend(self, tensors: Sequence[Any]) -> None:
        """Parameters that came to the window meanwhile: all they have is this micro-batch's."""
        new = without(tensors, identities(self.tensors))
        self.tensors += new
        self._sums += [None] * len(new)

    @property
    def weight(self) -> Number:
        """What the micro-batch weighs."""
        return self.counted if self.declared is None else self.declared

    @property
    def weighs(self) -> bool:
        """Whether any of its losses has a weight."""
        return bool(self.weight or self.terms)

    @property
    def is_empty(self) -> bool:
        """Whether nothing came in at all."""
        return not (self.had_pass or self.terms or self.gradients())

    @property
    def sums(self) -> list[Tensor]:
        """What the window holds beside this micro-batch."""
        return [total for total in self._sums if total is not None]

    def gradients(self) -> list[Tensor]:
        """The micro-batch's own gradients, terms included."""
        own = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        for term in self.terms.values():
            own += term.gradients.values()
        return own

    def factor_for(self, weight: Number, reduction: str) -> float:
        """What to backpropagate a loss with; MisuseError if its weight contradicts the
        micro-batch's.
        """
        unit = weight if self.declared is None else self.declared
        if weight not in (1, unit):
            raise MisuseError(
                f"weight={weight!r} inside micro_batch(weight={self.declared!r}). Pass the weight"
                " in one place."
            )
        return self._relative(1 if reduction == "sum" else unit)

    def _relative(self, unit: Number) -> float:
        """The factor for a loss whose gradient weighs `unit`: the first one's is 1."""
        if not self.reference:
            self.reference = unit
        return unit / self.reference if self.reference else 1.0

    def add(self, weight: Number) -> None:
        """A weighted pass has come in."""
        self.had_pass = True
        self.counted += weight

    def add_plain(self) -> float:
        """A plain pass is about to come in; all of them together weigh 1 if nobody said otherwise.
        Gives its factor.
        """
        factor = self._relative(1 if self.declared is None else self.declared)
        self.counted += 0 if self._had_plain else 1
        self._had_plain = self.had_pass = True
        return factor

    def roll_back(self) -> None:
        """Put the sums back as they were, bit for bit."""
        for tensor, total in zip(self.tensors, self._sums, strict=True):
            tensor.grad = total

    def roll_back_to_zero(self) -> None:
        """The same for a micro-batch without weight: what it alone has reached has a gradient, of
        zeros.
        """
        for tensor, total in zip(self.tensors, self._sums, strict=True):
            gradient = tensor.grad
            tensor.grad = zero(gradient) if total is None and gradient is not None else total

    def commit(self, factor: float) -> None:
        """Add `factor` times the micro-batch to the sums."""
        self.adds_up = True
        with torch.no_grad():
            for tensor, total in zip(self.tensors, self._sums, strict=True):
                gradient = tensor.grad
                tensor.grad = total if gradient is None else add_scaled(total, gradient, factor)


def zero(gradient: Tensor) -> Tensor:
    """A gradient with all its values set to zero, in place; whatever they were, NaN too."""
    with torch.no_grad():
        (gradient._values() if gradient.is_sparse else gradient).zero_()
    return gradient
