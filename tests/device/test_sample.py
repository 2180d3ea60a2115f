"""A sample of `make test-device` for `make test`, in a process of its own: a device cannot be taken
out again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import simulated

HERE = Path(__file__).parent
SAMPLE = (
    "several_dropouts or like_another or two_devices_in_one_model or reads_from_the_device_once or"
    " read_late or cpu_s_numbers or does_not_wait or rounding or meter_counts or offloading"
)


@pytest.mark.timeout(1800)  # it may have to be built first
def test_a_sample_on_the_simulated_device() -> None:
    if reason := simulated.why_missing():
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "--device",
        "sim",
    ]
    files = [str(HERE / "test_simulated.py"), str(HERE / "test_on_device.py")]
    child = subprocess.run(
        [*command, "-k", SAMPLE, *files], capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
