"""A job file as a user writes it, and a way to call the command line as a user does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_calls import command, environment
from warm_process import run_warm

JOB = """
import time, torch, gradfit
from torch import nn

def make(pause=0.0):
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 4))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(96, 24, 8, generator=draw)
    data = {"x": x, "y": x.mean(dim=1)[:, :4].argmax(dim=1)}
    def loss(model, batch):
        time.sleep(pause)
        return nn.functional.cross_entropy(model(batch["x"]).mean(dim=1), batch["y"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return gradfit.Job(model, loss, data, optimizer, 16)

def slow():
    return make(0.01)

def raises():
    raise RuntimeError("no such\\ndata set")

def different():
    job, calls = make(), []
    plain = job.loss_fn
    def loss(model, batch):
        calls.append(1)  # state that neither a buffer nor a generator holds
        return plain(model, batch) * len(calls)
    job.loss_fn = loss
    return job

def returns_a_model():
    return make().model

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "broken.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gradfit(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own, in the folder with the job."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_warm(command(*arguments), cwd=folder, env=environment(), timeout=240)

    return call
