"""`train --resume` goes on with the run that is there, with its settings, and with nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gradfit.cli import main

Call = Callable[..., subprocess.CompletedProcess[str]]
KILLED = """
import os
from pathlib import Path
import job

def make():
    found = job.make()
    inner = found.loss_fn
    def loss_fn(model, batch):
        if not Path("survive").exists():
            os._exit(9)  # while it is measured, before there is any state
        return inner(model, batch)
    found.loss_fn = loss_fn
    return found
"""


def test_a_run_that_was_killed_before_its_first_state_keeps_its_settings(
    folder: Path, gradfit: Call
) -> None:
    (folder / "killed.py").write_text(KILLED)
    options = (
        "--memory",
        "40 KiB",
        "--batch-size",
        "12",
        "--seed",
        "5",
        "--steps",
        "3",
        "--out",
        "run",
    )
    assert gradfit("train", "killed.py:make", *options).returncode == 9
    assert not list((folder / "run").glob("state-*"))
    (folder / "survive").touch()
    done = gradfit("train", "killed.py:make", "--resume", "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert (
        "has no state yet: starting from the beginning, with the settings it was begun with"
        in done.stderr
    )
    found = json.loads(done.stdout)
    assert (found["budget_bytes"], found["batch_size"], found["step"]) == (40 * 1024, 12, 3)
    assert found["peak_bytes"] <= 40 * 1024


def test_a_directory_without_a_run_is_not_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    for out in ("typo", "empty"):
        assert main(["train", "job.py:make", "--resume", "--out", out, "--steps", "1"]) == 2
        said = capsys.readouterr()
        assert f"There is no run in '{folder / out}' to resume. Check --out, or leave" in said.err
        assert said.out == ""
    assert not (folder / "typo").exists()
    assert main(["train", "job.py:make", "--resume", "--steps", "1"]) == 2
    assert f"There is no run in '{folder}/runs/job-make' to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": "gradfit-run", "settings": {"batch_size": "16"}}', "[" * 100_000],
)
def test_settings_that_are_damaged_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(content)
    assert main(["train", "job.py:make", "--resume", "--out", "run", "--steps", "1"]) != 0
    assert "does not say what the run was begun with" in capsys.readouterr().err
