"""What gradients are divided by while a window fills, before anybody knows its total.

Micro-batch i is backpropagated with the factor wᵢ/D, where D is a provisional divisor, chosen from
the first weight; when the window is full the gradients are multiplied by D/Σw. So the total need
not be known beforehand, partial sums stay in the range of a mean (D grows by powers of two where Σw
outgrows it), and if D was guessed right (equal micro-batches) there is nothing left to multiply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from gradfit.accumulate.window_state import Total, power_of_two_from
from gradfit.arguments import Number

if TYPE_CHECKING:
    from gradfit.accumulate.window import Window

# how often float16's largest number fits into float32's, with room to spare
_FLOAT16_IN_FLOAT32 = 2.0**96


def divisor_for(
    window: Window, weight: Number, *, narrow: bool, sums: Iterable[Tensor] | None = None
) -> float:
    """The provisional divisor, chosen now if this is the window's first weight, raised if it is
    outgrown.

    `narrow`: float16 or bfloat16 is involved, so the factors should be powers of two where they can
    be.
    """
    main = window.state.main
    if main.divisor is None:
        if not weight:
            return 1.0
        main.divisor = _first_divisor(window, weight, narrow)
    if main.lacks_room(weight, _room_in(window)):
        window.require_quiet("A larger weight")
        present = [one.grad for one in window.sources if one.grad is not None]
        before, window.in_doubt = window.in_doubt, True
        main.make_room(weight, present if sums is None else sums)
        window.in_doubt = before
    return main.divisor


def _first_divisor(window: Window, weight: Number, narrow: bool) -> float:
    if window.widened_float16:
        return float(weight)  # float16 must not meet small factors; float32 has room for sums
    expected = window.strategy.expected_weight(weight)
    return float(weight) * power_of_two_from(expected / weight) if narrow else float(expected)


def _room_in(window: Window) -> float:
    """How many times over the sums may leave the range of a mean."""
    return _FLOAT16_IN_FLOAT32 if window.widened_float16 else 1.0


def term_for(window: Window, name: str, weight: Number) -> Total:
    """A loss term's denominator; its divisor is a power of two, which costs no rounding
    anywhere.
    """
    term = window.state.terms.setdefault(name, Total())
    if term.divisor is None and weight:
        term.divisor = _first_divisor_of_term(window, weight)
    if term.lacks_room(weight, _room_in(window)):
        term.make_room(weight, term.gradients.values())
    return term


def _first_divisor_of_term(window: Window, weight: Number) -> float:
    return power_of_two_from(
        1.0 if window.widened_float16 else window.strategy.expected_weight(weight)
    )
