"""Every error and warning gradfit raises: a fact, its numbers, and the call that would be right."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


class GradfitError(Exception):
    """The base of everything gradfit raises on purpose."""


class MisuseError(GradfitError, ValueError):
    """An argument that cannot mean anything; raised before anything is changed."""


class InvalidParameter(MisuseError):
    """One parameter that cannot be what was passed: `name` is the parameter's, `reason` what is
    wrong with it.

    Attributes:
        message: the text.
        name: of the parameter.
        reason: what is wrong with its value.
    """

    def __init__(self, message: str, *, name: str, reason: str) -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process sends its errors home in a pickle
        return functools.partial(type(self), name=self.name, reason=self.reason), self.args


class UnknownName(MisuseError, KeyError):
    """A name, or a tensor, that is not among those there are; a `KeyError` too, as a mapping owes
    its callers.
    """

    def __str__(self) -> str:  # KeyError's own prints the repr of the message
        return str(self.args[0]) if self.args else ""


class GraphError(MisuseError, RuntimeError):
    """A backward pass that has no graph to run through; a `RuntimeError` too, as torch's own is."""


class StateError(MisuseError):
    """A saved state that does not belong to what it is loaded into, or is damaged."""


class StateNotWritten(GradfitError, OSError):
    """A state that could not be saved: the disk is full, or gone. One before it is whole."""


class OffloadError(GradfitError, OSError):
    """A value that was to be moved out of memory could not be written, or not be read back."""


class NonFiniteGradient(GradfitError, ArithmeticError):
    """A NaN or an infinity where a gradient was expected."""


class GradientMismatch(GradfitError, AssertionError):
    """A backward that is not the derivative of its forward; `report` holds every element that was
    compared.

    Attributes:
        message: the text.
        report: the `GradientCheck`, if there is one.
    """

    def __init__(self, message: str, *, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class UnsupportedOp(GradfitError, RuntimeError):
    """An operation that can neither be replayed nor kept, so its gradient would be a guess."""


class ActivationOverwritten(GradfitError, RuntimeError):
    """A tensor that the backward pass needs was changed in place after the forward pass."""


class RankFailed(GradfitError, RuntimeError):
    """Another process of the group failed or did not come, so this one cannot go on; the text names
    it and why.
    """


class NativeCoreMissing(GradfitError, RuntimeError):
    """The native core was asked for by name, and cannot be built or used here; the text says
    why.
    """


class BudgetInfeasible(GradfitError, RuntimeError):
    """No plan stays within the budget. `min_bytes` is the smallest one that does, `breakdown` what
    takes it.

    Attributes:
        message: the text.
        min_bytes: the smallest budget, in bytes, that was found to be feasible.
        breakdown: bytes at that budget's peak, by what takes them.

    >>> import torch
    >>> import gradfit as gf
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> try:
    ...     gf.fit(model, optimizer, lambda m, x: m(x).mean(), torch.ones(4, 8), memory="1 KiB")
    ... except gf.BudgetInfeasible as error:
    ...     step = gf.fit(
    ...         model, optimizer, lambda m, x: m(x).mean(), torch.ones(4, 8), memory=error.min_bytes
    ...     )
    """

    def __init__(
        self, message: str, *, min_bytes: int, breakdown: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.min_bytes = min_bytes
        self.breakdown = dict(breakdown or {})


class ExactnessWarning(UserWarning):
    """Something in this model cannot be the same in micro-batches as in the full batch; the text
    names it.
    """


class LogitsMaterialised(UserWarning):
    """Something needed all the logits of a tiled projection at once; the text names it and the
    line.
    """
