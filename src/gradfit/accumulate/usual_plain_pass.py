"""The usual plain pass, in few calls: one more `loss.backward()` into a window of plain passes."""

from __future__ import annotations

import threading
from typing import Any

from gradfit import _torch
from gradfit.accumulate.counted_micro_batches import look_for_other_ends
from gradfit.accumulate.marks import belongs_to_another
from gradfit.accumulate.plain_admission import finalise_by_itself
from gradfit.accumulate.processes import SINGLE_PROCESS
from gradfit.accumulate.short_way import ShortWay
from gradfit.accumulate.window_state import OpenMicroBatch, Phase, WindowState


def is_usual(window: Any) -> bool:
    """Whether the next plain pass can take the short way if nothing else happens until then.

    Only the main thread's: its number is never given to another one, such as autograd's own.
    """
    return (
        window.marks is not None
        and _adds_as_it_is(window.state)
        and _is_by_itself(window)
        and threading.get_ident() == threading.main_thread().ident
    )


def _adds_as_it_is(state: WindowState) -> bool:
    """Whether gradients come in as they are, into one sum, which nobody must clear."""
    return (
        state.phase is Phase.FILLING
        and state.main.divisor == 1.0
        and not state.terms
        and not state.on_used_gradients
    )


def _is_by_itself(window: Any) -> bool:
    """Whether nothing else is done to gradients: by a scaler, a micro-batch, other processes."""
    return window.scaler is None and window.transaction is None and window.ranks is SINGLE_PROCESS


# Calls from the engine's to `admits_plain`: the hook, `_begin` and `_begin_usual` of
# `plain_backwards`, itself. Where others are in between, the pass goes the long way.
_BELOW_ENGINE = 4


class UsualPlainPass(ShortWay):
    """Brings further plain passes of the main thread into a window that holds nothing else."""

    __slots__ = ("_thread", "_written")

    def __init__(self, window: Any) -> None:
        super().__init__(window)
        self._thread = threading.get_ident()
        # versions of the parameters, if somebody else's optimizer could update them unseen
        self._written: list[int] | None = window.written

    def is_as_left(self) -> bool:
        """Whether the members, their gradients, and the parameters if they are watched, are as
        after the last pass.
        """
        written = self._written
        if written is not None and [*map(_torch.version_of, self._tensors)] != written:
            return False
        return super().is_as_left()

    def admits_plain(self, window: Any, thread: int, begins: bool) -> bool:
        """Whether the plain pass that begins now in this thread, and `begins` a window, is a usual
        one.
        """
        if thread != self._thread or not _torch.in_simple_backward(_BELOW_ENGINE):
            return False
        if begins:
            return self.begin_window(window)
        return (
            window.apart is None
            and not window.is_of_one
            and (window.is_noted or not belongs_to_another(window, self._tensors))
            and self.is_as_left()
        )

    def begin_window(self, window: Any) -> bool:
        if not super().begin_window(window):
            return False
        self._state.main.divisor, self._state.had_pass = 1.0, True
        self._written = window.written
        return True

    def book(self, window: Any, first: int, task: int) -> None:
        """Count a pass that was admitted, and has that number; `first` is the identity of the first
        tensor it reaches.
        """
        state, thread = self._state, self._thread
        one = state.open.get(thread)
        if one is None:
            one = state.open[thread] = OpenMicroBatch()
        else:
            look_for_other_ends(window, one, thread)
        one.passes += 1
        one.plain += 1
        one.last_plain = task
        one.reached.add(first)
        state.main.weight += 1
        if self._observe is not None:
            self._observe(1)
        window.marks = None  # until it has ended

    def end(self, window: Any) -> bool:
        """It has added all of its gradients; False, and nothing done, if that needs the long
        way.
        """
        written, state = self._written, self._state
        if written is not None and [*map(_torch.version_of, self._tensors)] != written:
            return False
        if not self.settle(window):
            return False
        steps = state.micro_batches + state.open[self._thread].passes
        # threads beside this one have passes of their own, which only the window adds up
        if written is not None and (
            len(state.open) > 1 or window.strategy.is_complete(steps, state.main.weight)
        ):
            finalise_by_itself(window)
            if state.phase is Phase.FINAL:
                self.end_window(window)
        return True
