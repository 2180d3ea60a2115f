"""May a plain pass come into a window, what are its gradients multiplied by, and what comes after
it?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradfit.accumulate.counted_micro_batches import add, look_for_other_ends
from gradfit.accumulate.marks import belongs_to_another
from gradfit.accumulate.plain_backwards import PlainPass
from gradfit.accumulate.scaled_losses import is_scaled
from gradfit.accumulate.window_begin import make_ready
from gradfit.accumulate.window_end import finalise
from gradfit.accumulate.window_members import follow_optimizer
from gradfit.accumulate.window_state import Phase
from gradfit.errors import MisuseError

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window


def admit_plain(window: Window, one: PlainPass) -> float | None:
    """Before a plain pass adds anything: count it, and give the factor for its gradients; None if
    it is not counted. Or refuse it.
    """
    if not window.enabled or belongs_to_another(window, window.tensors):
        return None
    with window.lock:
        window.settled = None
        _require_not_apart(window, one)
        if window.state.phase is Phase.BROKEN:
            return None
        if window.scaler is not None:
            _require_scaled(window.scaler, one)
        if window.transaction is not None:
            return _require_exact(window, window.transaction.add_plain())
        return _admit_into_sums(window, one)


def _admit_into_sums(window: Window, one: PlainPass) -> float:
    if window.follows_optimizer:
        _require_new_without_gradient(window)
    _begin_plain(window)
    factor = _require_exact(window, plain_factor(window))
    _book_plain(window, one)
    window.marks = None  # until it has ended
    return factor


def _require_not_apart(window: Window, one: PlainPass) -> None:
    """Refuse a pass while `.grad` is another thread's (rule 2 of a window)."""
    if window.apart is not None and window.apart != one.thread:
        raise MisuseError(
            "A plain backward() while another thread is inside micro_batch, or updates. Use"
            " accumulator.backward(loss), which waits by itself, or join the threads"
            " before."
        )


def _require_scaled(scaler: Any, one: PlainPass) -> None:
    """With a loss scaler, a plain pass must be one of a loss that it has scaled."""
    if not scaler.is_enabled() or is_scaled(one.roots):
        return
    raise MisuseError(
        "A plain backward() of a loss that the scaler has not scaled. Call"
        " scaler.scale(loss).backward(), or accumulator.backward(loss), which scales it."
    )


def _require_new_without_gradient(window: Window) -> None:
    """Parameters that have come to the optimizer must not have gradients yet."""
    if any(tensor.grad is not None for tensor in follow_optimizer(window)):
        raise MisuseError(
            "New parameters of the optimizer have gradients of passes that nobody has"
            " counted. Add them by optimizer.add_param_group, which is noticed at once, and"
            " call reset() to begin a new window."
        )


def _begin_plain(window: Window) -> None:
    """As `begin`, for a plain pass: gradients that were there before the first one are added to."""
    state, marks = window.state, window.marks
    if (
        marks is None
        or state.phase is not Phase.FILLING
        or state.is_empty
        or not marks.untouched()
        or window.parameters_written
        or window.scaler is not None
    ):
        make_ready(window, plain=True)
    main = window.state.main
    main.divisor = main.divisor or 1.0


def _book_plain(window: Window, one: PlainPass) -> None:
    thread = _thread_that_counts(window, one)
    present = window.state.open.get(thread)
    if one.joins and present is not None and present.plain:
        return
    try:
        if window.is_of_one and present is not None and present.plain:
            look_for_other_ends(window, present, thread)  # one more loss of the micro-batch
        else:
            add(window, 1, thread=thread)
            present = window.state.open[thread]
            present.plain += 1
        present.last_plain = one.task
        present.reached.add(one.first)
    except BaseException:  # an interrupt: it may be counted, and will add nothing
        window.break_off("A backward pass was interrupted half-way, when it was being counted.")
        raise


def _thread_that_counts(window: Window, one: PlainPass) -> int:
    """In whose micro-batch a pass is counted: each thread has its own, unless one is a window."""
    if window.is_of_one:
        for thread, present in window.state.open.items():
            if present.plain:
                return thread
    return one.thread


def _require_exact(window: Window, factor: float) -> float:
    if factor != 1.0 and window.widened_float16:
        raise MisuseError(
            "A plain backward() into float16 parameters would have to be multiplied by"
            f" {factor:g}, which rounds it to float16. Use accumulator.backward(loss) for every"
            " loss of the window."
        )
    return factor


def plain_factor(window: Window) -> float:
    """What a plain pass's gradients are multiplied by, so that it weighs 1 among the sums."""
    state = window.state
    factor = 1.0 / (state.main.divisor or 1.0)
    if window.scaler is not None and window.transaction is None:
        factor *= state.carried.over_present(window.scaler)
    return factor


def finalise_by_itself(window: Window) -> None:
    """An optimizer that we do not know, or hear nothing of, can step at any moment, so a full
    window is final without being asked.
    """
    if _is_asked_for(window) or window.ranks.reduces or window.plain.passes:
        return
    state = window.state
    if state.phase is Phase.FILLING and not state.terms and window.is_full:
        finalise(window, asked=False)


def _is_asked_for(window: Window) -> bool:
    """Whether somebody will say when the window is over."""
    return (
        window.hears_of_steps
        or window.step_ends_micro_batch
        or window.bare
        or window.transaction is not None
    )
