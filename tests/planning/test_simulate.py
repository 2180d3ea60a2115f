"""The simulator against a second reading of the same rules, and against arithmetic done by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_graphs import random_plan, random_profile
from planning_reference import Reference

from gradfit.planning.simulate import simulate


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 10**6), st.integers(1, 25), st.booleans(), st.booleans(), st.sampled_from([0.0, 10.0]))
def test_it_does_what_the_reference_does(seed: int, size: int, levels: bool, odd: bool, bandwidth: float) -> None:
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
