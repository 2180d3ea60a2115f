"""What counts as one micro-batch of a window: a pass, all passes between two calls of `step()`, or
what somebody has put into `.grad` by hand.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from gradfit.accumulate.gradient_marks import GradientMarks, Touch
from gradfit.accumulate.marks import claim
from gradfit.accumulate.window_begin import drop_left, take_up
from gradfit.accumulate.window_marks import require_untouched, require_usable, take_marks
from gradfit.accumulate.window_members import note_parameters
from gradfit.accumulate.window_state import OpenMicroBatch, Phase
from gradfit.arguments import Number
from gradfit.errors import MisuseError

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window


def add(
    window: Window, weight: Number, *, squared_norm: float | None = None, thread: int | None = None
) -> None:
    """A micro-batch of that weight is in the gradients now; of this thread, or of another one."""
    state, one = window.state, _open(window, thread)
    look_for_other_ends(window, one, threading.get_ident() if thread is None else thread)
    if not (state.terms and one.take_losses({""})):
        one.passes += 1
    state.main.weight += weight
    state.had_pass = True
    window.strategy.observe(weight, squared_norm)


def add_terms(window: Window, weight: Number, names: set[str]) -> None:
    """A micro-batch of terms is in; their totals are kept apart, `weight` is what the first one
    adds.
    """
    one = _open(window)
    if not one.take_losses(names):
        one.passes += 1
    window.state.had_pass = True
    window.strategy.observe(weight)


_ENDED: dict[int, int] = {}
"""By thread, the last plain pass of the micro-batch that any window has ended last."""


def note_end(one: OpenMicroBatch, thread: int) -> None:
    """A window has ended a micro-batch, which may be another window's, too."""
    if one.last_plain != -1:
        _ENDED[thread] = one.last_plain


def look_for_other_ends(window: Window, one: OpenMicroBatch, thread: int) -> None:
    """Before a pass: those that this window has not ended may be of another window's micro-batch,
    which that one has ended. A generator's losses reach the discriminator.

    Where nobody calls `step()`, passes wait in a window until it is full.
    """
    is_ended = one.last_plain != -1 and _ENDED.get(thread) == one.last_plain
    if is_ended and (window.step_ends_micro_batch or window.is_full):
        window.break_off(
            "The window holds backward passes of micro-batches that another accumulator has ended,"
            " and this one has not: of another model's loss, perhaps, as a GAN's generator trains"
            " through the discriminator. Call reset() before the first pass of this one's own"
            " losses, or step() after every pass."
        )


def skip(window: Window) -> None:
    """A micro-batch was left out."""
    _open(window).passes += 1
    window.state.skipped += 1


def _open(window: Window, thread: int | None = None) -> OpenMicroBatch:
    return window.state.open_in(threading.get_ident() if thread is None else thread)


def end_micro_batch(window: Window) -> bool:
    """What this thread has put in since its last call is one micro-batch; gives whether the window
    is full.

    Passes before the first call count one by one if they fill the window. A thread that has put in
    nothing ends the micro-batches of all others; if there are none either, it counts what was put
    into `.grad` by hand.
    """
    state, thread = window.state, threading.get_ident()
    window.plain.end_micro_batch(thread)
    if _may_go_on(window):
        take_up(window)
    if state.phase is not Phase.FILLING:
        return True
    _end_open(window, thread)
    full = not state.is_empty and window.strategy.is_complete(state.micro_batches, window.weight)
    if full:  # else the next pass looks
        require_usable(window, may_be_cleared=False)
    return full


def _may_go_on(window: Window) -> bool:
    """Whether a window is final that nobody has asked for, or used."""
    state = window.state
    return state.phase is Phase.FINAL and not state.asked and window.final_is_unused


def _end_open(window: Window, thread: int) -> None:
    """End this thread's micro-batch; if it has none, all others', or count one put in by hand."""
    present = window.state.open
    closing = [thread] if thread in present else list(present)
    if not closing:
        _count_by_hand(window)
    for one in closing:
        _close(window, one)


