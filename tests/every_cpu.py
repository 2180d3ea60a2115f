"""The exactness tests under every setting that makes torch choose other kernels: a stand-in for
other CPUs.

    python tests/every_cpu.py            # all settings, two at a time
    python tests/every_cpu.py -k lstm    # arguments go to pytest

Each setting is a process of its own, since these variables are read when torch is loaded. A run is
bit by bit that of plain PyTorch under each of them, or it is not exact.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
NATIVE = ""  # the variable is not set: whatever this CPU can do
SETTINGS = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", NATIVE),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", NATIVE),
    "MKL_CBWR": ("COMPATIBLE", "AVX2", NATIVE),  # MKL takes other ways on other makers' CPUs
    "TEST_THREADS": ("1", "2"),
}


def run(values: tuple[str, ...]) -> bool:
    """Run the tests that are marked `exact`; print a line, and everything if one fails."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= {
        name: value for name, value in zip(SETTINGS, values, strict=True) if value != NATIVE
    }
    # threads of two runs that wait do not take each other's cores
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    files = [
        str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.exact" in path.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "exact",
        "-p",
        "no:cacheprovider",
        *files,
        *sys.argv[1:],
    ]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    setting = " ".join(
        f"{name}={value or 'native'}" for name, value in zip(SETTINGS, values, strict=True)
    )
    summary = (done.stdout.splitlines() or ["no output"])[-1]
    print(f"{setting}: {summary} ({time.monotonic() - started:.0f} s)", flush=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, flush=True)
    return done.returncode == 0


def main() -> int:
    with ThreadPoolExecutor(2) as two_at_a_time:
        passed = list(two_at_a_time.map(run, itertools.product(*SETTINGS.values())))
    print(f"{sum(passed)} of {len(passed)} settings passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
