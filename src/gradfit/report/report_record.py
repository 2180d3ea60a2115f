"""What a page is made from: the records of the stages, and the two memory curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.units import format_bytes, format_seconds

Curve = list[tuple[float, int]]  # (seconds, bytes)


@dataclass(frozen=True)
class Measured:
    """What steps that followed the plan really took."""

    peak_bytes: int
    step_seconds: float  # the median
    steps: int

    def __str__(self) -> str:
        took = f"peak {format_bytes(self.peak_bytes)}, {format_seconds(self.step_seconds)} per step"
        return f"{took}, the median of {self.steps}" if self.steps > 1 else took


@dataclass(frozen=True)
class Report:
    """Everything the page shows; what is missing is left out of it."""

    title: str
    profile: Profile
    plan: Plan | None = None
    batch_size: int | None = None  # rows of a step without a plan; None for those of the profile
    measured: Measured | None = None
    frontier: tuple[Plan, ...] = ()
    same_size: tuple[Plan, ...] = ()  # the trade-off at the plan's own micro-batch
    plain_curve: Curve = field(default_factory=list)
    plain_label: str = "plain PyTorch, measured"
    planned_curve: Curve = field(default_factory=list)
    planned_label: str = "as planned, measured"
    limit_bytes: int | None = None
    limit_label: str = "budget"
    losses: tuple[float, ...] = ()
    audit: Any = None  # an AuditReport
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Of the batch that everything on the page is about."""
        if self.plan is not None:
            return self.plan.batch_size
        return self.batch_size or self.profile.batch_size

    @property
    def planned_profile(self) -> Profile:
        """The profile that the plan is for: that of the step with its tiles, if it has any."""
        return self.profile if self.plan is None else self.profile.in_tiles(self.plan.tiles)
