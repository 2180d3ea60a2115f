"""A test that hangs fails, also where an exception cannot end it: with these settings of pytest, in
a child.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS = """
import threading

taken = threading.Lock()
taken.acquire()


class Waits:
    def __del__(self):
        taken.acquire()  # what is raised in here, Python drops


def test_that_hangs():
    waits = Waits()
    del waits
    taken.acquire()
"""


def test_a_hang_in_a_destructor_fails(tmp_path: Path) -> None:
    script = tmp_path / "test_hanging.py"
    script.write_text(HANGS)
    settings = Path(__file__).parents[2] / "pyproject.toml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        "-c",
        str(settings),
        "--timeout",
        "1",
        str(script),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running" in done.stdout
    assert "test_that_hangs" in done.stdout
