"""Recording ends at the last operation that is not kept: where that is much of a step, plans
rebuild what is made early.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_graphs import random_profile, transformer

import gradfit as gf
from gradfit.planning.microbatch import MicrobatchSearch
from gradfit.planning.simulate import ACTION_NAMES, KEEP, Segments
from gradfit.profiling.profile import Profile


def last_rebuilt(profile: Profile, plan: gf.Plan) -> int:
    made = zip(profile.values, plan.actions, strict=True)
    return max(value.operation or 0 for value, action in made if action == "rebuild")


def seconds_of(profile: Profile, plan: gf.Plan) -> float:
    """What a profile says of a plan that was made for another one."""
    actions = [KEEP if a == "external" else ACTION_NAMES.index(a) for a in plan.actions]
    search = MicrobatchSearch(profile, plan.batch_size, split=False)
    segments = Segments(plan.segments, plan.segment_parents)
    return search.of_plan(plan.micro_batch, actions, segments).step_seconds


def little_less(profile: Profile, share: float) -> int:
    """Bytes for so much of what is kept in a plain step."""
    solver = MicrobatchSearch(profile, profile.batch_size, split=False).solver(profile.batch_size)
    static = solver.graph.static_bytes
    return int(static + share * (solver.plain.peak_bytes - static))


def test_what_is_dear_to_record_is_rebuilt_early() -> None:
    free = replace(transformer(4), splittable=False, record_overhead_seconds=0.0)
    memory = little_less(free, 0.9)
    unaware = gf.plan(free, memory=memory)
    dear = replace(free, record_overhead_seconds=unaware.step_seconds / 500)
    plan = gf.plan(dear, memory=memory)
    assert plan.peak_bytes <= memory
    assert last_rebuilt(dear, plan) < 0.7 * last_rebuilt(free, unaware)
    assert plan.step_seconds < seconds_of(dear, unaware)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_never_slower_and_holds(seed: int) -> None:
    free = replace(random_profile(seed, 24), splittable=False, record_overhead_seconds=0.0)
    for share in (0.9, 0.6):
        memory = little_less(free, share)
        try:
            unaware = gf.plan(free, memory=memory)
        except gf.BudgetInfeasible:
            continue
        if unaware.keeps_everything:
            continue
        dear = replace(free, record_overhead_seconds=unaware.step_seconds / 200)
        plan = gf.plan(dear, memory=memory)
        assert plan.peak_bytes <= memory
        assert plan.step_seconds <= seconds_of(dear, unaware) * (1 + 1e-9)
