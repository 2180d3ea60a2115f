"""What the gradients were when they were last touched by us: did anybody else touch them since?

Whoever writes a loop may clear, clip or replace gradients at any moment. While a window fills they are sums, divided by
a number that nobody outside knows, so this must be noticed before the next pass adds to them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor

from gradfit import _torch


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

    __slots__ = ("_missing", "_present", "_versions")

    def __init__(self, tensors: Iterable[Any], *, parameters: bool = False) -> None:
        version, reference = _torch.version_of, weakref.ref
        present: list[tuple[Any, weakref.ref[Tensor], int]] = []
        missing: list[Any] = []
        for tensor in tensors:
            gradient = tensor.grad
            if gradient is None:
                missing.append(tensor)
            else:
                present.append((tensor, reference(gradient), version(gradient)))
        self._present, self._missing = present, missing
        self._versions = [(tensor, version(tensor)) for tensor in tensors] if parameters else None

    @property
    def any(self) -> bool:
        """Whether there was any gradient."""
        return bool(self._present)

    def change(self, members: Container[int], new: Iterable[Any]) -> None:
        """Only those with these identities are of interest from now on; new ones are expected to have no gradient."""
        self._present = [one for one in self._present if id(one[0]) in members]
        self._missing = [*(one for one in self._missing if id(one) in members), *new]
        if self._versions is not None:
            self._versions = [one for one in self._versions if id(one[0]) in members]

    def untouched(self) -> bool:
        """Whether all gradients are the same tensors with the same content, and no other was put beside them."""
        version = _torch.version_of
        for tensor, gradient, number in self._present:
            now: Tensor | None = tensor.grad
            if now is None or now is not gradient() or version(now) != number:
                return False
        return all(tensor.grad is None for tensor in self._missing)

    def touch(self) -> Touch:
        """What happened to them; looks at the content of those that were changed in place."""
        changed = cleared = 0
        for tensor, gradient, number in self._present:
            now: Tensor | None = tensor.grad
            if now is not None and now is gradient() and _torch.version_of(now) == number:
                continue
            changed += 1
            cleared += now is None or (now is gradient() and is_clear(now))
        changed += sum(tensor.grad is not None for tensor in self._missing)
        if not changed:
            return Touch.NONE
        if not cleared:
            return Touch.CHANGED
        return Touch.CLEARED if cleared == len(self._present) else Touch.PARTLY_CLEARED

    @property
    def still_there(self) -> int:
        """How many of the gradients are exactly as they were."""
        count = 0
        for tensor, gradient, number in self._present:
            now: Tensor | None = tensor.grad
            count += now is not None and now is gradient() and _torch.version_of(now) == number
        return count

    @property
    def leftovers(self) -> bool:
        """Whether any marked tensor still has a gradient other than zero."""
        return any(not is_clear(tensor.grad) for tensor, *_ in self._present)

    @property
    def parameters_changed(self) -> bool:
        """Whether anybody has written to a parameter; never, if that was not asked for."""
        version = _torch.version_of
        return self._versions is not None and any(version(tensor) != number for tensor, number in self._versions)

    def clear(self) -> None:
        """Take those gradients away that are still the ones that were marked."""
        for tensor, gradient, _ in self._present:
            if tensor.grad is gradient():
                tensor.grad = None


def is_clear(gradient: Tensor | None) -> bool:
    """Whether there is no gradient, or one of zeros."""
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not bool(values.any())
