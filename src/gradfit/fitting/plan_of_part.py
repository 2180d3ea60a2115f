"""A plan for what one micro-batch does, where it left the plan of its batch."""

from __future__ import annotations

from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plans_on_paper import best_plan
from gradfit.fitting.step_to_plan import PlanRequest
from gradfit.fitting.tested_plan import TestedPlan, not_tried
from gradfit.fitting.trial import PastLimit
from gradfit.planning.api import beginning_like, plan_for_fit


def plan_like_part(tools: PlanTools, part: PlanRequest, tested: TestedPlan) -> TestedPlan | None:
    """A plan by the operations of this micro-batch, tried out; None if none holds, or if not even
    measuring does: this is in the middle of training, and the budget is a step's. One of fewer rows
    than were planned for has a plan for such alone.

    Args:
        tools: what plans are made with.
        part: the micro-batch.
        tested: the plan that it left.

    Raises:
        BudgetInfeasible: only a smaller micro-batch could do that.
    """
    plan, rows = tested.plan, tools.rows.count(part.batch)
    limit_bytes = tools.step.limit_bytes
    try:
        profile = tools.profiles.measure(part, rows=rows, tiles=plan.tiles, most_bytes=limit_bytes)
    except PastLimit:
        return None
    if rows < plan.micro_batch:
        candidates = [
            plan_for_fit(profile, memory=limit_bytes, batch_size=plan.batch_size, micro_batch=rows)
        ]
    else:
        best = best_plan(tools, profile, limit_bytes, plan.batch_size, plan.micro_batch)
        # Rather one that begins as the other does, so that a forward can go over from one to the
        # other.
        alike = beginning_like(profile, best, plan)
        candidates = [best] if alike is None else [alike, best]
    for candidate in candidates:
        tried = tools.trials.within_limit(not_tried(candidate, profile, tested.shape), part.batch)
        if tried is not None:
            return tried
    return None
