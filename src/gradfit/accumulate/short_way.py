"""What the last pass left behind, so that one more like it can come in with few questions.

After a backward pass no cache holds this code or its data any more, so that each Python function
called between two passes takes microseconds, not a tenth of one: the questions of the long way
(`window_begin.begin`, `plain_admission.admit_plain`), one function each, took 3 to 5 % of a small
model's time. So the functions here are long where many small ones would read better; whatever is
not usual goes the long way.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from gradfit._torch import gradient_of, have_no_gradient, version_of
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.accumulate.strategy import Strategy
from gradfit.accumulate.window_begin import start_clear
from gradfit.accumulate.window_marks import take_marks
from gradfit.accumulate.window_state import Phase
from gradfit.arguments import Number


class ShortWay:
    """The window's gradients and members as the last pass left them.

    `Window.settled` holds it while nothing else has happened to the window (rule 6 there), which
    has marks of its gradients, no loss terms and no scaler. It holds the gradients themselves:
    asking torch for an object that nobody else holds takes several times as long. It does not hold
    the window, which would then be freed only by the garbage collector.
    """

    __slots__ = (
        "_gradients", "_marks", "_missing", "_observe", "_optimizer", "_present", "_state",
        "_strategy", "_tensors", "_versions",
    )  # fmt: skip

    def __init__(self, window: Any) -> None:
        self._tensors = window.tensors
        self._optimizer = window.optimizer if window.follows_optimizer else None
        strategy = self._strategy = window.strategy
        self._observe: Any = (
            None if type(strategy).observe is Strategy.observe else strategy.observe
        )
        self._hold(window)

    def _hold(self, window: Any) -> None:
        """Hold the gradients that the window has marked."""
        self._state, self._marks = window.state, window.marks
        self._present, self._missing = self._marks.tensors, self._marks.missing
        self._gradients, self._versions = self._marks.gradients, self._marks.versions

    def end_window(self, window: Any) -> None:
        """The window is over, or in the user's hands: let its gradients go, and offer to begin the
        next one.
        """
        self._gradients, self._marks = [], None
        window.next_way = self

    def begin_window(self, window: Any) -> bool:
        """Begin a window after one that was used and cleared, as `begin` would; False, and
        nothing done, if there is anything else to see to.
        """
        state = window.state
        if (
            window.strategy is not self._strategy
            or window.apart is not None
            or window.in_doubt
            or window.transaction is not None
            or window.left is not None
            or not window.is_noted
            or not (self._optimizer is None or self._has_same_members())
            or not have_no_gradient(self._tensors)
        ):
            return False
        if state.phase is Phase.FINAL and not state.applied:
            window.count_update(None)
        elif state.phase is not Phase.FILLING or not state.is_empty:
            return False
        window.next_way = None
        start_clear(window)
        self._state = window.state
        return True

    def backward(self, window: Any, loss: Tensor, weight: Number) -> bool:
        """Backpropagate a mean over `weight` items; False, and nothing done, if that needs the long
        way.
        """
        return False

    def admits_plain(self, window: Any, thread: int, begins: bool) -> bool:
        """Whether the plain pass that begins now in this thread, and `begins` a window, is a usual
        one.
        """
        return False

    def is_as_left(self) -> bool:
        """Whether the optimizer has the same parameters, and those the same gradients, as after the
        last pass.
        """
        return (
            (self._optimizer is None or self._has_same_members())
            and self._has_same_gradients()
            and [*map(version_of, self._gradients)] == self._versions
        )

    def _has_same_members(self) -> bool:
        """Whether the optimizer has the parameters it had."""
        now, tensors = parameters_of(self._optimizer) or (), self._tensors
        return len(now) == len(tensors) and all(map(is_, now, tensors))

    def _has_same_gradients(self) -> bool:
        """Whether every parameter has the gradient it had, with whatever content."""
        return all(map(is_, map(gradient_of, self._present), self._gradients)) and (
            not self._missing or have_no_gradient(self._missing)
        )

    def settle(self, window: Any) -> bool:
        """After one more pass: be the short way for the next one, with new gradients, too, those of
        a window's first pass for one. False if that is not usual.
        """
        if window.state is not self._state:
            return False
        if self._are_marks_of(window) and self._has_same_gradients():
            self._versions = self._marks.versions = [*map(version_of, self._gradients)]
            window.marks = self._marks
        else:
            take_marks(window)
            if window.marks is None:
                return False
            self._hold(window)
        if self._state.phase is not Phase.FILLING or self._state.terms:
            return False
        window.settled = self
        return True

    def _are_marks_of(self, window: Any) -> bool:
        """Whether no other thread has brought a plain pass or a new member meanwhile."""
        marks = self._marks
        return marks is not None and window.last_marks is marks and not window.plain.passes
