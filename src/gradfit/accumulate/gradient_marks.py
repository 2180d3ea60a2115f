"""What the gradients were when they were last touched by us: did anybody else touch them since?

Whoever writes a loop may clear, clip or replace gradients at any moment. While a window fills they
are sums, divided by a number that nobody outside knows, so this must be noticed before the next
pass adds to them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Container, Iterable, Sequence
from itertools import compress, repeat, starmap
from operator import is_not, not_
from typing import Any

from torch import Tensor

from gradfit._torch import gradient_of, have_gradients, have_no_gradient, version_of
from gradfit.accumulate.identities import only


class Touch(enum.Enum):
    """What has become of marked gradients."""

    NONE = "untouched"
    CLEARED = "cleared"
    """Every one is gone, or filled with zeros."""
    PARTLY_CLEARED = "cleared in part"
    CHANGED = "changed"
    """Some have another content, or are other tensors; none was cleared."""


class GradientMarks:
    """Remembers gradients by identity and version, without keeping them alive.

    >>> import torch
    >>> w = torch.zeros(2, requires_grad=True)
    >>> w.grad = torch.ones(2)
    >>> marks = GradientMarks([w])
    >>> marks.untouched(), w.grad.zero_(), marks.touch().value
    (True, tensor([0., 0.]), 'cleared')
    """

    __slots__ = ("_parameters", "_references", "_written", "missing", "tensors", "versions")

    def __init__(self, tensors: Sequence[Any], *, parameters: bool = False) -> None:
        each = [*map(gradient_of, tensors)]
        present = [*map(is_not, each, repeat(None))]
        gradients: list[Any] = [*compress(each, present)]
        # those with a gradient
        self.tensors: list[Any] = [*compress(tensors, present)]
        self.missing: list[Any] = [*compress(tensors, map(not_, present))]
        self._references: list[Any] = [*map(weakref.ref, gradients)]
        self.versions: list[int] = [*map(version_of, gradients)]
        self._parameters: list[Any] = []
        self._written: list[int] = []
        if parameters:
            self.note_parameters()

    def note_parameters(self) -> None:
        """Watch the parameters, too, from now on."""
        self._parameters = [*self.tensors, *self.missing]
        self._written = [*map(version_of, self._parameters)]

    def refresh(self) -> bool:
        """Take the gradients for marked as they are now; False if that needs new marks: they are
        other tensors.
        """
        if not self._are_there():
            return False
        self.versions = [*map(version_of, self.gradients)]
        return True

    def _are_there(self) -> bool:
        """Whether every tensor has the gradient that was marked, with whatever content, and no
        other has one.
        """
        gradients = self.gradients
        return (
            all(map(is_not, gradients, repeat(None)))  # a dead one is not "none, as before"
            and have_gradients(self.tensors, gradients)
            and have_no_gradient(self.missing)
        )

    @property
    def gradients(self) -> list[Any]:
        """The marked gradients; None for one that is not there any more."""
        return [reference() for reference in self._references]

    @property
    def any(self) -> bool:
        """Whether there was any gradient."""
        return bool(self.tensors)

    def change(self, members: Container[int], new: Iterable[Any]) -> None:
        """Only those with these identities are of interest from now on; new ones are expected to
        have no gradient.
        """
        kept = [id(tensor) in members for tensor in self.tensors]
        self.tensors = [*compress(self.tensors, kept)]
        self._references = [*compress(self._references, kept)]
        self.versions = [*compress(self.versions, kept)]
        self.missing = [*only(self.missing, members), *new]
        self._parameters = only(self._parameters, members)
        self._written = [*map(version_of, self._parameters)]

    def untouched(self) -> bool:
        """Whether all gradients are the same tensors with the same content, and no other was put
        beside them.
        """
        return self._are_there() and [*map(version_of, self.gradients)] == self.versions

    def _as_before(self) -> list[bool]:
        """For each gradient, whether it is exactly as it was."""
        return [
            one is not None and one is tensor.grad and version_of(one) == version
            for tensor, one, version in zip(
                self.tensors, self.gradients, self.versions, strict=True
            )
        ]

    def touch(self) -> Touch:
        """What happened to them; looks at the content of those that were changed in place."""
        differs = [*map(not_, self._as_before())]
        present = zip(self.tensors, self._references, strict=True)
        cleared = sum(starmap(_is_cleared, compress(present, differs)))
        if not any(differs) and have_no_gradient(self.missing):
            return Touch.NONE
        if not cleared:
            return Touch.CHANGED
        return Touch.CLEARED if cleared == len(self.tensors) else Touch.PARTLY_CLEARED

    @property
    def still_there(self) -> int:
        """How many of the gradients are exactly as they were."""
        return sum(self._as_before())

    @property
    def leftovers(self) -> bool:
        """Whether any marked tensor still has a gradient other than zero."""
        return not have_no_gradient(self.tensors) and any(
            not is_clear(tensor.grad) for tensor in self.tensors
        )

    @property
    def parameters_changed(self) -> bool:
        """Whether anybody has written to a parameter; never, if that was not asked for."""
        return bool(self._parameters) and [*map(version_of, self._parameters)] != self._written

    def clear(self) -> None:
        """Take those gradients away that are still the ones that were marked."""
        for tensor, reference in zip(self.tensors, self._references, strict=True):
            if tensor.grad is reference():
                tensor.grad = None


def _is_cleared(tensor: Any, marked: weakref.ref[Tensor]) -> bool:
    """Whether a gradient that was marked is gone, or filled with zeros."""
    now: Tensor | None = tensor.grad
    return now is None or (now is marked() and is_clear(now))


def drop_gradients(tensors: Iterable[Any]) -> None:
    """Take all gradients away."""
    for tensor in tensors:
        tensor.grad = None


def is_clear(gradient: Tensor | None) -> bool:
    """Whether there is no gradient, or one of zeros."""
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())
