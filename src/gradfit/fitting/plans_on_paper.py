"""Plans by arithmetic, from a step's profile: the best for a limit, and the smallest there is."""

from __future__ import annotations

from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.fitting.fixed_cost import with_computed_seconds
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.tested_plan import TestedPlan, smaller
from gradfit.planning.api import plan_for_fit
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.units import format_bytes


def best_plan(
    tools: PlanTools,
    profile: Profile,
    limit_bytes: int,
    batch_size: int,
    micro_batch: int | None = None,
    *,
    quickly: bool = False,
) -> Plan:
    """The best plan, or about that; at this very micro-batch, or at the one that was asked for, if
    any.
    """
    if tools.step.micro_batch is not None:
        micro_batch = _asked_size(tools, tools.step.micro_batch, batch_size, profile)
    tools.progress.begin(f"planning for {format_bytes(limit_bytes)}")
    return plan_for_fit(
        profile,
        memory=limit_bytes,
        batch_size=batch_size,
        micro_batch=micro_batch,
        quickly=quickly,
    )


def _asked_size(tools: PlanTools, micro_batch: int, batch_size: int, profile: Profile) -> int:
    """The micro-batch that was asked for, if the batch may be cut."""
    if micro_batch < batch_size and not profile.splittable:
        otherwise = ", or pass exact=False to cut all the same" if tools.loss.runs_parts else ""
        raise MisuseError(
            f"micro_batch={micro_batch} cuts the batch of {batch_size}, and its loss"
            f" does not add up: {tools.loss.why_whole}. Leave micro_batch out{otherwise}."
        )
    return min(micro_batch, batch_size)


def plan_near_size(
    tools: PlanTools, profile: Profile, limit_bytes: int, batch_size: int, micro_batch: int
) -> Plan:
    """The plan for this very micro-batch if it can be, else for any."""
    try:
        return best_plan(tools, profile, limit_bytes, batch_size, min(micro_batch, batch_size))
    except BudgetInfeasible:
        return best_plan(tools, profile, limit_bytes, batch_size)


def smallest_plan(tools: PlanTools, profile: Profile, batch_size: int) -> Plan:
    """The plan of the smallest peak, by seconds that are the same in every run."""
    timed = with_computed_seconds(profile)
    try:
        return best_plan(tools, timed, 1, batch_size)
    except BudgetInfeasible as smallest:
        return best_plan(tools, timed, smallest.min_bytes, batch_size)


def tighter_plan(tools: PlanTools, tested: TestedPlan, limit_bytes: int) -> Plan:
    """A plan from its profile for this limit; if there is none, the smallest there is."""
    plan, profile = tested.plan, tested.profile
    try:
        return plan_near_size(tools, profile, limit_bytes, plan.batch_size, plan.micro_batch)
    except BudgetInfeasible as smallest:
        if smallest.min_bytes >= plan.peak_bytes:
            return plan
        return best_plan(tools, profile, smallest.min_bytes, plan.batch_size)


def cut_smaller(tools: PlanTools, tested: TestedPlan) -> Plan:
    """Its plan at half the micro-batch, if it may be cut."""
    if not may_cut(tools, tested.profile):
        return tested.plan
    return smaller(tested.plan, tested.profile.min_batch)


def may_cut(tools: PlanTools, profile: Profile) -> bool:
    """Whether micro-batches may be smaller."""
    return profile.splittable and tools.step.micro_batch is None
