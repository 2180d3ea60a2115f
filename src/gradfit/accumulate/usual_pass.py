"""The usual weighted pass, in few calls: one more into a window that is as the last one left it.

After a backward pass no cache holds this code or its data any more, so that each Python function
called between two passes takes microseconds, not a tenth of one: the questions of `Window.begin`,
one function each, took 3 % of a small model's time. Whatever is not usual goes that long way.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from threading import get_ident
from typing import Any

from torch import Tensor

from gradfit._torch import run_backward, version_of
from gradfit.accumulate.gradient_marks import GradientMarks
from gradfit.accumulate.numbers import Number
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.accumulate.plain_backwards import OWN_PASSES
from gradfit.accumulate.strategy import Strategy
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_state import OpenMicroBatch, Phase


class UsualPass:
    """Runs further passes of a window that has a divisor, no loss terms, no scaler, and marks of
    its gradients.

    `Window.settled` holds it while nothing else has happened to the window (rule 6 there). It holds
    the gradients themselves: asking torch for an object that nobody else holds takes several times
    as long.
    """

    __slots__ = (
        "_device", "_dtype", "_gradients", "_initial", "_initial_for", "_marks", "_missing",
        "_observe", "_optimizer", "_present", "_state", "_tensors", "_total", "_versions",
        "_weight", "_window",
    )  # fmt: skip

    def __init__(
        self,
        window: Window,
        initial_for: Callable[[Tensor, float], Tensor],
        loss: Tensor,
        weight: Number,
    ) -> None:
        assert window.marks is not None
        self._window, self._state, self._marks = window, window.state, window.marks
        self._total, self._tensors = window.state.main, window.tensors
        self._optimizer = window.optimizer if window.follows_optimizer else None
        strategy = window.strategy
        self._observe: Any = (
            None if type(strategy).observe is Strategy.observe else strategy.observe
        )
        self._present, self._missing = window.marks.tensors, window.marks.missing
        self._gradients, self._versions = window.marks.gradients, window.marks.versions
        self._initial_for = initial_for
        self._keep_initial(loss, weight)

    def _keep_initial(self, loss: Tensor, weight: Number) -> None:
        """Losses of one kind with one weight start from one gradient: weight / divisor."""
        assert self._total.divisor is not None
        self._weight, self._dtype, self._device = weight, loss.dtype, loss.device
        self._initial = self._initial_for(loss, weight / self._total.divisor)

    def backward(self, loss: Tensor, weight: Number) -> bool:
        """Backpropagate a mean over `weight` items; False, and nothing done, if that needs the long
        way.

        Needs the window's turn, and a loss that requires a gradient.
        """
        window, total, thread = self._window, self._total, get_ident()
        window.settled = None
        if loss.dim() or total.lacks_room(weight) or thread in OWN_PASSES or not self.is_as_left():
            return False
        if weight != self._weight or loss.dtype is not self._dtype or loss.device != self._device:
            if not loss.is_floating_point():
                return False
            self._keep_initial(loss, weight)
        window.in_doubt, window.marks = True, None
        try:
            OWN_PASSES[thread] = window.plain.token
            run_backward(loss, self._initial, False)
        except BaseException as error:
            window.break_off()
            window.ranks.failed(error)
            raise
        finally:
            OWN_PASSES.pop(thread, None)
        with window.lock:
            open_here = self._state.open
            if thread not in open_here:
                open_here[thread] = OpenMicroBatch()
            open_here[thread].passes += 1
            total.weight += weight
            if self._observe is not None:
                self._observe(weight)
            window.marks = self._refreshed()
            if window.marks is None:
                window.take_marks()
            else:
                window.settled = self
            window.in_doubt = False
        return True

    def is_as_left(self) -> bool:
        """Whether the optimizer has the same parameters, and those the same gradients, as after the
        last pass.
        """
        optimizer, tensors = self._optimizer, self._tensors
        if optimizer is not None:
            now = parameters_of(optimizer) or ()
            if len(now) != len(tensors) or not all(map(is_, now, tensors)):
                return False
        for tensor, gradient, version in zip(
            self._present, self._gradients, self._versions, strict=True
        ):
            if tensor.grad is not gradient or version_of(gradient) != version:
                return False
        return not self._missing or all(tensor.grad is None for tensor in self._missing)

    def _refreshed(self) -> GradientMarks | None:
        """The marks of the gradients as they are now; None if they are other tensors, or not ours
        alone.

        Another thread may have brought a plain pass or a new member meanwhile.
        """
        window, marks = self._window, self._marks
        if (
            window.last_marks is not marks
            or self._state.phase is not Phase.FILLING
            or window.plain.passes
        ):
            return None
        versions = []
        for tensor, gradient in zip(self._present, self._gradients, strict=True):
            if tensor.grad is not gradient:
                return None
            versions.append(version_of(gradient))
        if self._missing and any(tensor.grad is not None for tensor in self._missing):
            return None
        self._versions = marks.versions = versions
        return marks
