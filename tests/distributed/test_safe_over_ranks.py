"""Ranks that differ are told apart before they communicate; what they save runs no code when it is
read.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_pool import Pool
from safetensors.torch import save_file
from torch import nn

import gradfit as gf
from gradfit.distributed import state
from gradfit.distributed.launch import Ranks
from gradfit.distributed.process_group import Group
from gradfit.distributed.same_model import require_same_model
from gradfit.distributed.window_files import file_of


def different_models(rank: int, size: int, how: str) -> str:
    layers = {
        "shape": [nn.Linear(4, 4), nn.Linear(4, 4 + rank)],
        "name": [nn.Linear(4, 4), *([nn.Linear(4, 4)] if rank else [])],
        "type": [nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32)],
        "frozen": [nn.Linear(4, 4).requires_grad_(not rank)],
    }
    model = nn.Sequential(*layers[how])
    world = torch.distributed.group.WORLD
    assert world is not None
    try:
        require_same_model(model, Group(world).exchange)
    except gf.MisuseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", "rank 0 has '1.weight (4, 4) float32 trained', rank 1 has '1.weight (5, 4)"),
        ("name", "rank 0 has 'no more', rank 1 has '1.weight"),
        ("type", "rank 1 has '0.weight (4, 4) float64"),
        ("frozen", "rank 1 has '0.weight (4, 4) float32'"),
    ],
)
def test_different_models_are_named_on_all_ranks(pair: Pool, how: str, text: str) -> None:
    said = pair.run(different_models, how)
    assert all(text in one for one in said), said


def fit_different(rank: int, size: int) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model.module.register_buffer("extra", torch.zeros(1 + rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        gf.fit(
            model, optimizer, lambda m, x: m(x).square().mean(), torch.randn(8, 4), memory="1 MiB"
        )
    except gf.MisuseError as error:
        return str(error)
    return ""


def test_fit_says_so_before_it_measures(pair: Pool) -> None:
    assert all("'module.extra (1,) float32'" in one for one in pair.run(fit_different))


def fit_otherwise(rank: int, size: int, how: str) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    kind: Any = torch.optim.AdamW if how == "optimizer" and rank else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1 + rank * (how == "lr"))
    options: dict[str, Any] = {}
    if how == "clip":
        options = {"clip": 1.0 + rank}
    if how == "clipper":
        options = {"clip": gf.GradientClipper(1.0 + rank)}
    if how == "nonfinite":
        options = {"on_nonfinite": "skip" if rank else "raise"}
    memory = f"{1 + rank * (how == 'budget')} MiB"
    try:
        step = gf.fit(
            model,
            optimizer,
            lambda m, x: m(x).square().mean(),
            torch.randn(8, 4),
            memory,
            **options,
        )
    except gf.MisuseError as error:
        return str(error)
    return f"budget {step.budget_bytes}, stepped {step(torch.randn(8, 4)).stepped}"


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("lr", ["rank 0 has 'lr=0.1 in group 0', rank 1 has 'lr=1.1 in group 0'"] * 2),
        ("optimizer", ["rank 0 has 'optimizer SGD', rank 1 has 'optimizer AdamW'"] * 2),
        ("clip", ["rank 0 has 'clip=1.0', rank 1 has 'clip=2.0'"] * 2),
        ("clipper", ["rank 0 has 'clip=GradientClipper(max_norm=1.0"] * 2),
        ("nonfinite", ["rank 0 has \"on_nonfinite='raise'\", rank 1 has"] * 2),
        (
            "budget",
            ["budget 1048576, stepped True", "budget 2097152, stepped True"],
        ),  # each rank's own
    ],
)
def test_what_makes_the_update_is_the_same_and_budgets_may_differ(
    pair: Pool, how: str, texts: list[str]
) -> None:
    said = pair.run(fit_otherwise, how)
    assert all(text in one for text, one in zip(texts, said, strict=True)), said


def run_otherwise(rank: int, size: int) -> str:
    world = torch.distributed.group.WORLD
    assert world is not None
    try:
        Ranks(Group(world)).require_same({"seed": 0, "steps": 3 + rank})
    except gf.MisuseError as error:
        return str(error)
    return ""


def test_a_runs_settings_are_the_same(pair: Pool) -> None:
    said = pair.run(run_otherwise)
    assert all("rank 0 has 'steps=3', rank 1 has 'steps=4'" in one for one in said), said


# -------------------------------------------------------------------------------------------- files


class Bomb:
    """Pickled, it writes a file when it is read."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.victim,)


def accumulator() -> tuple[gf.GradientAccumulator, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    made.backward(model(torch.ones(2, 3)).mean(), weight=2)
    return made, model


def test_no_file_of_a_window_is_a_pickle(tmp_path: Path) -> None:
    made, _ = accumulator()
    state.save(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["window-00000.safetensors"]
    other, model = accumulator()
    other.reset()
    state.load(other, tmp_path)
    assert other.current_step == 1
    assert model.weight.grad is not None


def test_a_crafted_index_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "ran"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(victim)))
    made, _ = accumulator()
    with pytest.raises(gf.StateError, match="trust_pickles=True"):
        state.load(made, folder)
    assert not victim.exists()
    assert made.current_step == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_read_if_it_is_asked_for_by_name(tmp_path: Path) -> None:
    made, _ = accumulator()
    dcp.save({"accumulator": state.share(made)}, checkpoint_id=tmp_path, no_dist=True)
    other, _ = accumulator()
    other.reset()
    state.load(other, tmp_path, trust_pickles=True)
    assert other.current_step == 1


CHANGES: dict[str, Any] = {
    "another format": lambda header: header.update(format="gradfit-window-9"),
    "too many ranks": lambda header: header.update(ranks=99_999_999),
    "ranks that are not there": lambda header: header.update(ranks=2),
    "no window": lambda header: header.pop("window"),
    "a window that is no JSON": lambda header: header.update(window="x"),
    "a deep window": lambda header: header.update(window="[" * 100_000),
    "a window of nonsense": lambda header: header.update(window=json.dumps({"steps": "x"})),
    "a part beyond its tensor": lambda header: header["parts"].update({"grad.0": [[2, 3], [5, 0]]}),
    "a part of no tensor": lambda header: header["parts"].update({"grad.7": [[2, 3], [0, 0]]}),
    "a place that is none": lambda header: header["parts"].update({"grad.0": "x"}),
    "a larger tensor": lambda header: header["parts"].update({"grad.0": [[4, 3], [0, 0]]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_refused(tmp_path: Path, change: str) -> None:
    made, model = accumulator()
    state.save(made, tmp_path)
    path = file_of(tmp_path, 0)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["gradfit"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    CHANGES[change](header)
    save_file(tensors, path, metadata={"gradfit": json.dumps(header)})
    before = model.weight.grad.clone()
    with pytest.raises(gf.StateError):
        state.load(made, tmp_path)
    assert torch.equal(model.weight.grad, before)
    assert made.current_step == 1


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    made, _ = accumulator()
    state.save(made, tmp_path / "real")
    (tmp_path / "linked").mkdir()
    file_of(tmp_path / "linked", 0).symlink_to(file_of(tmp_path / "real", 0))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(file_of(tmp_path / "pipe", 0))
    for name in ("linked", "pipe", "nowhere"):
        with pytest.raises(gf.StateError):
            state.load(made, tmp_path / name)
