"""Has anybody else touched a window's gradients or parameters? Asked before anything is added to
them (rule 5 of a window).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfit.accumulate.gradient_marks import GradientMarks, Touch
from gradfit.accumulate.scaled_losses import times_unscaled
from gradfit.errors import MisuseError

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window

STILL_THERE = (
    "There are gradients in `.grad` from before this window. Call optimizer.zero_grad() after"
    " optimizer.step(), or reset() to drop them."
)


def take_marks(window: Window) -> None:
    """The gradients are as we left them; unless a plain pass is adding to them at the moment."""
    if window.sources is not window.tensors or window.plain.passes:
        window.marks = None  # FSDP moves unreduced gradients about by itself
        return
    window.marks = _marks_of_now(window)
    if window.scaler is not None:
        _note_unscaled(window)


def take_marks_of_tensors(window: Window) -> None:
    """The parameters' own gradients are as we left them."""
    marks = _marks_of_now(window)
    marks.note_parameters()
    window.marks = marks
    if window.scaler is not None:
        _note_unscaled(window)


def _marks_of_now(window: Window) -> GradientMarks:
    marks = window.last_marks
    if marks is None or not marks.refresh():
        marks = window.last_marks = GradientMarks(window.tensors)
    return marks


def _note_unscaled(window: Window) -> None:
    """torch's scaler changes gradients without a new version; that it did is told by its calls."""
    window.state.unscaled_before = times_unscaled(window.scaler, window.optimizer)


def require_untouched(window: Window) -> None:
    """Refuse to add to sums that somebody else has changed since."""
    marks, unscaled = window.marks, _is_unscaled_since(window)
    if marks is None or (marks.untouched() and not (window.parameters_written or unscaled)):
        return
    steps = f"{window.accumulation_steps} of {window.target_steps} micro-batches"
    touch = marks.touch()
    # what is there now is nobody's sum
    window.break_off(_fault_of(Touch.CHANGED if unscaled and touch is Touch.NONE else touch, steps))
    window.require_intact()


def require_usable(window: Window, *, may_be_cleared: bool) -> None:
    """Before the window ends: as `require_untouched`, but gradients that are a mean already are the
    user's to clip, to replace, or to clear where that is expected.
    """
    marks = window.marks
    if window.state.on_used_gradients and not is_dropped(window):
        raise MisuseError(STILL_THERE)
    if (
        marks is not None
        and window.holds_one_mean
        and not marks.untouched()
        and (may_be_cleared or marks.touch() is not Touch.CLEARED)
    ):
        take_marks(window)
        return
    require_untouched(window)


def is_dropped(window: Window) -> bool:
    """Whether the user has cleared gradients that were a mean already, as plain loops drop those
    that they will not use.
    """
    marks = window.marks
    return marks is not None and window.holds_one_mean and marks.touch() is Touch.CLEARED


def _is_unscaled_since(window: Window) -> bool:
    """Whether the scaler has unscaled the gradients since they were marked."""
    before = window.state.unscaled_before
    return before is not None and times_unscaled(window.scaler, window.optimizer) != before


def _fault_of(touch: Touch, steps: str) -> str:
    """What has happened to a window that holds so many micro-batches."""
    if touch in (Touch.CLEARED, Touch.PARTLY_CLEARED):
        return (
            f"The gradients were cleared in the middle of a window ({steps}): what was"
            " accumulated is gone. Call optimizer.zero_grad() only after a step;"
            " `acc.backward(loss); acc.step()` needs none at all. What other losses have left, as"
            " a GAN's generator does, is dropped by reset()."
        )
    if touch is Touch.CHANGED:
        return (
            f"The gradients were changed by hand in the middle of a window ({steps}), where"
            " they are sums, not means. Change them after `if acc.is_ready:`, or pass clip= or"
            " scaler= to the accumulator, or run every loss by accumulator.backward(loss)."
        )
    return (
        f"The parameters were updated in the middle of a window ({steps}), with sums for"
        " gradients. Pass the optimizer to the accumulator, or step it when is_ready is"
        " true, or after flush()."
    )


def require_parameters_unwritten(window: Window) -> None:
    """After a pass: refuse if parameters were updated while it ran."""
    if window.parameters_written:
        window.break_off(
            "The parameters were updated while a backward pass ran, by an optimizer that steps"
            " in a hook, say. It steps at every micro-batch, with sums for gradients: take the"
            " hooks away and step it when is_ready is true, or use no accumulator."
        )
        window.require_intact()
