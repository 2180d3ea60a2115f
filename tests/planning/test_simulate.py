"""The simulator against a second reading of the same rules, and against arithmetic done by hand."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_graphs import random_plan, random_profile, transformer
from planning_reference import Reference

from gradfit.planning.simulate import KEEP, OFFLOAD, REBUILD, Segments, Simulator, simulate
from gradfit.profiling.profile import BackwardNode, Linear, Operation, Profile, Value
from gradfit.profiling.step_graph import Graph


@settings(deadline=None, max_examples=400)
@given(
    st.integers(0, 10**6),
    st.integers(1, 25),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 10.0]),
)
def test_it_does_what_the_reference_does(
    seed: int, size: int, levels: bool, odd: bool, bandwidth: float
) -> None:
    profile = random_profile(seed, size, odd=odd, bandwidth=bandwidth)
    actions, segments = random_plan(profile, seed + 1, levels=levels)
    graph = profile.at(1)
    timeline: list[tuple[str, int, int]] = []
    result = simulate(graph, actions, segments, timeline=timeline)
    reference = Reference(graph, actions, segments).run()
    assert result.peak_bytes == reference.peak
    assert result.extra_seconds == pytest.approx(reference.seconds) or math.isinf(reference.seconds)
    assert math.isinf(result.extra_seconds) == math.isinf(reference.seconds)
    assert max(now for _, _, now in timeline) == result.peak_bytes
    assert simulate(graph, actions, segments) == result
    assert result.peak_bytes >= Simulator(graph).least_peak_bytes


def chain(actions_of: str) -> tuple[Graph, list[int]]:
    """x → a → b → c → loss, 100 bytes and one second each; backward needs c, b, a; gradients are 10
    bytes.
    """
    values = [Value(Linear(5), None, 0, 4)]
    values += [Value(Linear(100), i, i + 1, min(i + 1, 3)) for i in range(3)] + [
        Value(Linear(4), 3, 4, 4)
    ]
    ops = tuple(
        Operation(name, (i,), (i + 1,), seconds=Linear(1.0)) for i, name in enumerate("abcl")
    )
    nodes = tuple(
        BackwardNode(
            f"{v}", (v,), before_bytes=Linear(10), peak_bytes=Linear(10), after_bytes=Linear(10)
        )
        for v in (3, 2, 1)
    )
    graph = Profile(tuple(values), ops, nodes, parameter_bytes=1000).at(1)
    return graph, [KEEP, *("kr".index(letter) for letter in actions_of), KEEP]


def test_everything_kept_by_hand() -> None:
    graph, actions = chain("kkk")
    result = simulate(graph, actions)
    assert result.extra_seconds == 0
    # three activations, the loss the caller holds, a gradient
    assert result.peak_bytes == 1000 + 300 + 4 + 10
    assert (result.phase, result.kept_bytes, result.saved_bytes) == ("backward", 300, 300)


def test_dropping_the_middle_by_hand() -> None:
    graph, actions = chain("krk")
    result = simulate(graph, actions)
    assert result.extra_seconds == 1.0
    # Forward: a, b and c live together while c is made. Backward: never more than two activations
    # and the loss.
    assert (result.peak_bytes, result.phase) == (1000 + 300, "forward")


def test_one_sweep_rebuilds_all_three_and_keeps_what_is_wanted() -> None:
    graph, actions = chain("rrr")
    result = simulate(graph, actions)
    assert result.extra_seconds == 3.0
    assert result.peak_bytes == 1000 + 300 + 4 + 10
    assert result.saved_bytes == 0


def test_segments_hold_less_and_replay_more() -> None:
    graph, actions = chain("rrr")
    segments = Segments([0, 1, 2, 3, 0], [-1, 0, 0, 0])  # a, b and c each in a segment of its own
    result = simulate(graph, actions, segments)
    assert result.replays == [3, 2, 1, 0]
    assert result.extra_seconds == 6.0
    timeline: list[tuple[str, int, int]] = []
    simulate(graph, actions, segments, timeline=timeline)
    assert max(now for phase, _, now in timeline if phase != "forward") == 1000 + 200 + 4 + 10


def moved_chain(seconds_per_byte: float) -> Graph:
    """Six operations of a second and 100 bytes each; every backward node takes two seconds."""
    count = 6
    values = [Value(Linear(5), None, 0, count)]
    values += [Value(Linear(100), i, i + 1, min(i + 1, count - 1)) for i in range(count)]
    ops = tuple(Operation(f"op{i}", (i,), (i + 1,), seconds=Linear(1.0)) for i in range(count))
    nodes = tuple(
        BackwardNode(f"{v}", (v,), Linear(2.0), Linear(0), Linear(0), Linear(0))
        for v in range(count, 0, -1)
    )
    return Profile(
        tuple(values), ops, nodes, parameter_bytes=1000, host_bandwidth=1 / seconds_per_byte
    ).at(1)


def test_copies_cost_nothing_while_something_else_is_computed() -> None:
    graph = moved_chain(0.009)  # 0.9 s for a value
    actions = [KEEP, OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD, KEEP, KEEP]
    result = simulate(graph, actions)
    # the last that goes out is waited for, and the first that comes back
    assert result.extra_seconds == pytest.approx(0.9 + 0.9)
    # In forward two are on their way out, of which one is read, while another is made.
    assert result.peak_bytes == 1000 + 300


def test_computation_waits_for_copies_that_take_longer() -> None:
    graph = moved_chain(0.03)  # three seconds for a value
    actions = [KEEP, OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD, KEEP, KEEP]
    result = simulate(graph, actions)
    # Four copies one after the other, from the end of the first operation to that of the fourth;
    # then one that comes back, and each of the others but for two seconds of a node.
    assert result.extra_seconds == pytest.approx((12 - 3) + 3 + 3 * (3 - 2))


def test_what_is_used_while_another_is_fetched_holds_both() -> None:
    graph = moved_chain(0.001)
    timeline: list[tuple[str, int, int]] = []
    simulate(graph, [KEEP, *[OFFLOAD] * 6], timeline=timeline)
    in_backward = [now for phase, _, now in timeline if phase == "backward"]
    assert in_backward == [1000 + 200] * 5 + [1000 + 100]


def test_what_cannot_be_replayed_makes_a_plan_that_replays_it_worthless() -> None:
    profile = random_profile(3, 12, odd=False)
    operations = (
        *profile.operations[:5],
        replace(profile.operations[5], replayable=False),
        *profile.operations[6:],
    )
    graph = replace(profile, operations=operations).at(1)
    assert math.isinf(
        simulate(graph, [KEEP if p < 0 else REBUILD for p in graph.producer]).extra_seconds
    )


def test_the_work_is_in_proportion_to_the_operations() -> None:
    """Counted in calls of functions, Python's and C's: some twenty for every operation."""
    for layers in (45, 180):
        graph = transformer(layers).at(8)
        actions = [KEEP if p < 0 else REBUILD for p in graph.producer]
        assert calls(lambda graph=graph, actions=actions: simulate(graph, actions)) <= 25 * len(
            graph.op_inputs
        )


def calls(function: Callable[[], object]) -> int:
    """How many functions it calls."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
