"""Random loops through `fit`: see `strange_loops.py`. A child that dies is a failure like any
other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def check(first: int, count: int) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            str(HERE / "strange_loops.py"),
            f"{first}",
            f"{count}",
        ],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
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
