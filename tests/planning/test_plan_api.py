"""`plan` and `frontier` as users see them."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from planning_graphs import random_profile, transformer

import gradfit as gf
from gradfit.errors import BudgetInfeasible, MisuseError, StateError
from gradfit.planning.simulate import ACTION_NAMES, KEEP, Segments, simulate
from gradfit.profiling.profile import Linear, Profile

MIB = 1024**2


@pytest.fixture(scope="module")
def profile() -> Profile:
    return transformer(4)  # 4 blocks, batch 8: some 230 MiB, of which 170 activations


@pytest.fixture(scope="module")
def half(profile: Profile) -> gf.Plan:
    return gf.plan(profile, memory=_share(profile, 0.5))


def _share(profile: Profile, share: float) -> int:
    points = gf.frontier(profile, points=2)
    static = profile.at(profile.batch_size).static_bytes
    return int(static + share * (points[0].peak_bytes - static))


def test_the_plan_is_what_the_simulator_says(profile: Profile, half: gf.Plan) -> None:
    actions = [KEEP if a == "external" else ACTION_NAMES.index(a) for a in half.actions]
    graph = profile.at(half.micro_batch, accumulates=half.steps > 1)
    result = simulate(graph, actions, Segments(half.segments, half.segment_parents))
    assert result.peak_bytes == half.peak_bytes <= half.budget_bytes
    assert half.extra_seconds == pytest.approx(result.extra_seconds)
    assert sum(half.breakdown.values()) == half.peak_bytes
    assert [a == "external" for a in half.actions] == [v.operation is None for v in profile.values]


def test_the_plan_round_trips_through_json(half: gf.Plan) -> None:
    again = gf.Plan.from_json(half.to_json())
    assert again == half
    assert again.signature == half.signature
    with pytest.raises(StateError, match="Plan"):
        Profile.from_json(half.to_json())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actions", '["drop"]'),
        ("segments", "[5]"),
        ("micro_batch", "0"),
        ("step_seconds", "1e400"),
        ("plain_seconds", '"nan"'),
        ("peak_bytes", "-1"),
        ("breakdown", '{"parameters": 1%s}' % ("0" * 40)),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_when_it_is_read(
    half: gf.Plan, name: str, value: str
) -> None:
    changed = json.loads(half.to_json())
    if isinstance(changed[name], list):
        first = json.loads(value)
        value = json.dumps(first + changed[name][1:])
    changed[name] = "here"
    with pytest.raises(StateError, match=name.removesuffix("s")):
        gf.Plan.from_json(json.dumps(changed).replace('"here"', value))


def test_the_plan_prints_what_a_person_wants_to_know(half: gf.Plan) -> None:
    lines = str(half).splitlines()
    assert lines[0].startswith(
        f"micro-batch 8 × 1, {half.kept_values} of {half.saved_values} values kept; predicted:"
        " peak "
    )
    assert "% time, step " in lines[0]
    text = str(half)
    assert "parameters" in text
    assert "kept activations" in text
    assert 1 <= len(half.decisions) <= 10
    assert all(f"({d.source})" in text and d.module in text for d in half.decisions)
    assert [d.seconds for d in half.decisions] == sorted(
        (d.seconds for d in half.decisions), reverse=True
    )
    assert "next with less memory" in text
    assert "next with more memory" in text
    assert half.less_memory is not None
    assert half.more_memory is not None
    assert half.less_memory.peak_bytes < half.peak_bytes < half.more_memory.peak_bytes


@pytest.mark.parametrize("share", [0.9, 0.7, 0.35, 0.2, 0.1])
def test_with_more_memory_it_is_faster(profile: Profile, share: float) -> None:
    plain, least = (
        gf.plan(profile, memory="10 GiB").peak_bytes,
        gf.frontier(profile, points=2)[-1].peak_bytes,
    )
    plan = gf.plan(profile, memory=int(least + share * (plain - least)))
    assert plan.less_memory is None or plan.less_memory.peak_bytes < plan.peak_bytes
    assert plan.more_memory is not None
    assert plan.more_memory.peak_bytes > plan.peak_bytes
    assert plan.more_memory.step_seconds < plan.step_seconds


def test_enough_memory_means_no_recomputation(profile: Profile) -> None:
    plan = gf.plan(profile, memory="10 GiB")
    assert plan.extra_seconds == 0
    assert plan.kept_values == plan.saved_values
    assert plan.more_memory is None


def test_too_little_memory_says_what_would_do(profile: Profile) -> None:
    with pytest.raises(
        BudgetInfeasible,
        match=r"Smallest feasible peak is .*the budget is 1 MiB\. Pass batch_size=8",
    ) as caught:
        gf.plan(profile, memory="1 MiB")
    assert caught.value.min_bytes > MIB
    assert sum(caught.value.breakdown.values()) == caught.value.min_bytes
    assert gf.plan(profile, memory=caught.value.min_bytes).peak_bytes <= caught.value.min_bytes
    with pytest.raises(BudgetInfeasible):
        gf.plan(profile, memory=caught.value.min_bytes - 1)


def test_the_smallest_budget_of_a_batch_that_may_be_split_is_reachable_too(
    profile: Profile,
) -> None:
    with pytest.raises(BudgetInfeasible, match="at micro-batch 1") as caught:
        gf.plan(profile, memory="1 MiB", batch_size=16)
    plan = gf.plan(profile, memory=caught.value.min_bytes, batch_size=16)
    assert plan.peak_bytes <= caught.value.min_bytes
    assert plan.micro_batch * plan.steps >= 16


@pytest.mark.parametrize("memory", [0, -1, "3 bananas", "", "0 GiB", True, float("nan"), None])
def test_a_budget_that_is_none_is_misuse(profile: Profile, memory: object) -> None:
    with pytest.raises(MisuseError, match="memory"):
        gf.plan(profile, memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [0, -3, 2.5, True, "8"])
def test_a_batch_size_that_is_none_is_misuse(profile: Profile, batch_size: object) -> None:
    with pytest.raises(MisuseError, match="batch_size"):
        gf.plan(profile, memory="1 GiB", batch_size=batch_size)  # type: ignore[arg-type]


def test_a_profile_of_nothing_is_misuse() -> None:
    with pytest.raises(MisuseError, match="no operations"):
        gf.plan(Profile((), (), ()), memory="1 GiB")


def test_micro_batch_and_recomputation_are_chosen_together(profile: Profile) -> None:
    """With a fixed cost per micro-batch between the two extremes, the best step is neither of
    them.
    """
    costly = replace(profile, overhead_seconds=0.1)
    budget = 200 * MIB
    joint = gf.plan(costly, memory=budget, batch_size=64)
    one_by_one = []
    for size in range(4, 65, 4):
        try:
            one_by_one.append(gf.plan(costly, memory=budget, batch_size=64, micro_batch=size))
        except BudgetInfeasible:
            break
    plain = [plan for plan in one_by_one if plan.extra_seconds == 0]
    # the largest micro-batch without recomputation
    assert joint.step_seconds < plain[-1].step_seconds
    assert joint.step_seconds < one_by_one[-1].step_seconds  # the largest of all
    assert joint.step_seconds <= 1.03 * min(plan.step_seconds for plan in one_by_one)
    assert joint.micro_batch * (joint.steps - 1) < 64 <= joint.micro_batch * joint.steps


def test_a_batch_that_cannot_be_split_is_not(profile: Profile) -> None:
    plan = gf.plan(replace(profile, splittable=False), memory="10 GiB", batch_size=8)
    assert (plan.micro_batch, plan.steps) == (8, 1)
    with pytest.raises(BudgetInfeasible, match="cannot be split"):
        gf.plan(replace(profile, splittable=False), memory="50 MiB", batch_size=8)


def test_the_frontier_trades_memory_for_time(profile: Profile) -> None:
    points = gf.frontier(profile)
    assert len(points) >= 8
    assert points[0].extra_seconds == 0
    for dearer, cheaper in pairwise(points):
        assert cheaper.peak_bytes < dearer.peak_bytes
        assert cheaper.step_seconds > dearer.step_seconds
    with pytest.raises(BudgetInfeasible):
        gf.plan(profile, memory=points[-1].peak_bytes - 1)
    with pytest.raises(MisuseError, match="points"):
        gf.frontier(profile, points=1)


def test_offloading_shows_in_the_plan() -> None:
    profile = replace(transformer(2), host_bandwidth=1e12)
    plan = gf.plan(profile, memory=_share(profile, 0.4))
    assert "offload" in plan.actions


def test_a_plan_from_a_predicted_profile_says_so() -> None:
    plan = gf.plan(
        replace(random_profile(1, 10), predicted=True, batch_bytes=Linear(0, 1)), memory="1 GiB"
    )
    assert plan.predicted
    assert "predicted" in str(plan).splitlines()[0]


def test_planning_imports_records_of_earlier_stages_only() -> None:
    allowed = {
        "gradfit.arguments",
        "gradfit.errors",
        "gradfit.units",
        "gradfit.records",
        "gradfit.state_checks",  # of plans that are read
        "gradfit.profiling.profile",
        "gradfit.profiling.step_graph",
        "gradfit.tiling.tiles",
    }
    for path in Path(gf.__file__).parent.joinpath("planning").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] != "torch", f"{path.name} imports {name}"
                if name.startswith("gradfit.") and not name.startswith("gradfit.planning."):
                    assert name in allowed, f"{path.name} imports {name}"


def test_a_fixed_micro_batch_that_does_not_fit_says_so(profile: Profile) -> None:
    with pytest.raises(BudgetInfeasible, match="Leave out `micro_batch`"):
        gf.plan(profile, memory=1000, batch_size=64, micro_batch=32)
