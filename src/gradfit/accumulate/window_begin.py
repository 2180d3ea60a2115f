"""How a window begins: whole, with its members its own, and nothing left over from the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradfit._torch import have_no_gradient, type_of
from gradfit.accumulate.gradient_marks import GradientMarks, drop_gradients, is_clear
from gradfit.accumulate.loss_scaling import CarriedScale, scale_of
from gradfit.accumulate.marks import claim
from gradfit.accumulate.processes import wrapped_since
from gradfit.accumulate.window_marks import STILL_THERE, is_dropped, require_untouched
from gradfit.accumulate.window_members import follow_optimizer, note_parameters
from gradfit.accumulate.window_state import Phase
from gradfit.errors import MisuseError

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window


def begin(window: Window) -> None:
    """Before a contribution of the owner's: the window must be whole, as it was left, and ours.
    Needs `turn`.
    """
    window.settled = None
    if window.transaction is not None:
        return
    window.require_intact()
    follow_optimizer(window)
    make_ready(window, plain=False)


def make_ready(window: Window, *, plain: bool) -> None:
    """The window can take something in: a `plain` pass, or one of its own; an empty one begins."""
    if window.state.phase is Phase.FINAL:
        _leave_final(window, plain=plain)
    if window.state.phase is Phase.REDUCED:
        raise MisuseError(
            "The window has ended, and its update has not succeeded yet. Call step() again, or"
            " reset() to drop it."
        )
    if is_dropped(window):
        window.count_update(None)
    if window.state.is_empty:
        start(window, plain=plain)
    else:
        require_untouched(window)


def start(window: Window, *, plain: bool = False) -> None:
    """The first contribution of a window is about to come.

    Gradients from before the very first one are the user's own, and plain passes add to them as
    ever.
    """
    window.next_way = None
    if window.may_be_wrapped_later:
        _require_not_wrapped(window)
    claim(window, window.tensors)
    drop_left(window)
    are_used = False
    if not have_no_gradient(window.sources):
        are_used = _see_to_earlier(window, plain)
    start_clear(window)
    window.state.on_used_gradients = are_used


def _require_not_wrapped(window: Window) -> None:
    """Refuse a model that was wrapped after its parameters came to the window."""
    error = wrapped_since(window.tensors, window)
    if error is not None:
        raise error
    window.may_be_wrapped_later = False


def _see_to_earlier(window: Window, plain: bool) -> bool:
    """There are gradients from before this window: drop them, add to them, or refuse to. Gives
    whether they must be cleared before an update.

    A generator's losses go through a discriminator whose loop clears its gradients later, at its
    top: that is refused only if it steps with them.
    """
    if window.bare:
        drop_gradients(window.sources)
    elif not (_may_add_to_earlier(window, plain) or _are_clear(window)):
        if not (plain and window.is_of_one):
            raise MisuseError(STILL_THERE)
        return True
    return False


def _may_add_to_earlier(window: Window, plain: bool) -> bool:
    """Whether gradients from before this window are the user's own, and meant."""
    return plain and window.is_first and not window.plain.reached_by_others


def _are_clear(window: Window) -> bool:
    return all(is_clear(source.grad) for source in window.sources)


def start_clear(window: Window) -> None:
    """`start` where the tensors are this window's own, and have no gradients to see to."""
    window.is_first, window.left, window.owns = False, None, True
    window.plain.forget_others()
    note_parameters(window)
    _note_types(window)
    if window.scaler is not None:
        window.state.carried = CarriedScale(scale_of(window.scaler))


def _note_types(window: Window) -> None:
    """Whether factors must be chosen with care: gradients are, or come from, narrow numbers."""
    types, wide = set(map(type_of, window.tensors)), window.dtype
    if wide is None:
        window.narrow = torch.float16 in types
        return
    widened = {one for one in types if one != torch.promote_types(one, wide)}
    window.narrow, window.widened_float16 = bool(widened), torch.float16 in widened


# -- what the last window has left ----------------------------------------------------------------


def leave_gradients(window: Window) -> None:
    """A window has ended, and what is in `.grad` is for the user to clear."""
    window.left, window.drops_left = GradientMarks(window.tensors), False


def drop_left(window: Window) -> None:
    """Gradients that were applied stay until now."""
    if window.left is not None and window.drops_left:
        window.left.clear()
        window.left = None


def _leave_final(window: Window, *, plain: bool) -> None:
    """The gradients were handed out; begin anew if they were used, go on with them if they were
    not.
    """
    notice_use(window)
    state = window.state
    if state.phase is not Phase.FINAL:
        return
    if not window.final_is_unused:
        raise MisuseError(
            "The gradients of the last window were used, and are still in `.grad`. Call"
            " optimizer.zero_grad() after optimizer.step(), or reset() to drop them."
        )
    if state.terms or (plain and state.asked):
        raise MisuseError(
            "The window is full and its gradients are final, but neither a step nor"
            " zero_grad came before the next backward. Step the optimizer and zero the"
            " gradients once is_ready is true, or call reset()."
        )
    take_up(window)


def take_up(window: Window) -> None:
    """Final gradients are Σ/total: as if the total had been the divisor from the start, more can
    come in.
    """
    state = window.state
    state.main.divisor, state.phase, state.asked = (
        float(state.main.weight) or None,
        Phase.FILLING,
        False,
    )


def notice_use(window: Window) -> None:
    """A final window whose gradients were used and cleared, or applied, is over."""
    if window.state.phase is Phase.FINAL and not window.final_is_wanted:
        marks, applied = window.marks, window.state.applied
        window.count_update(None)
        window.ranks.resume()
        window.left, window.drops_left = marks, applied
