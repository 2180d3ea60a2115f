"""The update of a window that its owner fills with one pass, and ends right after it: in few calls.

A step of `fit` that runs its batch in one piece asks the window as often as one that adds up many
parts, and all it can be told is that nothing has come in before this pass, and nobody has touched
anything since. After a pass no cache holds the code that asks (see `short_way`): of a step of ten
milliseconds the questions took 2 %. So these two functions are long; whatever is not usual goes the
long way, before anything is changed.
"""

from __future__ import annotations

import math
from operator import is_
from threading import get_ident
from typing import Any

from torch import Tensor

from gradfit._torch import have_no_gradient, run_backward
from gradfit.accumulate.gradient_marks import drop_gradients
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.accumulate.processes import SINGLE_PROCESS
from gradfit.accumulate.scaling import gradient_norm, gradients_of, scale_gradients
from gradfit.accumulate.step_result import StepResult
from gradfit.accumulate.strategy import FixedStepCount
from gradfit.accumulate.update import Update
from gradfit.accumulate.weighted_backward import Backpropagator
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_state import OpenMicroBatch, Phase
from gradfit.arguments import Number
from gradfit.own_passes import OWN_PASSES

_USUAL_WEIGHT = 2**53  # whole numbers below it need no second look


class SinglePass:
    """The short way of a bare window: one pass, and the update with it.

    Args:
        window: that is filled.
        passes: runs its passes.
        update: ends it.
    """

    def __init__(self, window: Window, passes: Backpropagator, update: Update) -> None:
        self._window, self._passes, self._update = window, passes, update
        # nothing that needs more than the gradients themselves
        self._may_be_short = (
            window.scaler is None
            and window.dtype is None
            and not passes.isolate
            and update.clipper is None
            and update.optimizer is not None
            and window.hears_of_steps
        )
        self._filled: Any = None  # the state of the window that one pass has filled

    def backward(self, loss: Tensor, weight: Number | Tensor, reduction: str) -> bool:
        """Fill the window with a loss, the mean over `weight` items or their sum; False, and
        nothing done, if that needs the long way.
        """
        window, thread = self._window, get_ident()
        self._filled, state, strategy = None, window.state, window.strategy
        if (
            not self._may_be_short
            or type(strategy) is not FixedStepCount
            or strategy.steps != 1
            or type(loss) is not Tensor
            or not (loss.requires_grad and loss.is_cpu and loss.is_floating_point())
            or loss.dim()
            or not isinstance(weight, int | float)
            or isinstance(weight, bool)
            or not 0 < weight < _USUAL_WEIGHT
            or reduction not in ("mean", "sum")
            or thread in OWN_PASSES
            or not self._is_usual(window)
        ):
            return False
        with window.turn:
            if not have_no_gradient(window.tensors):
                drop_gradients(window.tensors)  # those of before are nobody's
            window.is_first, window.owns = False, True
            window.in_doubt, window.marks = True, None
            factor = 1.0 if reduction == "mean" else 1 / float(weight)
            initial = self._passes.initial_for(loss, factor)
            OWN_PASSES[thread] = window.plain.token
            try:
                run_backward(loss, initial, False)
            except BaseException:
                window.break_off()
                raise
            finally:
                OWN_PASSES.pop(thread, None)
            state.open[thread] = OpenMicroBatch(passes=1)
            state.main.weight, state.main.divisor = weight, float(weight)
            state.had_pass = True
            window.in_doubt = False
            self._filled = state
        return True

    def _is_usual(self, window: Window) -> bool:
        """Whether the window is empty, this process's own, and of the same parameters."""
        state = window.state
        if (
            not window.enabled
            or window.ranks is not SINGLE_PROCESS
            or window.sources is not window.tensors
            or window.transaction is not None
            or window.block is not None
            or window.apart is not None
            or window.in_doubt
            or window.left is not None
            or window.may_be_wrapped_later
            or not window.is_noted
            or state.phase is not Phase.FILLING
            or not state.is_empty
            or self._update.is_widened
        ):
            return False
        if not window.follows_optimizer:
            return True
        now, tensors = parameters_of(window.optimizer) or (), window.tensors
        return len(now) == len(tensors) and all(map(is_, now, tensors))

    def finish(self) -> StepResult | None:
        """Update with the pass that has just filled the window; None, and nothing done, if that
        needs the long way.
        """
        window, update, state = self._window, self._update, self._filled
        optimizer = update.optimizer
        self._filled = None
        if (
            state is None
            or optimizer is None
            or window.state is not state
            or window.unread is not None
            or window.read_late is not None
            or window.in_doubt
            or window.block is not None
            or state.phase is not Phase.FILLING
            or not window.enabled
        ):
            return None
        tensors, weight = window.tensors, state.main.weight
        with window.turn:
            norm = gradient_norm(gradients_of(tensors))
            if not math.isfinite(norm):
                return None
            window.apart, window.in_doubt = get_ident(), True
            try:
                if update.max_norm is not None and norm > update.max_norm:
                    scale_gradients(tensors, update.max_norm / norm)
                update.all_flushing, update.notes = True, window.notes
                stepped = update.step_or_keep(optimizer, None, norm)
                state.micro_batches = 1
                state.open.clear()
                update.end(norm * norm)
            finally:
                window.apart = None
        return StepResult(
            stepped, "stepped" if stepped else "left out by the optimizer", norm, weight, 1, 0
        )
