"""`gradfit run`: a script is what it is under plain Python, only below a budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_calls import command, environment
from warm_process import run_warm

from gradfit.cli.run_command import own_arguments

SCRIPT = """
import os, pickle, signal, sys
import torch
from beside import NUMBER
from torch import nn

class Mine:
    pass

def train():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(16)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    return sum(p.detach().double().sum().item() for p in model.parameters())

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    assert sys.modules["__main__"].train is train
    end = sys.argv[-1]
    if end != "quick":
        print(repr(train()))
    print(sys.argv[1:], NUMBER, __file__, sys.path[0], __name__, __spec__ is None)
    if end == "exit":
        sys.exit(7)
    if end == "words":
        sys.exit("some words")
    if end == "raise":
        raise LookupError("as it says")
    if end == "interrupt":
        raise KeyboardInterrupt
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("NUMBER = 11")
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return Path("scripts/train.py")


def call(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, check=False, env=environment(), timeout=300
    )


@pytest.mark.parametrize("end", ["--json", "words", "raise", "interrupt"])
def test_a_script_is_the_same_below_a_budget(script: Path, end: str) -> None:
    plain = call([sys.executable, str(script), "--memory", "5", end])
    # not so near what can be held that the clock, by which values are dropped, decides
    under = call(command("run", "--memory", "5MiB", str(script), "--memory", "5", end))
    assert under.stdout == plain.stdout
    code = 130 if end == "interrupt" else plain.returncode  # plain Python dies of the signal
    assert under.returncode == code
    *said, last = under.stderr.splitlines()
    assert said == plain.stderr.splitlines()
    assert last.startswith("gradfit: peak ")
    assert re.search(r" of 5 MiB; forwards: 3 \([12] by a plan\), values dropped: [1-9]", last)


def test_a_forked_child_says_nothing_of_the_budget(script: Path) -> None:
    forks = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    script.write_text(forks)
    under = call(command("run", "--memory", "1 GiB", str(script)))
    assert under.stdout == "7\n"
    assert under.returncode == 0
    assert under.stderr.count("gradfit: peak ") == 1


def test_a_script_may_close_its_output(script: Path) -> None:
    script.write_text("import sys; print('done', flush=True); sys.stdout.close()")
    under = call(command("run", "--memory", "1 GiB", str(script)))
    assert under.stdout == "done\n"
    assert under.stderr.startswith("gradfit: peak ")


def test_what_it_took_is_the_last_line_as_json(script: Path) -> None:
    under = call(command("run", "--memory", "5 MiB", "--json", str(script), "exit"))
    *printed, last = under.stdout.splitlines()
    found = json.loads(last)
    assert printed == call([sys.executable, str(script), "exit"]).stdout.splitlines()
    assert found["peak_bytes"] <= found["budget_bytes"] == 5 << 20
    assert found["evictions"] > 0
    assert found["exit_code"] == under.returncode == 7


def test_a_module(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    under = call(command("run", "--memory", "1 GiB", "-m", "train", "quick"))
    assert under.returncode == 0, under.stderr
    plain = call([sys.executable, "-m", "train", "quick"])
    assert under.stdout == plain.stdout


def test_a_budget_that_cannot_be_held_is_exit_code_3(script: Path) -> None:
    under = run_warm(command("run", "--memory", "1 MiB", str(script)), env=environment())
    assert under.returncode == 3
    assert "gf.fit(" in under.stderr
    assert 'train.py", line' in under.stderr  # where it was


@pytest.mark.parametrize("wrong", [["--memory", "lots", "s.py"], ["--memory", "1GiB", "none.py"]])
def test_what_cannot_be_run_is_exit_code_2(wrong: list[str], script: Path) -> None:
    Path("s.py").write_text("print('never')")
    under = run_warm(command("run", *wrong), env=environment())
    assert under.returncode == 2
    assert under.stdout == ""
    assert len(under.stderr.splitlines()) == 1


def test_whose_an_option_is() -> None:
    assert own_arguments(["run", "--memory", "1", "a.py", "--json"])[-1] == "a.py"
    assert own_arguments(["run", "--memory=1", "--json", "a.py", "-m"])[-1] == "a.py"
    assert own_arguments(["plan", "gpt", "--json"])[-1] == "--json"
