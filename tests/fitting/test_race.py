"""Which way is the fastest, in few passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradfit.fitting.race import Race


def run(seconds: list[float], disturbed: dict[int, float] | None = None) -> tuple[Race, int]:
    """A race of ways that take so long; some passes, by their number, take longer."""
    race, passes = Race([1.0] * len(seconds)), 0
    while not race.is_over:
        for place in race.running:
            race.add(place, seconds[place] * (disturbed or {}).get(passes, 1.0))
            passes += 1
        race.drop_slow()
    return race, passes


@pytest.mark.parametrize(
    ("seconds", "passes"),
    [
        ([0.5], 1),  # alone and long: once
        ([0.1], 3),
        ([0.001], 10),
        ([0.3, 0.9], 4),  # the second is behind after two passes each
        ([0.3, 0.31], 6),
        ([0.01, 0.0101], 20),
        ([6.0, 6.1], 2),
        ([0.3, 0.9, 0.8, 0.7], 8),
    ],
)
def test_few_passes_tell(seconds: list[float], passes: int) -> None:
    assert run(seconds)[1] == passes


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=4))
def test_the_fastest_wins(seconds: list[float]) -> None:
    race, _ = run(seconds)
    best = min(range(len(seconds)), key=race.step_seconds)
    assert seconds[best] == min(seconds)


@given(st.integers(0, 1), st.floats(1, 50))
def test_one_disturbance_does_not_drop_the_fastest(disturbed: int, by: float) -> None:
    race, _ = run([0.1, 0.3], {disturbed: by})
    assert 0 in race.running


def test_passes_of_smaller_micro_batches_count_as_often_as_a_step_has_them() -> None:
    race = Race([1.0, 4.0])
    for _ in range(2):
        race.add(0, 1.0)
        race.add(1, 0.3)
    race.drop_slow()
    assert race.running == [0, 1]
    assert race.step_seconds(1) == pytest.approx(1.2)


def test_processes_that_run_passes_together_run_all_equally_often() -> None:
    """By their own clocks they would decide differently, and wait for each other."""
    rounds = []
    for seconds in ([0.001, 9.0], [9.0, 0.001]):
        race = Race([1.0, 1.0], together=True)
        count = 0
        while not race.is_over:
            for place in race.running:
                race.add(place, seconds[place])
            race.drop_slow()
            count += len(race.running)
        rounds.append(count)
    assert rounds == [6, 6]
