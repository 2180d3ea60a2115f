"""How to call the command line in a process of its own."""

from __future__ import annotations

import os
import sys


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradfit", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
