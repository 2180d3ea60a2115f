"""Whatever a job's code, the disk or Ctrl-C does: one JSON document, the right exit code, nothing
lost.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_calls import command, environment
from warm_process import WarmProcess, run_warm

from gradfit.cli import main

STRANGE = """
import os, sys, signal, resource, torch, gradfit
from torch import nn
import job

def ends():
    sys.exit(0)

def with_loss(loss, **more):
    made = job.make()
    made.loss_fn = loss
    return made

def goes_elsewhere():
    made = job.make()
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return made

def ends_in_loss():
    return with_loss(lambda model, batch: sys.exit(0))

class Strange(BaseException):
    pass

def raises():
    raise Strange("here")

def raises_in_loss():
    def loss(model, batch):
        raise Strange("here")
    return with_loss(loss)

def interrupts():
    def loss(model, batch):
        raise KeyboardInterrupt
    return with_loss(loss)

def fills_the_disk():
    made = job.make()
    plain, calls = made.loss_fn, []
    def loss(model, batch):
        calls.append(1)
        if len(calls) == int(os.environ["FULL_AFTER"]):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
        return plain(model, batch)
    made.loss_fn = loss
    return made
"""


@pytest.fixture
def strange(folder: Path) -> Path:
    (folder / "strange.py").write_text(STRANGE)
    (folder / "ends.py").write_text("import sys\nsys.exit(0)\n")
    return folder


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("ends.py:make", 2, "called sys.exit(0)"),
        ("strange.py:ends", 2, "called sys.exit(0)"),
        ("strange.py:ends_in_loss", 1, "called sys.exit(0)"),
        ("strange.py:raises", 2, "Strange: here"),
        ("strange.py:raises_in_loss", 1, "Strange: here"),
        ("strange.py:interrupts", 130, "Interrupted."),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "profile", "audit", "train"])
def test_code_that_ends_the_process_is_an_error(
    strange: Path, capsys: pytest.CaptureFixture[str], verb: str, target: str, code: int, text: str
) -> None:
    more = ["--out", "out", "--steps", "1"] if verb == "train" else []
    assert (
        main(
            [verb, target, "--memory", "1 MiB", "--json", *more]
            if verb != "profile"
            else [verb, target, "--json"]
        )
        == code
    )
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == code
    assert text in json.loads(said.out)["error"]
    assert text in said.err


def test_a_job_that_changes_the_directory_moves_neither_the_run_nor_the_page(strange: Path) -> None:
    """A second run would else not find the first, and write over it."""
    options = ["--memory", "1 MiB", "--steps", "1", "--out", "run", "--report", "page.html"]
    arguments = ["train", "strange.py:goes_elsewhere", *options]
    assert main(arguments) == 0
    assert (strange / "run/model.safetensors").exists()
    assert (strange / "page.html").exists()
    assert not [*(strange / "elsewhere").iterdir()]
    os.chdir(strange)
    assert main(arguments) == 2
    os.chdir(strange)
    assert main([*arguments[:-2], "--resume"]) == 0


@pytest.mark.parametrize("how", ["full", "closed"])
@pytest.mark.parametrize("more", [["--json"], []])
def test_a_result_that_cannot_be_written_is_an_error_in_words(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    how: str,
) -> None:
    with open("/dev/full", "w") as full:
        if how == "closed":
            full.close()
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "job.py:make", "--memory", "1 MiB", *more]) == 1
        assert "The result could not be written to stdout" in capsys.readouterr().err
        print("more is not written anywhere", flush=True)
        sys.stdout.close()


@pytest.mark.parametrize("verb", ["plan", "profile", "audit"])
def test_one_document_where_the_page_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gradfit.report.page.os.replace", full)
    memory = [] if verb == "profile" else ["--memory", "1 MiB"]
    assert main([verb, "job.py:make", "--json", "--report", "page.html", *memory]) == 2
    said = capsys.readouterr()
    assert "No space left" in json.loads(said.out)["error"]
    assert not [path for path in folder.iterdir() if "page" in path.name]


def test_the_page_does_not_follow_a_link_at_its_temporary_name(folder: Path) -> None:
    victim = folder / "victim"
    victim.write_text("mine")
    (folder / ".page.html.tmp").symlink_to(victim)
    assert main(["profile", "job.py:make", "--report", "page.html"]) == 0
    assert victim.read_text() == "mine"
    assert "<html" in (folder / "page.html").read_text()
    assert (folder / "page.html").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "job.py:make", "--seed", str(2**64)],
        ["plan", "job.py:make", "--seed", str(10**30)],
        ["train", "job.py:make", "--out", "x" * 5000],
        ["train", "job.py:make", "--out", "a\0b"],
        ["plan", "job.py:make", "--report", "y" * 5000],
        ["plan", "job.py:make", "--report", "."],
    ],
)
def test_what_cannot_be_is_bad_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_job_file_named_like_a_standard_module_does_not_replace_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import queue

    # a worker of xdist has the folder itself
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])

    (folder / "queue.py").write_text((folder / "job.py").read_text())
    assert main(["profile", "queue.py:make", "--json"]) == 0
    assert sys.modules["queue"] is queue
    assert hasattr(queue, "SimpleQueue")
    (folder / "colorsys.py").write_text((folder / "job.py").read_text())
    assert main(["profile", "colorsys.py:make", "--json"]) == 0
    sys.modules.pop("colorsys", None)
    import colorsys

    assert hasattr(colorsys, "rgb_to_hsv")
    capsys.readouterr()


def start(*arguments: str, **more: str) -> WarmProcess:
    return WarmProcess(command(*arguments), env={**environment(), **more})


def test_two_runs_cannot_have_one_directory(folder: Path) -> None:
    first = start("train", "job.py:slow", "--out", "run", "--steps", "100000", "--memory", "1 MiB")
    try:
        deadline = time.monotonic() + 200
        while not list((folder / "run").glob("state-*.json")) and time.monotonic() < deadline:
            assert first.poll() is None, first.communicate(timeout=20)
            time.sleep(0.05)
        for more in ([], ["--resume"]):
            second = run_warm(
                command("train", "job.py:slow", "--out", "run", "--steps", "3", *more),
                env=environment(),
                timeout=200,
            )
            assert second.returncode == 2
            assert f"Another run is writing to '{folder / 'run'}'" in second.stderr
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=200)
    assert first.returncode == 130, said


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE")
def test_a_full_disk_says_what_to_do_and_loses_nothing(strange: Path) -> None:
    run = ["--memory", "40 KiB", "--steps", "6", "--json"]
    full = start("train", "strange.py:fills_the_disk", "--out", "full", *run, FULL_AFTER="60")
    out, said = full.communicate(timeout=300)
    assert full.returncode == 1, said
    assert out, said
    assert json.loads(out)["exit_code"] == 1
    assert "--out" in json.loads(out)["error"]
    assert "--resume" in json.loads(out)["error"]
    rest = start("train", "job.py:make", "--out", "full", "--resume", "--json")
    whole = start("train", "job.py:make", "--out", "whole", *run)
    after, plain = (json.loads(process.communicate(timeout=300)[0]) for process in (rest, whole))
    assert after["parameters_sha256"] == plain["parameters_sha256"]


# Python imports a module of this name by itself, before anything else.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    "module", ["torch.nn", "scipy", "gradfit.tape.recorder", "gradfit.cli.app", "job"]
)
def test_interrupted_while_it_is_imported(folder: Path, module: str) -> None:
    """A line, a document, and no traceback: where a module of another library, of ours, or the job
    begins to load.
    """
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "loads.py").write_text("import job\nmake = job.make\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        command("plan", "loads.py:make", "--json"),
        env={**environment(), "PYTHONPATH": path, "INTERRUPT_AT": module},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == 130, child.stderr
    assert json.loads(child.stdout) == {"error": "Interrupted.", "exit_code": 130}
    assert "Traceback" not in child.stderr