def end_settled_micro_batch(window: Window) -> bool | None:
    """End a micro-batch of one usual pass; gives whether the window is full, None if it goes the
    long way (rule 6 of a window).

    Needs `turn`. A full window is left as it is if its gradients are not. It is not taken apart:
    each call between two passes takes long (see `short_way`).
    """
    state, settled, thread = window.state, window.settled, threading.get_ident()
    one = state.open.get(thread)
    if settled is None or not window.step_ends_micro_batch or one is None or one.passes != 1:
        return None
    taken = state.micro_batches + 1
    note_end(one, thread)
    full = window.strategy.is_complete(taken, state.main.weight)
    if full and not settled.is_as_left():
        return None
    state.micro_batches = taken
    del state.open[thread]
    return full


def _close(window: Window, thread: int) -> None:
    state = window.state
    one = state.open[thread]
    note_end(one, thread)
    if not window.step_ends_micro_batch:
        window.step_ends_micro_batch = one.is_of_parts or not window.is_full
    if one.passes > 1 and window.step_ends_micro_batch:
        state.main.weight -= max(0, one.plain - 1)
        one.passes = 1
    state.micro_batches += one.passes
    del state.open[thread]


def close_all(window: Window) -> None:
    """The window ends: what any thread has put in is in the gradients, and counts."""
    for thread in list(window.state.open):
        if window.step_ends_micro_batch:
            _close(window, thread)
        else:
            one = window.state.open.pop(thread)
            note_end(one, thread)
            window.state.micro_batches += one.passes


# -- put in by hand -------------------------------------------------------------------------------


def _count_by_hand(window: Window) -> None:
    """A micro-batch that no pass has made: new gradients in `.grad`, or, over several processes,
    none at all.
    """
    state, new = window.state, _has_new_gradients(window)
    if not new and window.ranks.size == 1:
        return
    state.main.divisor = state.main.divisor or (1.0 if new else None)
    state.main.weight += int(new)
    state.micro_batches += 1
    window.strategy.observe(int(new))
    take_marks(window)


def _has_new_gradients(window: Window) -> bool:
    """Whether somebody has put gradients into `.grad`; refused where they cannot be a
    micro-batch.
    """
    if window.state.is_empty:
        return _put_into_empty(window)
    marks = window.marks
    new = marks is not None and not marks.untouched()
    _require_not_of_others(window, new)
    if marks is not None and _are_no_micro_batch(window, marks, new):
        require_untouched(window)
    return new


def _are_no_micro_batch(window: Window, marks: GradientMarks, new: bool) -> bool:
    """Whether more, or something else, has happened than that gradients were put in by hand."""
    return window.parameters_written or (
        new and (window.state.had_pass or marks.touch() is not Touch.CHANGED)
    )


def _put_into_empty(window: Window) -> bool:
    """Whether somebody has put gradients where the last window's were, or none."""
    present = sum(source.grad is not None for source in window.sources)
    old = 0 if window.left is None else window.left.still_there
    if present > old:
        _require_no_old(window, old, present)
        _require_not_of_others(window, True)
        claim(window, window.tensors)
        drop_left(window)
        window.left = None
        note_parameters(window)
    return present > old


def _require_no_old(window: Window, old: int, present: int) -> None:
    if old and not window.drops_left:
        raise MisuseError(
            f"{old} of {present} gradients in `.grad` are those of the last window, which"
            " were used. Call optimizer.zero_grad() after optimizer.step(), or reset() to"
            " drop them."
        )


def _require_not_of_others(window: Window, new: bool) -> None:
    """Refuse to take for put by hand what another window's pass has added."""
    if new and window.plain.reached_by_others:
        raise MisuseError(
            f"Another accumulator's backward() has reached {len(window.plain.reached_by_others)}"
            f" of these {len(window.tensors)} parameters, with gradients that are divided by a"
            " number of its own. Call loss.backward(), which both accumulators count, or"
            " reset() on this one to drop them."
        )
