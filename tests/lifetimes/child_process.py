"""Runs a script of this folder in a process of its own, whose death is a failure like any other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from warm_process import run_warm

HERE = Path(__file__).parent


def run_child(script: str, *arguments: object, seconds: float = 900) -> Any:
    """What the script printed, as JSON."""
    ended = run_warm(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, (
        f"{script} {arguments} ended with {ended.returncode}:\n{ended.stderr[-4000:]}"
    )
    return json.loads(ended.stdout)
