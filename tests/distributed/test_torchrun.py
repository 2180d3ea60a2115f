"""`torchrun -m gradfit train`: the same run on two ranks, killed and restarted, and resumed by one
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import launched_job
import pytest
import torch.distributed as dist
from distributed_pool import Pool

from gradfit.cli.train_command import digest_of
from gradfit.distributed.launch import Ranks
from gradfit.distributed.process_group import Group
from gradfit.runs.random_state import seed_everything
from gradfit.runs.training_run import RunSettings, TrainingRun

JOBS = Path(__file__).with_name("launched_job.py")


def train(
    out: Path, *options: str, job: str = "tiny", ranks: int = 2, **environment: str
) -> dict[str, Any]:
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=2",
            "-m",
        ]
    command = [
        *start,
        "gradfit",
        "train",
        f"{JOBS}:{job}",
        "--out",
        str(out),
        "--memory",
        "2 MiB",
        "--json",
        *options,
    ]
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


def through(rank: int, size: int, name: str, steps: int) -> tuple[list[float], str]:
    """The same run by processes that are there already, never stopped."""
    ranks = Ranks(Group(dist.group.WORLD))
    seed_everything(0)
    job = getattr(launched_job, name)()
    ranks.share(job.model)
    if rank:
        seed_everything(rank)
    report = TrainingRun(
        job, RunSettings(job.batch_size, 2 * 2**20, steps=steps), ranks=ranks
    ).train()
    return report.losses, digest_of(job.model)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["tiny", "sharded"])
def test_a_rank_killed_in_a_step_is_restarted_and_the_end_is_the_same(
    pair: Pool, job: str, tmp_path: Path
) -> None:
    losses, digest = pair.run(through, job, 6)[0]
    killed = train(
        tmp_path, "--steps", "6", job=job, KILL_AFTER=str(tmp_path / "ranks/1"), STEP_SECONDS="0.1"
    )
    assert "Resuming at step" in killed["stderr"]
    assert killed["parameters_sha256"] == digest
    assert killed["losses"] == losses[-len(killed["losses"]) :]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["tiny", "sharded"])
def test_resumed_it_is_the_same(job: str, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", "--steps", "8", job=job)
    train(tmp_path / "stopped", "--steps", "3", job=job)
    resumed = train(tmp_path / "stopped", "--steps", "8", "--resume", job=job)
    assert resumed["parameters_sha256"] == straight["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["tiny", "sharded"])
def test_one_process_can_go_on(job: str, tmp_path: Path) -> None:
    train(tmp_path, "--steps", "2", job=job)
    resumed = train(tmp_path, "--steps", "4", "--resume", job=job, ranks=1)
    assert resumed["step"] == 4
    assert "had 2 ranks and has 1" in " ".join(resumed["stderr"].split())
