"""The demo, as it is shown: a real cap, a real death, a loss that falls, bit-identical."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps a process's data")
def test_demo(gradfit: Call, folder: Path) -> None:
    done = gradfit("demo", "--json", "--report", "demo.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plain"]["died"]
    assert "can't allocate memory" in found["plain"]["error"]
    assert found["plain"]["peak_bytes"] < found["cap_bytes"]
    assert found["gradfit"]["peak_bytes"] <= found["budget_bytes"] < found["cap_bytes"]
    losses = found["gradfit"]["losses"]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert found["audit"]["identical"]
    assert "ends where it died" in (folder / "demo.html").read_text()
