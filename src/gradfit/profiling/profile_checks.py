"""What a profile that is read must be, so that it can be planned for and printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradfit.batches.additivity_record import Additivity
from gradfit.state_checks import each_number, integer
from gradfit.units import NO_BUDGET

if TYPE_CHECKING:
    from gradfit.profiling.profile import Profile

# How far parts were from the whole may be infinite.
_NUMBERS = each_number(NO_BUDGET, but=Additivity)


def check_profile(profile: Profile, where: str = "The profile") -> None:
    """Raise a `StateError` that says where it is not one.

    Args:
        profile: as it was read.
        where: what it is part of, in words.
    """
    _NUMBERS(where, profile)
    for name in ("batch_size", "min_batch"):
        integer(1)(f"{where}.{name}", getattr(profile, name))
    for index, value in enumerate(profile.values):
        integer(-1)(f"{where}.values[{index}].dies", value.dies)
        integer(0)(f"{where}.values[{index}].storage", value.storage)
    for index, tiled in enumerate(profile.tiled):
        check_profile(tiled, f"{where}.tiled[{index}]")
