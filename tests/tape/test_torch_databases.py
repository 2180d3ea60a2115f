"""Every operator and module that torch has samples for, in a scope, is what it is without one: see torch_databases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("torch_databases.py")


def sweep(*arguments: str) -> int:
    """How many cases were compared, in a process of its own; none may differ, and none may end it."""
    command = [sys.executable, str(PROGRAM), *arguments]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    last = "\n".join(done.stderr.splitlines()[-20:])
    assert done.returncode == 0, f"died with {done.returncode} at {last}"
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert not wrong, "\n".join(wrong)
    counted = re.search(r"(\d+) compared", done.stdout)
    assert counted is not None, done.stdout
    return int(counted[1])


def test_one_case_of_every_name_and_dtype() -> None:
    assert sweep("--sample", "1") > 1800


@pytest.mark.exact
def test_a_tenth_of_these() -> None:
    assert sweep("--sample", "0.1") > 180


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_cases(part: int) -> None:
    assert sweep("--part", str(part), "--parts", "4") > 15_000
