"""Data as users have them: loaders without a length, batches of several lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradfit.cli import main

JOBS = """
import torch
import gradfit
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(240.0).view(30, 8) / 240


def job(data, batch_size):
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = lambda model, x: model(x).square().mean()
    return gradfit.Job(model, loss_fn, data, optimizer, batch_size)


def stream():
    return job(DataLoader(Stream(), batch_size=4), 12)


def rows():
    return job([torch.stack(list(Stream()))[start : start + 12] for start in (0, 12, 24)], 12)


def lengths():
    return job([torch.ones(4, length, 8) for length in (5, 5, 7, 7)], 6)
"""


@pytest.fixture
def jobs(folder: Path) -> Path:
    torch.set_num_threads(1)
    (folder / "jobs.py").write_text(JOBS)
    return folder


def test_a_loader_over_an_iterable_dataset(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no length; regrouped, its batches are the rows in their order, and a run can be
    resumed in the middle.
    """
    found = []
    for name in ("stream", "rows"):
        assert (
            main(
                [
                    "train",
                    f"jobs.py:{name}",
                    "--memory",
                    "1 MiB",
                    "--epochs",
                    "2",
                    "--out",
                    name,
                    "--json",
                ]
            )
            == 0
        )
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["step"] == found[1]["step"] == 6  # 12, 12 and 6 rows, twice
    assert found[0]["losses"] == found[1]["losses"]
    options = ["--memory", "1 MiB", "--out", "parts", "--json"]
    assert main(["train", "jobs.py:stream", *options, "--steps", "4"]) == 0
    assert main(["train", "jobs.py:stream", *options, "--epochs", "2", "--resume"]) == 0
    resumed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert resumed["parameters_sha256"] == found[0]["parameters_sha256"]
    for command in ("profile", "plan", "audit"):
        assert main([command, "jobs.py:stream"]) == 0


def test_batches_of_several_lengths_are_not_joined(
    jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", "jobs.py:lengths", "--memory", "1 MiB", "--epochs", "1", "--out", "run"])
        == 2
    )
    error = capsys.readouterr().err
    assert (
        "cannot be joined into one of 6 rows: rows of one have shape (5, 8), of the next (7, 8)"
        in error
    )
    assert "--batch-size 4" in error
    assert "Traceback" not in error
    assert (
        main(
            [
                "train",
                "jobs.py:lengths",
                "--memory",
                "1 MiB",
                "--batch-size",
                "4",
                "--out",
                "each",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["step"] == 4
