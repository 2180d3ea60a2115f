"""What a new user does wrong: one clear line, the right exit code, no traceback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gradfit.cli import main

TALKS = """
def talks():
    import os
    job, plain = make(), make().loss_fn
    def loss(model, batch):
        print("from Python")
        return plain(model, batch)
    os.system("echo from a child")
    job.loss_fn = loss
    return job
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "gtp"], "no built-in job 'gtp'. Pass one of bert, gpt, resnet, vit"),
        (["plan", "job.py:raises"], "job.py:raises raised RuntimeError: no such data set (job.py:"),
        (["plan", "job.py:nothing"], "job.py has no 'nothing'. It has "),
        (["plan", "job.py:number"], "is of type int. Make it a function"),
        (["plan", "job.py:returns_a_model"], "returned Sequential. Return a gradfit.Job."),
        (["estimate", "job.py:make", "--hardware", "abacus"], "--hardware='abacus' is not in the"),
        (["plan", "job.py"], "Pass job.py:function"),
        (["plan", "missing.py:make"], "There is no file 'missing.py'"),
        (["plan", "broken.py:make"], "broken.py:make cannot be imported: SyntaxError"),
        (["plan", "no_such_module:make"], "There is no module 'no_such_module'"),
        (["plan", "a/b:make"], "is not a target"),
        (["plan", "job.py:make", "--memory", "lots"], "--memory='lots' is not a number of bytes"),
        (["plan", "job.py:make", "--report", "nowhere/page.html"], "no directory 'nowhere'"),
        (["train", "job.py:make", "--out", "job.py"], "Cannot write to '{folder}/job.py'"),
        (["train", "job.py:make", "--steps", "0"], "--steps"),
        (["train", "job.py:make", "--stesp", "3"], "No such option: --stesp"),
        (["trian", "job.py:make"], "No such command 'trian'"),
        (["train"], "Missing argument 'TARGET'"),
    ],
)
def test_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert text.replace("{folder}", str(folder)) in said.err
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


def test_debug_shows_the_traceback(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such data set") as caught:
        main(["plan", "job.py:raises", "--debug"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_with_json_a_traceback_comes_beside_the_document(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "job.py:raises", "--debug", "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == 2
    assert "RuntimeError: no such" in said.err


def test_with_json_what_a_job_prints_goes_to_stderr(
    gradfit: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    with (folder / "job.py").open("a") as file:
        file.write(TALKS)
    done = gradfit("profile", "job.py:talks", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["values"]
    assert "from Python" in done.stderr
    assert "from a child" in done.stderr


def test_an_infeasible_budget_is_exit_code_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "job.py:make", "--memory", "4 KiB", "--json"]) == 3
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["exit_code"] == 3
    assert found["min_bytes"] > 4096
    assert "Smallest feasible peak" in said.err


def test_a_difference_is_exit_code_4(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "job.py:different", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["identical"] is False


def test_a_run_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py:make", "--steps", "1", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["train", "job.py:make", "--steps", "1", "--out", "run"]) == 2
    assert "Pass --resume to go on with it, or another --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "plan", "train", "run", "audit", "demo"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: gradfit {command}" in text
    assert "--json" in text


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "profile" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gradfit ")
