"""What is said of a profile's loss, wherever a plan is shown: whether its parts make the whole, as
it was measured.
"""

from __future__ import annotations

from typing import Any

from gradfit.profiling.profile import Profile

_BY = {"rows": "by rows", "sum": "as a sum", "items": "by items", "divisor": "by items"}


def exactness_line(profile: Profile) -> str:
    """One line for the command line."""
    additivity = profile.additivity
    if additivity is None:
        return "exactness: not measured"
    measured = f"measured on a few rows: relative error {additivity.error:.2g}"
    if additivity.over is None:
        return (
            f"exactness: the batch is not cut, its parts do not make the whole ({measured}):"
            f" {additivity.reason}"
        )
    return f"exactness: the parts of a batch add up, {_BY[additivity.over]} ({measured})"


def exactness_tile(profile: Profile) -> str:
    """A few words for the page."""
    additivity = profile.additivity
    if additivity is None:
        return "not measured"
    return (
        "not cut"
        if additivity.over is None
        else f"{additivity.error:.2g} ({_BY[additivity.over]}, on a few rows)"
    )


def exactness_json(profile: Profile) -> dict[str, Any] | None:
    """The same for --json; None if it was not measured."""
    additivity = profile.additivity
    if additivity is None:
        return None
    return {"adds_up": additivity.adds_up, "over": additivity.over, "error": additivity.error}
