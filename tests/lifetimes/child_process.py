"""Runs a script of this folder in a process of its own, whose death is a failure like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def run_child(script: str, *arguments: object, seconds: float = 900) -> Any:
    """What the script printed, as JSON."""
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, (
        f"{script} {arguments} ended with {ended.returncode}:\n{ended.stderr[-4000:]}"
    )
    return json.loads(ended.stdout)
