"""How a window ends: the sums of all its loss terms and of all processes become one mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from gradfit.accumulate.counted_micro_batches import note_end
from gradfit.accumulate.loss_scaling import CarriedScale
from gradfit.accumulate.processes import AllParts, present_in
from gradfit.accumulate.scaling import scale_gradients
from gradfit.accumulate.window_marks import require_usable, take_marks_of_tensors
from gradfit.accumulate.window_members import look_for_others
from gradfit.accumulate.window_state import Phase, WindowState

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window


def finalise(window: Window, *, asked: bool = True, by_hand: bool = False) -> None:
    """Make `.grad` the mean over the window, once. Nobody else may add to it meanwhile.

    Not `asked`: a pass has ended this moment, and its gradients were marked. `by_hand`: the user
    steps the optimizer.
    """
    state = window.state
    if state.phase is Phase.FILLING and asked:
        require_usable(window, may_be_cleared=by_hand)
        look_for_others(window)
    window.settled = None
    if asked:
        for thread, one in state.open.items():
            note_end(one, thread)
    if state.phase is not Phase.FINAL:
        factor = combine(window)
        window.in_doubt = True
        scale_gradients(window.tensors, factor)
        state.phase = Phase.FINAL
        window.in_doubt = False
        take_marks_of_tensors(window)
    state.asked = state.asked or asked


def combine(window: Window) -> float:
    """Bring every sum of every process into `.grad`; gives the factor that is still to be
    multiplied by.
    """
    state, reduces = window.state, window.ranks.reduces
    if reduces:
        meet(window)  # which also tells the others if this window is broken
    window.require_intact()
    if state.phase is not Phase.FILLING:
        return 1.0
    if not (state.terms or reduces):
        return state.main.factor
    _add_up(window)
    return 1.0


def _add_up(window: Window) -> None:
    """Add up loss terms and processes in `.grad`, each divided by its total."""
    state, factor = window.state, window.state.main.factor
    window.in_doubt = True
    if state.terms:
        _pour_terms(window, factor)
        factor = 1.0
    factor = window.ranks.reduce(window, meet(window), factor)
    scale_gradients(window.tensors, factor)
    state.phase = Phase.REDUCED
    window.in_doubt = False
    take_marks_of_tensors(window)


def _pour_terms(window: Window, factor: float) -> None:
    """Make the main sums a mean, and add those of the loss terms to them."""
    with torch.no_grad():
        if factor != 1.0:
            _multiply(window.sources, factor)
        for term in window.state.terms.values():
            term.pour_into(window.sources)


def _multiply(sources: Iterable[Any], factor: float) -> None:
    for source in sources:
        if source.grad is not None:
            source.grad.mul_(factor)


def meet(
    window: Window, *, flushing: bool = False, joined: bool = False, scale: float = 1.0
) -> AllParts:
    """Learn, once per window, what all processes hold; the totals are everybody's from here on."""
    if window.whole is None:
        part = _part_of_this_process(window, flushing, joined, scale)
        window.whole = window.ranks.meet(part)
        if window.whole is not part:
            _take_totals(window.state, window.whole)
    return window.whole


def _part_of_this_process(window: Window, flushing: bool, joined: bool, scale: float) -> AllParts:
    state = window.state
    present, sparse = (
        present_in(window.sources, state.terms.values()) if window.ranks.reduces else ((), ())
    )
    carried = state.loss_scale if window.ranks.reduces else 1.0  # alone nobody asks
    broken = state.phase is Phase.BROKEN or window.in_doubt or window.plain.any_died()
    return AllParts(
        state.totals(), window.accumulation_steps - state.skipped, state.skipped, window.notes,
        carried, scale, flushing, joined, present, sparse, broken,
    )  # fmt: skip


def _take_totals(state: WindowState, whole: AllParts) -> None:
    state.carried = CarriedScale(whole.base)
    for name, total in whole.weights.items():
        state.total_of(name).weight = total
