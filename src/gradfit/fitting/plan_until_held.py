"""A plan from one profile, corrected by its trials until it holds the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradfit.errors import BudgetInfeasible
from gradfit.fitting.fixed_cost import with_computed_seconds
from gradfit.fitting.online_plan import plan_online
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plans_on_paper import best_plan
from gradfit.fitting.rival_plans import with_rivals
from gradfit.fitting.smallest_budget import NEARLY, Hopeless, smallest_that_holds
from gradfit.fitting.step_to_plan import PlanRequest
from gradfit.fitting.tested_plan import TestedPlan, not_tried
from gradfit.planning.allocator import SEGMENT_BYTES
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile

_TRIES = 5


@dataclass
class _Correction:
    """How far it has come."""

    profile: Profile
    timed: Profile  # the same, with the seconds that the micro-batch is chosen by
    target_bytes: int  # what the next plan may take, on paper
    least_bytes: int  # what is needed, as far as is known
    micro_batch: int | None = None  # None while any will do


def plans_that_hold(
    tools: PlanTools, profile: Profile, request: PlanRequest, *, is_only: bool
) -> list[TestedPlan]:
    """Tested plans from this profile, the one that is predicted to be the fastest first.

    Args:
        tools: what plans are made with.
        profile: of a way to cut.
        request: what for.
        is_only: there is no other way, so the smallest budget is measured, which takes as much.

    Raises:
        Hopeless: there is none, by arithmetic.
        BudgetInfeasible: there is none, as measured.
    """
    limit_bytes = tools.step.limit_bytes
    so_far = _Correction(
        profile, _with_choosing_seconds(tools, profile), limit_bytes, profile.measuring_bytes
    )
    if profile.measuring_bytes <= limit_bytes:
        holding = _correct(tools, so_far, request)
        if holding:
            return holding
    if so_far.least_bytes > NEARLY * limit_bytes:
        raise Hopeless(so_far.least_bytes)
    most_bytes = None if is_only else limit_bytes
    return [smallest_that_holds(tools, so_far.profile, request, most_bytes)]


def _correct(tools: PlanTools, so_far: _Correction, request: PlanRequest) -> list[TestedPlan]:
    """Try out plans, each for as much less as the one before took too much; none if none holds."""
    limit_bytes = tools.step.limit_bytes
    for _ in range(_TRIES):
        plan = _next_plan(tools, so_far, request.batch_size)
        if plan is None:
            break
        if _go_by_size(tools, plan.micro_batch, so_far):
            continue
        untested = not_tried(plan, so_far.profile, request.shape)
        tried = tools.trials.try_out(untested, request.batch, most_bytes=limit_bytes)
        if tried is None:
            if _was_profiled_at(tools, plan.micro_batch, so_far.profile, request):
                return [plan_online(tools, untested, request.batch)]
            _profile_at(tools, plan.micro_batch, so_far, request)
        elif tried.peak_bytes <= limit_bytes:
            return with_rivals(tools, tried, request.batch, so_far.target_bytes)
        else:
            so_far.target_bytes = _lower_target(so_far.target_bytes, tried, limit_bytes)
    return []


def _next_plan(tools: PlanTools, so_far: _Correction, batch_size: int) -> Plan | None:
    """For what may be taken now; None if there is none."""
    if so_far.target_bytes <= 0:
        return None
    try:
        return best_plan(
            tools,
            so_far.timed,
            so_far.target_bytes,
            batch_size,
            so_far.micro_batch,
            quickly=not tools.step.compares_ahead,
        )
    except BudgetInfeasible as error:
        so_far.least_bytes = max(so_far.least_bytes, error.min_bytes)
        return None


def _go_by_size(tools: PlanTools, micro_batch: int, so_far: _Correction) -> bool:
    """Whether other operations were seen at this very size than the profile has: plan by those
    from now on.
    """
    unlike = tools.profiles.unlike(so_far.profile, micro_batch)
    if unlike is not None:
        _go_by(tools, unlike, micro_batch, so_far)
    return unlike is not None


def _go_by(tools: PlanTools, profile: Profile, micro_batch: int, so_far: _Correction) -> None:
    so_far.micro_batch, so_far.profile = micro_batch, profile
    so_far.timed = _with_choosing_seconds(tools, profile)


def _with_choosing_seconds(tools: PlanTools, profile: Profile) -> Profile:
    """With the seconds by which the micro-batch is chosen."""
    return with_computed_seconds(profile) if tools.step.reproducible else profile


def _was_profiled_at(
    tools: PlanTools, micro_batch: int, profile: Profile, request: PlanRequest
) -> bool:
    """Whether a profile is of this very size, or there are too few rows for one that is."""
    if micro_batch > tools.rows.count(request.batch):
        return True
    return tools.profiles.is_of_size(profile, micro_batch)


def _profile_at(
    tools: PlanTools, micro_batch: int, so_far: _Correction, request: PlanRequest
) -> None:
    """A batch of one row need not do what larger ones do: look at this very size."""
    profile = tools.profiles.measure(request, rows=micro_batch, tiles=so_far.profile.tiles)
    _go_by(tools, profile, micro_batch, so_far)


def _lower_target(target_bytes: int, tried: TestedPlan, limit_bytes: int) -> int:
    """Less by what a trial took too much; where that were segments, no more than as many of them
    as the budget has room for, or a tenth less: with a little less another plan may need one fewer.
    """
    target = min(target_bytes, tried.plan.peak_bytes)
    # a hundredth at least: where a trial was refused, its peak is not known
    too_much = max(tried.peak_bytes - limit_bytes, target // 100)
    if tried.reserved_bytes != tried.peak_bytes:
        return target - too_much
    in_segments = tried.peak_bytes - SEGMENT_BYTES * math.ceil(too_much / SEGMENT_BYTES)
    if in_segments < target:
        return in_segments
    return target - min(too_much, max(1, target // 10))
