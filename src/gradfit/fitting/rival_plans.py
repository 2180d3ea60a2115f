"""Plans that may be faster than one that holds: what a search that takes its time finds, and the
other of two ways, with recomputation and larger micro-batches, or without either.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from gradfit import _torch_distributed as distributed
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plans_on_paper import best_plan, plan_near_size
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.api import plain_plan, predicted, recomputing_plan, updates_within
from gradfit.planning.microbatch import even
from gradfit.planning.plan import Plan

_ANY = 1 << 62  # bytes that nothing passes
_DOUBT = 1.3  # by how much a prediction may be slower, and the clock is still asked
# Of the budget, what a plan that is tried out in the middle of training may take on paper.
_CAREFUL_SHARE = 0.98
# The same of another way: the profile may be of another size, and not even a trial may pass the
# budget.
_OTHER_WAY_SHARE = 0.95


def with_rivals(
    tools: PlanTools, tried: TestedPlan, batch: Any, target_bytes: int
) -> list[TestedPlan]:
    """A plan that holds, and others that hold and may be faster by the clock, where they are
    compared before the first step.
    """
    if tools.step.reproducible:
        return [_kept_by_measured_seconds(tools, tried, batch, target_bytes)]
    if tools.step.micro_batch is not None:
        return [tried]
    if not tools.step.compares_ahead:
        return _with_fewer_passes(tools, tried, batch) or [tried]
    return [tried, *rivals_of(tools, tried, batch, target_bytes)]


def _with_fewer_passes(tools: PlanTools, tried: TestedPlan, batch: Any) -> list[TestedPlan]:
    """Larger micro-batches than these, all kept, where trials say that they hold and a profile of a
    few rows did not: each costs one micro-batch, and is paid back by the first steps.
    """
    if distributed.is_running() or not tried.plan.keeps_everything:
        return []
    return _larger_plain(tools, tried, batch)


def _kept_by_measured_seconds(
    tools: PlanTools, tried: TestedPlan, batch: Any, target_bytes: int
) -> TestedPlan:
    """The micro-batch is chosen; what to keep in it changes no bit, so that may be chosen by what
    was measured.
    """
    rows, size = tried.plan.batch_size, tried.plan.micro_batch
    plan = plan_near_size(tools, tried.profile, target_bytes, rows, size)
    if plan.micro_batch != size:
        return tried
    return tools.trials.within_limit(dataclasses.replace(tried, plan=plan), batch) or tried


def rivals_of(
    tools: PlanTools, tried: TestedPlan, batch: Any, target_bytes: int
) -> list[TestedPlan]:
    """What a search that takes its time finds, if there was none yet; and without recomputation
    where the plan has some, or else with it, and larger micro-batches without, where trials say
    that they hold and the profile did not.
    """
    better = [] if tools.step.compares_ahead else _more_careful(tools, tried, batch)
    if tools.step.micro_batch is not None:
        return better
    best = better[0] if better else tried
    if not best.plan.keeps_everything and tried.plan.keeps_everything:
        return better  # both ways are there
    if not best.plan.keeps_everything:
        return [*better, *_plain(tools, best, batch, target_bytes)]
    # over several ranks each might find another size by what its own trials have taken
    largest = [] if distributed.is_running() else _larger_plain(tools, best, batch)
    return [*better, *largest, *_recomputing(tools, best, batch, target_bytes)]


def _more_careful(tools: PlanTools, tried: TestedPlan, batch: Any) -> list[TestedPlan]:
    """The best plan by a search that takes its time, tried out, if it is predicted to be faster
    than this one, which was found quickly.
    """
    rows = tried.plan.batch_size
    peak, seconds = predicted(tried.profile, tried.plan)
    # less by what this one's trial took beyond its prediction
    room = tools.step.limit_bytes - max(0, tried.tested_bytes - peak)
    # a profile of a single size may know nothing of others
    for size in (None, tried.plan.micro_batch):
        with contextlib.suppress(BudgetInfeasible):
            plan = best_plan(tools, tried.profile, int(_CAREFUL_SHARE * room), rows, size)
            if plan.step_seconds < seconds:
                untested = dataclasses.replace(tried, plan=plan)
                found = tools.trials.within_limit(untested, batch)
                if found is not None:
                    return [found]
    return []


def _plain(tools: PlanTools, tested: TestedPlan, batch: Any, target_bytes: int) -> list[TestedPlan]:
    """The largest micro-batch without recomputation, tried out, if there is one."""
    rows, room = tested.plan.batch_size, int(_OTHER_WAY_SHARE * target_bytes)
    profile = updates_within(tested.profile, room, rows)[0]
    plan = plain_plan(profile, memory=room, batch_size=rows)
    if plan is None:
        return []
    tried = tools.trials.within_limit(dataclasses.replace(tested, plan=plan), batch)
    return [] if tried is None else _larger_plain(tools, tried, batch) or [tried]


def _larger_plain(tools: PlanTools, tried: TestedPlan, batch: Any) -> list[TestedPlan]:
    """The largest micro-batch that holds by what the trials of smaller ones have taken, tried out,
    if it is larger than this one.
    """
    largest: list[TestedPlan] = []
    while (plan := _plain_in_all(tried, tools.step.limit_bytes)) is not None:
        larger = tools.trials.within_limit(dataclasses.replace(tried, plan=plan), batch)
        if larger is None:
            break
        tried, largest = larger, [larger]
    return largest


def _plain_in_all(tried: TestedPlan, limit_bytes: int) -> Plan | None:
    """A larger micro-batch in all of the budget: each row more takes no more than one of those that
    were measured took.
    """
    rows, size = tried.plan.batch_size, tried.plan.micro_batch
    profile = tried.profile.updating(tried.plan.update_groups)
    graph = profile.at(size, rows=rows)
    static = graph.static_bytes
    most = int((limit_bytes - static) * size / max(1, tried.peak_bytes - static))
    most = even(rows, max(1, min(most, rows)))
    if -(-rows // most) >= -(-rows // size):
        return None
    plan = plain_plan(profile, memory=_ANY, batch_size=rows, micro_batch=most)
    if plan is None:
        return None
    # a profile of a few rows may say more than that
    peak = min(plan.peak_bytes, static + (tried.peak_bytes - static) * most // size)
    parts = _less(plan.breakdown, plan.peak_bytes - peak, certain=graph.static_breakdown)
    return dataclasses.replace(plan, budget_bytes=limit_bytes, peak_bytes=peak, breakdown=parts)


def _less(parts: Mapping[str, int], too_much: int, certain: Collection[str]) -> dict[str, int]:
    """The parts of a peak that is so many bytes less than was predicted: less of the largest of
    those that are not certain.
    """
    less = dict(parts)
    for name in sorted(set(parts).difference(certain), key=lambda name: -parts[name]):
        less[name] -= min(parts[name], too_much)
        too_much -= parts[name] - less[name]
    return {name: nbytes for name, nbytes in less.items() if nbytes}


def _recomputing(
    tools: PlanTools, tested: TestedPlan, batch: Any, target_bytes: int
) -> list[TestedPlan]:
    """The best larger micro-batch, with recomputation, tried out, if it can be as fast."""
    rows, size = tested.plan.batch_size, tested.plan.micro_batch
    if size == rows:
        return []
    room = int(_OTHER_WAY_SHARE * target_bytes)
    # not as steps have measured it: a profile of a few rows is as wrong about one as the other
    _, seconds = predicted(tested.profile, tested.plan)
    plan = recomputing_plan(
        updates_within(tested.profile, room, rows)[0],
        memory=room,
        batch_size=rows,
        above=size,
        most_seconds=_DOUBT * seconds,
    )
    if plan is None:
        return []
    tried = tools.trials.within_limit(dataclasses.replace(tested, plan=plan), batch)
    return [] if tried is None else [tried]
