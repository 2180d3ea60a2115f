"""`torchrun -m gradfit train`: the same run on two ranks, killed and restarted, and resumed by one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = f"{Path(__file__).with_name('launched_job.py')}:tiny"


def train(out: Path, *options: str, ranks: int = 2, **environment: str) -> dict[str, Any]:
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=2", "-m"]
    command = [*start, "gradfit", "train", JOB, "--out", str(out), "--memory", "2 MiB", "--json", *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**answer, "stderr": done.stderr}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("straight"), "--steps", "8")


def test_a_rank_killed_in_a_step_is_restarted_and_the_end_is_the_same(straight: dict[str, Any], tmp_path: Path) -> None:
    killed = train(tmp_path, "--steps", "8", KILL_AFTER=str(tmp_path / "ranks/1"), STEP_SECONDS="0.15")
    assert "Resuming at step" in killed["stderr"]
    assert killed["parameters_sha256"] == straight["parameters_sha256"]
    assert killed["losses"] == straight["losses"][-len(killed["losses"]) :]


@pytest.mark.slow
def test_resumed_it_is_the_same(straight: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, "--steps", "3")
    resumed = train(tmp_path, "--steps", "8", "--resume")
    assert resumed["parameters_sha256"] == straight["parameters_sha256"]


@pytest.mark.slow
def test_one_process_can_go_on(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "2")
    resumed = train(tmp_path, "--steps", "4", "--resume", ranks=1)
    assert resumed["step"] == 4
    assert "had 2 ranks and has 1" in " ".join(resumed["stderr"].split())
