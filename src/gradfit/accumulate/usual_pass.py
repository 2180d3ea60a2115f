"""The usual weighted pass, in few calls: one more into a window that is as the last one left it."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor

from gradfit._torch import run_backward
from gradfit.accumulate.provisional_divisor import divisor_for
from gradfit.accumulate.short_way import ShortWay
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_state import OpenMicroBatch
from gradfit.arguments import Number
from gradfit.own_passes import OWN_PASSES

NARROW = (torch.float16, torch.bfloat16)


class UsualPass(ShortWay):
    """Runs further weighted passes of a window that has a divisor."""

    __slots__ = (
        "_device", "_divisor", "_dtype", "_initial", "_initial_for", "_total", "_weight",
    )  # fmt: skip

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
        self._divisor = self._total.divisor
        self._weight, self._dtype, self._device = weight, loss.dtype, loss.device
        self._initial = self._initial_of(loss) if loss.is_cpu else None

    def _initial_of(self, loss: Tensor) -> Tensor:
        return self._initial_for(loss, self._weight / self._divisor)

    def backward(self, window: Window, loss: Tensor, weight: Number) -> bool:
        """Backpropagate a mean over `weight` items; False, and nothing done, if that needs the long
        way.

        Needs the window's turn, and a loss that requires a gradient.
        """
        thread, begins = get_ident(), window.settled is None
        window.settled = window.next_way = None
        if loss.dim() or thread in OWN_PASSES:
            return False
        if not (self._begins(window, loss, weight) if begins else self._continues(loss, weight)):
            return False
        total, initial = self._total, self._initial
        if initial is None:  # on an accelerator, for each pass its own
            initial = self._initial_of(loss)
        window.in_doubt, window.marks = True, None
        try:
            OWN_PASSES[thread] = window.plain.token
            run_backward(loss, initial, False)
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
            self.settle(window)
            window.in_doubt = False
        return True

    def _is_same_kind(self, loss: Tensor, weight: Number) -> bool:
        return weight == self._weight and loss.dtype is self._dtype and loss.device == self._device

    def _begins(self, window: Window, loss: Tensor, weight: Number) -> bool:
        """Begin a window with this loss; False if it is not like the last one's."""
        if not self._is_same_kind(loss, weight) or not self.begin_window(window):
            return False
        total = self._total = self._state.main
        divisor = divisor_for(window, weight, narrow=loss.dtype in NARROW or window.narrow)
        if divisor != self._divisor:
            self._keep_initial(loss, weight)
        total.divisor, self._state.had_pass = divisor, True
        return True

    def _continues(self, loss: Tensor, weight: Number) -> bool:
        """Whether this loss can come into the window, which is as the last pass left it."""
        if self._total.lacks_room(weight) or not self.is_as_left():
            return False
        if not self._is_same_kind(loss, weight):
            if not loss.is_floating_point():
                return False
            self._keep_initial(loss, weight)
        return True
