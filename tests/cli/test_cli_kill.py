"""A run that is killed again and again ends with the parameters of the run that never was."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from cli_calls import command, environment
from warm_process import WarmProcess

OPTIONS = ("--memory", "40 KiB", "--seed", "3", "--json")


def start(folder: Path, *options: str) -> WarmProcess:
    return WarmProcess(
        command("train", "job.py:slow", *OPTIONS, *options), cwd=folder, env=environment()
    )


def finish(process: WarmProcess) -> tuple[int | None, str, str]:
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


def wait_for_training(process: WarmProcess) -> None:
    """Until the plan is printed: from then on there is something to lose."""
    for line in process.stderr or ():
        if line.startswith("micro-batch"):
            return


def resumed(folder: Path) -> list[str]:
    """`--resume`, once there is a run to resume: a process that is killed early has not begun
    one.
    """
    return ["--resume"] if (folder / "killed" / "run.json").exists() else []


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 30), pytest.param(30, 200, marks=pytest.mark.slow)]
)
def test_sigkill_at_random_moments(folder: Path, kills: int, steps: int) -> None:
    code, out, errors = finish(start(folder, "--steps", str(steps), "--out", "through"))
    assert code == 0, errors
    expected = json.loads(out)
    draw = random.Random(kills)
    done = 0
    while done < kills:
        process = start(folder, "--steps", str(steps), "--out", "killed", *resumed(folder))
        if draw.random() < 0.2:
            time.sleep(draw.uniform(0, 2))  # before it has begun, while it plans or reads
        else:
            wait_for_training(process)
            time.sleep(draw.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        code, _, errors = finish(process)
        assert code == -signal.SIGKILL, f"over before it could be killed: {code} {errors}"
        done += 1
    code, out, errors = finish(
        start(folder, "--steps", str(steps), "--out", "killed", *resumed(folder))
    )
    assert code == 0, errors
    found = json.loads(out)
    assert found["step"] == steps
    assert found["parameters_sha256"] == expected["parameters_sha256"]
    assert (folder / "killed/model.safetensors").read_bytes() == (
        folder / "through/model.safetensors"
    ).read_bytes()
    assert found["losses"][-1] == expected["losses"][-1]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_finishes_the_micro_batch_saves_and_says_how_to_resume(
    folder: Path, number: signal.Signals
) -> None:
    code, out, errors = finish(start(folder, "--steps", "12", "--out", "through"))
    assert code == 0, errors
    expected = json.loads(out)["parameters_sha256"]
    process = start(folder, "--steps", "12", "--out", "a run")
    wait_for_training(process)
    time.sleep(0.2)
    process.send_signal(number)
    code, out, errors = finish(process)
    assert code == 130
    assert json.loads(out)["interrupted"] is True
    assert "Stopping after this micro-batch" in errors
    assert "Resume with: gradfit train job.py:slow --out 'a run' --resume" in errors
    assert "Traceback" not in errors
    code, out, errors = finish(start(folder, "--out", "a run", "--resume"))
    assert code == 0, errors
    assert json.loads(out)["step"] == 12
    assert json.loads(out)["parameters_sha256"] == expected


def test_ctrl_c_before_there_is_anything_to_save(folder: Path) -> None:
    process = start(folder, "--steps", "5", "--out", "run")
    time.sleep(0.3)
    while process.poll() is None and not (folder / "run").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 130
    assert "Traceback" not in errors
