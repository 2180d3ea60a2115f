"""What a page is made from: the records of the stages, and the two memory curves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradfit.planning.record import Plan
from gradfit.profiling.record import Profile

Curve = list[tuple[float, int]]  # (seconds, bytes)


@dataclass(frozen=True)
class Report:
    """Everything the page shows; what is missing is left out of it."""

    title: str
    profile: Profile
    plan: Plan | None = None
    frontier: tuple[Plan, ...] = ()
    plain_curve: Curve = field(default_factory=list)
    plain_label: str = "plain PyTorch"
    planned_curve: Curve = field(default_factory=list)
    planned_label: str = "as planned"
    limit_bytes: int | None = None
    limit_label: str = "budget"
    losses: tuple[float, ...] = ()
    audit: Any = None  # an AuditReport
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
