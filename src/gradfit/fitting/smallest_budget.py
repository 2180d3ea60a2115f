"""The plan of the smallest peak, where nothing else holds: what the smallest budget is.

What is named, and taken, is the plan of a profile that is measured in as little memory as can be,
by seconds that are the same in every run: so `min_bytes` is always enough. Another profile's
smallest plan takes other bytes, or other segments, and which sizes it is of depends on the budget
and the clock: it is taken if it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses

from gradfit.fitting.online_plan import plan_online
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plans_on_paper import smallest_plan
from gradfit.fitting.refused_budget import refused_budget
from gradfit.fitting.step_to_plan import PlanRequest
from gradfit.fitting.tested_plan import TestedPlan, not_tried
from gradfit.fitting.trial import NeedsMore, PastLimit
from gradfit.profiling.profile import Profile

NEARLY = 1.05  # times the budget: a prediction may be so much, and a trial still tell


class Hopeless(NeedsMore):
    """No plan can hold the budget, by arithmetic; nothing was tried out."""


class _LeavesPlan(Exception):
    """The forward leaves a plan while it is tried out."""


def smallest_that_holds(
    tools: PlanTools, profile: Profile, request: PlanRequest, most_bytes: int | None = None
) -> TestedPlan:
    """The plan of the smallest peak, tried out.

    Raises:
        Hopeless: it would take more than `most_bytes`.
        BudgetInfeasible: it takes more than the budget.
    """
    if not _is_of_least_rows(profile):
        own = _smallest_within_limit(tools, profile, request)
        if own is not None:
            return own
        little = _profile_of_least_rows(tools, profile, request, most_bytes)
        with contextlib.suppress(_LeavesPlan):  # else what few rows do is not what more do
            return _tried_smallest(tools, little, request, most_bytes)
    try:
        return _tried_smallest(tools, profile, request, most_bytes)
    except _LeavesPlan:
        plan = smallest_plan(tools, profile, request.batch_size)
        return plan_online(tools, not_tried(plan, profile, request.shape), request.batch)


def _is_of_least_rows(profile: Profile) -> bool:
    return profile.batch_size == profile.min_batch


def _smallest_within_limit(
    tools: PlanTools, profile: Profile, request: PlanRequest
) -> TestedPlan | None:
    """The smallest plan from this profile, if it holds."""
    plan = smallest_plan(tools, profile, request.batch_size)
    least = max(int(plan.peak_bytes / NEARLY), profile.measuring_bytes)
    if least > tools.step.limit_bytes:
        return None
    return tools.trials.within_limit(not_tried(plan, profile, request.shape), request.batch)


def _profile_of_least_rows(
    tools: PlanTools, profile: Profile, request: PlanRequest, most_bytes: int | None
) -> Profile:
    """Of the same step, whatever the budget is.

    Raises:
        Hopeless: measuring it would take more than `most_bytes`.
    """
    try:
        little = tools.profiles.measure(
            request, tiles=profile.tiles, memory_bytes=1, most_bytes=most_bytes
        )
    except PastLimit as refusal:
        raise Hopeless(refusal.needed_bytes) from None
    measuring = max(profile.measuring_bytes, little.measuring_bytes)
    return dataclasses.replace(little, measuring_bytes=measuring)


def _tried_smallest(
    tools: PlanTools, profile: Profile, request: PlanRequest, most_bytes: int | None
) -> TestedPlan:
    """The smallest plan from this profile, if it holds.

    Raises:
        Hopeless: it would take more than `most_bytes`.
        BudgetInfeasible: it does not hold.
        _LeavesPlan: the forward leaves it.
    """
    plan = smallest_plan(tools, profile, request.batch_size)
    untested = not_tried(plan, profile, request.shape)
    tried = tools.trials.try_out(untested, request.batch, most_bytes=most_bytes)
    if tried is None:
        raise _LeavesPlan
    if most_bytes is not None and tried.peak_bytes > most_bytes:
        raise Hopeless(max(tried.peak_bytes, profile.measuring_bytes))
    if max(tried.peak_bytes, profile.measuring_bytes) <= tools.step.limit_bytes:
        return tried
    # Not less than what is planned for: below that, what the clock says could not choose among
    # plans.
    least = max(tried.peak_bytes, plan.peak_bytes, profile.measuring_bytes)
    raise refused_budget(tools, tried.plan, least, cut=profile.splittable)
