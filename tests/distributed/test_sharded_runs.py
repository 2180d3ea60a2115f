"""`gradfit train`'s runs of a `fully_shard` model: saved at one world size, resumed at another,
exactly.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_jobs import Net, full, wrap
from distributed_pool import Pool
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradfit as gf
from gradfit.distributed.launch import Ranks
from gradfit.distributed.process_group import Group
from gradfit.errors import StateError
from gradfit.runs.rank_states import RankStates
from gradfit.runs.state_codec import unflatten
from gradfit.runs.state_files import StateStore
from gradfit.runs.training_run import RunSettings, TrainingRun

ROWS, BATCH, MEMORY = 60, 13, 4 * 2**20


def make_job(how: str, size: int) -> gf.Job:
    torch.manual_seed(5)
    # 7 rows over 4 ranks: the last shard is smaller, and the root's last one is empty
    inner = Net(2, 7).double()
    model = wrap(inner, how, size) if how in ("fsdp", "hsdp") else inner
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    # many activations, few parameters
    scales = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)[:, None]

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x[:, None] * scales) - x[:, None, :3]).square().mean()

    return gf.Job(model, loss, rows, optimizer, BATCH, scheduler)


class Killed(Exception):
    pass


class Dying(StateStore):
    """Dies when a certain state is written, or would be."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory)
        self.name = name

    def save(self, content: dict[str, Any], *, step: int, micro: int = 0) -> Path:
        if self.name == f"before {step}-{micro}":
            raise Killed
        path = super().save(content, step=step, micro=micro)
        if self.name == f"after {step}-{micro}":
            raise Killed
        return path


def go_on(
    rank: int,
    size: int,
    how: str,
    out: str,
    steps: int,
    memory: int = MEMORY,
    kill: tuple[str, ...] = (),
) -> list[torch.Tensor]:
    """Train up to `steps`, from whatever state there is; `kill` says for each rank at which state
    it dies, if any.
    """
    ranks = Ranks(Group(dist.group.WORLD)) if dist.is_initialized() else Ranks()
    job = make_job(how, size)
    ranks.share(job.model)
    states = RankStates(Path(out), ranks)
    saved = states.load()
    states.store.prepare()
    store = Dying(states.store.directory, kill[rank]) if kill else states.store
    run = TrainingRun(job, RunSettings(BATCH, memory, steps=steps), store=store, ranks=ranks)
    if saved is not None:
        run.resume(saved, lambda: states.read_all_ranks(saved))
    if kill:
        run._is_due = lambda: True  # type: ignore[method-assign]
        with pytest.raises(Killed):
            run.train()
        return []
    assert run.train().step == steps
    return [full(parameter).clone() for parameter in job.model.parameters()]


def agree(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all((a - b).abs().max() < 1e-10 for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """Six steps by one process with a plain model, never stopped."""
    return go_on(0, 1, "plain", str(tmp_path_factory.mktemp("straight")), 6)


def test_the_number_of_ranks_may_change_at_every_resume(
    four: Pool, pair: Pool, straight: list[torch.Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    four.run(go_on, "hsdp", str(out), 2)
    shutil.copytree(out, tmp_path / "by one")
    assert agree(go_on(0, 1, "plain", str(tmp_path / "by one"), 6), straight)
    pair.run(go_on, "fsdp", str(out), 4)  # ranks 2 and 3 leave old states behind
    pair.run(go_on, "replicas", str(out), 5)
    for answer in four.run(go_on, "fsdp", str(out), 6):
        assert agree(answer, straight)


def test_at_the_same_world_size_not_a_bit_changes(
    pair: Pool, straight: list[torch.Tensor], tmp_path: Path
) -> None:
    through = pair.run(go_on, "fsdp", str(tmp_path / "through"), 6)
    pair.run(go_on, "fsdp", str(tmp_path / "stopped"), 3)
    stopped = pair.run(go_on, "fsdp", str(tmp_path / "stopped"), 6)
    for first, second in zip(through, stopped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert agree(first, straight)
    written = load_file(tmp_path / "through" / "model.safetensors")
    for (name, _), parameter in zip(
        make_job("plain", 1).model.named_parameters(), through[0], strict=True
    ):
        assert torch.equal(written.pop(name), parameter)
    assert not written


def test_a_state_that_one_rank_lacks_is_passed_over_by_all(
    pair: Pool, straight: list[torch.Tensor], tmp_path: Path
) -> None:
    pair.run(go_on, "fsdp", str(tmp_path), 4)
    newest = tmp_path / "ranks" / "1" / "state-00000004-0000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    for answer in pair.run(go_on, "fsdp", str(tmp_path), 6):
        assert agree(answer, straight)


def test_a_rank_whose_directory_is_gone_is_named(pair: Pool, tmp_path: Path) -> None:
    pair.run(go_on, "fsdp", str(tmp_path), 2)
    shutil.rmtree(tmp_path / "ranks")
    with pytest.raises(StateError, match="rank 1 has no state of step"):
        go_on(0, 1, "plain", str(tmp_path), 3)


def least_bytes(rank: int, size: int, how: str) -> int:
    ranks = Ranks(Group(dist.group.WORLD))
    job = make_job(how, size)
    ranks.share(job.model)
    with pytest.raises(gf.BudgetInfeasible) as caught:
        gf.fit(job.model, job.optimizer, job.loss_fn, ranks.part(job.data[:BATCH]), memory=1)
    return caught.value.min_bytes


@pytest.mark.parametrize(
    ("how", "kill"),
    [
        ("fsdp", ("after 1-2", "after 1-2")),
        pytest.param(
            "replicas", ("before 2-1", "after 2-1"), marks=pytest.mark.slow
        ),  # while a window fills, alone
        ("replicas", ("after 3-1", "before 3-0")),  # one has gone further
    ],
)
def test_killed_in_the_middle_of_a_step(
    pair: Pool, straight: list[torch.Tensor], tmp_path: Path, how: str, kill: tuple[str, ...]
) -> None:
    # a few rows at a time
    steps, memory = 2 if how == "fsdp" else 4, max(pair.run(least_bytes, how))
    through = pair.run(go_on, how, str(tmp_path / "through"), steps, memory)
    out = tmp_path / "killed"
    pair.run(go_on, how, str(out), steps, memory, kill)
    shutil.copytree(out, tmp_path / "by one")
    killed = pair.run(go_on, how, str(out), steps, memory)
    for first, second in zip(through, killed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert agree(go_on(0, 1, "plain", str(tmp_path / "by one"), 6), straight)


def over_some_of_the_ranks(rank: int, size: int) -> str:
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("outer", "inner"))
    with pytest.raises(gf.MisuseError) as caught:
        Ranks(Group(dist.group.WORLD)).share(fully_shard(torch.nn.Linear(2, 2), mesh=mesh["inner"]))
    return str(caught.value)


def test_a_mesh_of_some_of_the_ranks_is_refused(pair: Pool) -> None:
    for text in pair.run(over_some_of_the_ranks):
        assert "over 1 ranks, the run has 2" in text


@pytest.mark.parametrize(
    "data", [["a", [2], [0]], ["w", [2], [1]], ["w", [2, 2], [0]], ["w", "x", [0]], ["w"]]
)
def test_a_piece_that_is_none_is_refused(data: Any) -> None:
    with pytest.raises(StateError):
        unflatten(json.loads(json.dumps({"$piece": data})), {"w": torch.ones(2)})
