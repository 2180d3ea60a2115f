"""The profile's record: numbers that scale, JSON that round-trips, text that a person can read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradfit.errors import MisuseError, StateError
from gradfit.profiling.profile import BackwardNode, Hardware, Linear, Operation, Profile, Value


def small_profile() -> Profile:
    values = (
        Value(Linear(64, 0), None, 0, 3),
        Value(Linear(0, 100), 0, 1, 0, True),
        Value(Linear(0, 100), 1, 1, 2),
        Value(Linear(4, 0), 2, 2, 3),
    )
    operations = (
        Operation(
            "aten.linear",
            (0,),
            (1,),
            seconds=Linear(1e-6, 1e-6),
            module="net.fc",
            source="net.py:7",
        ),
        Operation(
            "aten.relu_",
            (1,),
            (2,),
            overwrites=(1,),
            seconds=Linear(0, 1e-7),
            module="net",
            source="net.py:8",
        ),
        Operation("aten.sum", (2,), (3,), replayable=False, module="net", source="net.py:9"),
    )
    nodes = (
        BackwardNode("SumBackward", (), peak_bytes=Linear(0, 100), after_bytes=Linear(0, 100)),
        BackwardNode(
            "ReluBackward",
            (2,),
            Linear(0, 1e-6),
            Linear(0, 100),
            Linear(0, 200),
            Linear(0, 100),
            gradient_bytes=64,
        ),
    )
    return Profile(
        values, operations, nodes, parameter_bytes=64, gradient_bytes=64, batch_bytes=Linear(0, 8),
        batch_size=4, optimizer_burst_bytes=7, versions={"torch": "2.13"},
    )  # fmt: skip


@given(st.floats(-1e9, 1e9), st.floats(-1e6, 1e6), st.integers(1, 100), st.integers(101, 200))
def test_the_line_through_two_points_meets_both(
    fixed: float, per_item: float, low: int, high: int
) -> None:
    line = Linear.through((low, fixed + per_item * low), (high, fixed + per_item * high))
    assert line.at(low) == pytest.approx(max(0.0, fixed + per_item * low), abs=1e-2, rel=1e-6)
    assert line.at(high) == pytest.approx(max(0.0, fixed + per_item * high), abs=1e-2, rel=1e-6)


def test_profile_round_trips_through_json() -> None:
    profile = small_profile()
    assert Profile.from_json(profile.to_json()) == profile


def test_at_resolves_every_number() -> None:
    graph = small_profile().at(10)
    assert graph.nbytes == [0, 1000, 1000, 4]
    assert graph.static_bytes == 64 + 64 + 80
    assert graph.op_seconds[0] == pytest.approx(11e-6)
    assert graph.consumers == [[0], [1], [2], []]
    assert graph.last_need == [-1, -1, 1, -1]
    assert graph.survives == [False, False, False, True]
    assert graph.keepable == [False, False, True, True]


def test_a_single_micro_batch_has_no_gradients_until_backward_makes_them() -> None:
    graph = small_profile().at(10, accumulates=False)
    assert graph.static_bytes == 64 + 80
    assert graph.node_after == [1000, 1064]
    assert graph.optimizer_burst_bytes == 64 + 7


def test_a_version_written_into_a_parameter_costs_nothing_to_keep() -> None:
    values = (Value(Linear(8), None, 0, 1), Value(Linear(8), 0, 0, 1))
    graph = Profile(values, (Operation("aten.add_", (0,), (1,), (0,)),), ()).at(1)
    assert graph.nbytes[1] == 8
    assert graph.held_bytes[1] == 0


def test_it_prints_totals_modules_and_source_lines() -> None:
    text = str(small_profile())
    assert "3 operations, 1 of 4 values saved" in text
    assert "net.py:8" in text
    assert "net.fc" in text


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"gradfit": "Plan", "version": 1}', '{"gradfit": "Profile"}']
)
def test_other_json_is_a_state_error(text: str) -> None:
    with pytest.raises(StateError):
        Profile.from_json(text)


def test_damaged_json_is_a_state_error() -> None:
    with pytest.raises(StateError, match="damaged"):
        Profile.from_json(small_profile().to_json().replace('"storage": 1', '"storage": "one"'))
    with pytest.raises(StateError, match="reads a value before it is made"):
        Profile.from_json(small_profile().to_json().replace('"inputs": [0]', '"inputs": [3]'))


@pytest.mark.parametrize("number", ["1e400", "NaN", '"inf"', "1e308", "-9" + "9" * 40])
@pytest.mark.parametrize("name", ["per_item", "optimizer_seconds"])
def test_numbers_that_nothing_can_be_planned_with_are_refused(name: str, number: str) -> None:
    text = re.sub(rf'"{name}": [^,}}]*', f'"{name}": {number}', small_profile().to_json())
    with pytest.raises(StateError, match=name):
        Profile.from_json(text)


def test_hardware_reads_bytes_and_rejects_nonsense() -> None:
    hardware = Hardware(memory="80 GiB", devices=64)
    assert hardware.memory == 80 * 1024**3
    assert Hardware.from_json(hardware.to_json()) == hardware
    with pytest.raises(MisuseError, match="memory"):
        Hardware(memory="3 bananas")
    with pytest.raises(MisuseError, match="devices"):
        Hardware(memory=1, devices=0)
    with pytest.raises(MisuseError, match="flops"):
        Hardware(memory=1, flops=0)
