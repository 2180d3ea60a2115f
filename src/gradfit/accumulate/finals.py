"""Gradients that are final, in the hands of a user: were they used since?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from gradfit import _torch


class FinalGradients:
    """Remembers a window's mean gradients, to tell later whether anybody has stepped with them or cleared them.

    >>> import torch
    >>> w = torch.zeros(2, requires_grad=True)
    >>> w.grad = torch.ones(2)
    >>> finals = FinalGradients([w])
    >>> finals.are_used(), w.grad.zero_(), finals.are_used()
    (False, tensor([0., 0.]), True)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        version = _torch.version_of
        self._marks = [
            (tensor, weakref.ref(gradient), version(gradient), version(tensor))
            for tensor in tensors
            if (gradient := tensor.grad) is not None
        ]

    def __len__(self) -> int:
        return len(self._marks)

    def are_used(self, *, passes: int = 0) -> bool:
        """Whether any was replaced or changed, more often than by `passes` backward passes, or its tensor was."""
        version = _torch.version_of
        for tensor, gradient, gradient_version, tensor_version in self._marks:
            now = tensor.grad
            if now is None or now is not gradient() or version(tensor) != tensor_version:
                return True
            if version(now) - gradient_version > passes:
                return True
        return not self._marks

    def clear(self) -> None:
        """Take those away that are still in place."""
        for tensor, gradient, *_ in self._marks:
            if tensor.grad is gradient():
                tensor.grad = None
