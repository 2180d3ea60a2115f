"""Which of the ways to rebuild a piece are kept."""

from __future__ import annotations

import numpy as np

from gradfit.planning.nested_ways import _evenly


def test_a_few_ways_are_as_far_from_each_other_in_seconds_as_there_are() -> None:
    """By number they would be crowded where many bytes save little time."""
    seconds = np.array([90.0, 60.0, 40.0, *np.linspace(30.0, 29.0, 50)])
    chosen = seconds[_evenly(seconds, 4)]
    # wanted at 90, 69.7, 49.3 and 29
    assert chosen.tolist() == [90.0, 60.0, 40.0, 29.0]


def test_the_fastest_and_the_smallest_are_among_them() -> None:
    seconds = np.array([5.0, 4.9, 4.8, 1.0, 0.9])
    places = _evenly(seconds, 3)
    assert places[0] == 0
    assert places[-1] == 4
