"""Random loops through `fit`: see `strange_loops.py`. A child that dies is a failure like any
other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from warm_process import run_warm

HERE = Path(__file__).parent


def check(first: int, count: int) -> None:
    ended = run_warm(
        [sys.executable, str(HERE / "strange_loops.py"), str(first), str(count)],
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads(ended.stdout)
    assert report["wrong"] == {}, f"{report['wrong_count']} of {count} are wrong"
    assert report["equal"] + report["refused"] == count
    assert report["equal"]


def test_strange_loops_are_exact_or_refused() -> None:
    check(5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_many_strange_loops_are_exact_or_refused(first: int) -> None:
    check(first, 20)
