"""Plans for what no plan can name: operations that depend on the data, evicted online below a
limit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gradfit.errors import BudgetInfeasible
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plans_on_paper import may_cut
from gradfit.fitting.refused_budget import refused_budget
from gradfit.fitting.tested_plan import TestedPlan, smaller

_TRIES = 3
_MARGIN = 1.03  # above the smallest limit that was held


def plan_online(tools: PlanTools, untested: TestedPlan, batch: Any) -> TestedPlan:
    """The operations depend on the data, so no plan can name them: evict online, in micro-batches
    that fit.
    """
    plan = dataclasses.replace(
        untested.plan, online=f"{tools.trials.left}. The data decide what the forward does"
    )
    untested = dataclasses.replace(untested, plan=plan, steady=False)
    profile, limit_bytes = untested.profile, tools.step.limit_bytes
    while True:
        tried = _try_out(tools, untested, batch, limit_bytes)
        if max(tried.peak_bytes, profile.measuring_bytes) <= limit_bytes:
            return tried
        if untested.plan.micro_batch <= profile.min_batch or not may_cut(tools, profile):
            raise _refused(tools, untested, batch, tried.peak_bytes)
        plan = smaller(untested.plan, profile.min_batch)
        untested = dataclasses.replace(untested, plan=plan)


def _refused(
    tools: PlanTools, untested: TestedPlan, batch: Any, peak_bytes: int
) -> BudgetInfeasible:
    # With a little more: what is evicted depends on the clock, and what is routed where on the
    # weights.
    least = int(_smallest_limit(tools, untested, batch, peak_bytes) * _MARGIN)
    least = max(least, untested.profile.measuring_bytes)
    return refused_budget(tools, untested.plan, least, cut=untested.profile.splittable)


def _smallest_limit(tools: PlanTools, untested: TestedPlan, batch: Any, below: int) -> int:
    """The smallest limit that is held, to a hundredth; `below` is not."""
    below, above = _bounds(tools, untested, batch, below)
    while above > below * 1.01 + 64:
        middle = (below + above) // 2
        held = _try_out(tools, untested, batch, middle).peak_bytes <= middle
        below, above = (below, middle) if held else (middle, above)
    return above


def _bounds(tools: PlanTools, untested: TestedPlan, batch: Any, below: int) -> tuple[int, int]:
    """A limit that is not held, and one that is: in growing steps above the first."""
    growth = 1.01
    while True:
        above = int(below * growth)
        tried = _try_out(tools, untested, batch, above)
        if tried.peak_bytes <= above:
            return below, above
        below, growth = max(tried.peak_bytes, above), 2 * growth - 1


def _try_out(tools: PlanTools, untested: TestedPlan, batch: Any, limit_bytes: int) -> TestedPlan:
    """Eviction depends on timing; a limit counts as held if one of a few tries holds it.

    If none does, the peak is what one operation needed beside what cannot be dropped, at least.
    """
    tries = []
    for _ in range(_TRIES):
        tried = tools.trials.try_out(untested, batch, online_bytes=limit_bytes)
        if tried is None:  # memory ran out before the limit was reached
            tried = dataclasses.replace(untested, peak_bytes=limit_bytes * 11 // 10)
        if tried.peak_bytes <= limit_bytes:
            return tried
        tries.append(tried)
    return min(tries, key=lambda one: one.peak_bytes)
