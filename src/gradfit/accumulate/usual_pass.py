"""The usual weighted pass, in few calls: one more into a window that is as the last one left it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from torch import Tensor

from gradfit._torch import run_backward
from gradfit.accumulate.numbers import Number
from gradfit.accumulate.plain_backwards import OWN_PASSES
from gradfit.accumulate.short_way import ShortWay
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_state import OpenMicroBatch


class UsualPass(ShortWay):
    """Runs further weighted passes of a window that has a divisor."""

    __slots__ = ("_device", "_dtype", "_initial", "_initial_for", "_total", "_weight")

    def __init__(
        self,
        window: Window,
        initial_for: Callable[[Tensor, float], Tensor],
        loss: Tensor,
        weight: Number,
    ) -> None:
        super().__init__(window)
        self._total, self._initial_for = window.state.main, initial_for
        self._keep_initial(loss, weight)

    def _keep_initial(self, loss: Tensor, weight: Number) -> None:
        """Losses of one kind with one weight start from one gradient: weight / divisor."""
        assert self._total.divisor is not None
        self._weight, self._dtype, self._device = weight, loss.dtype, loss.device
        self._initial = self._initial_for(loss, weight / self._total.divisor)

    def backward(self, window: Window, loss: Tensor, weight: Number) -> bool:
        """Backpropagate a mean over `weight` items; False, and nothing done, if that needs the long
        way.

        Needs the window's turn, and a loss that requires a gradient.
        """
        total, thread = self._total, get_ident()
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
            one = self._state.open.get(thread)
            if one is None:
                one = self._state.open[thread] = OpenMicroBatch()
            one.passes += 1
            total.weight += weight
            if self._observe is not None:
                self._observe(weight)
            if not self.renew(window):
                window.take_marks()
            window.in_doubt = False
        return True
