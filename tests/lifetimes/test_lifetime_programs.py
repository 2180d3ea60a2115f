"""Random programs in which tensors die: see `lifetime_programs.py`. A child that dies is a failure
like any other.
"""

from __future__ import annotations

import pytest
from child_process import run_child

SAMPLED, WHOLE, CHILD = 120, 10_000, 250


def check(first: int, count: int) -> None:
    report = run_child("lifetime_programs.py", first, count)
    assert report["wrong"] == {}, f"{report['wrong_count']} programs of {count} are wrong"
    assert report["equal"] + report["refused"] == count
    assert report["refused"] < count / 2  # or the programs say nothing


def test_programs_with_lifetimes() -> None:
    check(0, SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLED, WHOLE, CHILD))
def test_all_programs_with_lifetimes(first: int) -> None:
    check(first, min(CHILD, WHOLE - first))
