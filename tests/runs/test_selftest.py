"""`gradfit selftest`: passes here, says what does not hold, and writes what can be handed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradfit.cli.app import run
from gradfit.runs import selftest
from gradfit.runs.selftest import SelfTest, run_selftest

QUICK = (selftest._check_scopes, selftest._check_micro_batches, selftest._check_offloading)


def test_it_holds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_CHECKS", QUICK)
    found = run_selftest(torch.device("cpu"))
    assert found.passed, str(found)
    assert [check.skipped for check in found.checks] == [False, False, True]
    assert SelfTest.from_json(found.to_json()) == found


@pytest.mark.slow
def test_all_of_it_holds_here() -> None:
    found = run_selftest(torch.device("cpu"))
    assert found.passed, str(found)


def test_what_does_not_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selftest._gradients
    calls = []

    def one_bit_off(model: torch.nn.Module) -> list[Tensor]:
        found = whole(model)
        calls.append(model)
        if len(calls) == 2:  # the run with gradfit
            found[0].view(-1)[0] += 1e-3
        return found

    monkeypatch.setattr(selftest, "_gradients", one_bit_off)
    monkeypatch.setattr(selftest, "_CHECKS", QUICK[:1])
    found = run_selftest(torch.device("cpu"))
    assert not found.passed
    assert "1 of 4" in found.checks[0].facts["found"]  # of 41 tensors


def test_the_command_writes_both_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: object
) -> None:
    monkeypatch.setattr(selftest, "_CHECKS", QUICK[1:])
    assert run(["selftest", "--out", str(tmp_path), "--device", "cpu"]) == 0
    content = json.loads((tmp_path / "selftest.json").read_text())
    assert content["gradfit"] == "SelfTest"
    page = (tmp_path / "selftest.html").read_text()
    assert "Micro-batches of any size" in page
    assert "http" not in page.replace("http-equiv", "")
    assert run(["selftest", "--out", str(tmp_path / "nowhere")]) == 2
    assert run(["selftest", "--device", "no such device"]) == 2
