"""What a plan that is read must be, so that it can be followed, compared and printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfit.errors import StateError
from gradfit.state_checks import each_number, integer, list_of, text
from gradfit.units import NO_BUDGET

if TYPE_CHECKING:
    from gradfit.planning.plan import Plan

_AT_LEAST_1 = ("micro_batch", "steps", "batch_size", "budget_bytes")
_AT_LEAST_0 = (
    "peak_bytes", "kept_values", "saved_values", "kept_bytes", "saved_bytes", "heard",
)  # fmt: skip
_ACTION = text("keep", "rebuild", "offload", "external")
_NUMBERS = each_number(NO_BUDGET)


def check_plan(plan: Plan, where: str = "The plan") -> None:
    """Raise a `StateError` that says where it is not one.

    Args:
        plan: as it was read.
        where: what it is part of, in words.
    """
    _NUMBERS(where, plan)
    for least, names in ((1, _AT_LEAST_1), (0, _AT_LEAST_0)):
        for name in names:
            integer(least, NO_BUDGET)(f"{where}.{name}", getattr(plan, name))
    for index, action in enumerate(plan.actions):
        _ACTION(f"{where}.actions[{index}]", action)
    _check_segments(where, plan)
    list_of(integer(1))(f"{where}.update_groups", list(plan.update_groups))


def _check_segments(where: str, plan: Plan) -> None:
    parents = plan.segment_parents
    if any(not 0 <= parent < index for index, parent in enumerate(parents[1:], start=1)):
        raise StateError(f"{where} has segments that lie in no earlier one.")
    if any(not 0 <= segment < len(parents) for segment in plan.segments):
        raise StateError(f"{where} has a value in a segment that it does not have.")
    if len(plan.segments) != len(plan.actions):
        raise StateError(
            f"{where} has {len(plan.actions)} actions, and segments for {len(plan.segments)}."
        )
