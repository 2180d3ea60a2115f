"""Random models under random budgets: see `random_budgets.py`. A child that dies is a failure like
any other.
"""

from __future__ import annotations

import pytest
from child_process import run_child


def check(way: str, first: int, count: int) -> None:
    report = run_child("random_budgets.py", way, first, count, seconds=1800)
    assert report["wrong"] == {}, f"{report['wrong_count']} of {count} are wrong"
    assert report["equal"] + report["refused"] == count
    assert report["equal"]


def test_budgets_that_are_held_online() -> None:
    check("online", 0, 10)


def test_budgets_near_the_smallest_that_fit_can_hold() -> None:
    check("fit", 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_many_budgets_that_are_held_online(first: int) -> None:
    check("online", first, 20)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2, 42, 8))
def test_many_budgets_near_the_smallest_that_fit_can_hold(first: int) -> None:
    check("fit", first, 8)
