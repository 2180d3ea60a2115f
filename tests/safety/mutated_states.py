"""A child process in which states of a run are changed, given right checksums again, and resumed.

Each is either resumed, or refused with a `GradfitError`; nothing else may happen. Prints one JSON
line: how many were refused and resumed, and what was wrong (nothing). Called by
`test_mutated_states.py`:

    python mutated_states.py COUNT SEED
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gradfit as gf
from gradfit.distributed.launch import Ranks
from gradfit.runs.job import Job
from gradfit.runs.rank_states import RankStates
from gradfit.runs.state_files import _checksum, _sync_and_hash
from gradfit.runs.training_run import RunSettings, TrainingRun

torch.set_num_threads(1)
warnings.simplefilter("ignore")

SETTINGS = {"batch_size": 12, "memory_bytes": 34_000, "seed": 0, "steps": 3}
NONSENSE: list[Any] = [
    None, True, False, -1, 0, 1, 2, -5, 9999999, 10**30, -(10**30), 2**63, 0.5, -0.5, 1e308, "",
    "x", "inf", "\ud800", [], {}, [1], ["x"], {"x": 1}, {"$float": "nan"}, {"$float": "inf"},
    {"$float": "x"}, {"$tensor": "nowhere"}, {"$tuple": [1, 2]}, {"$tuple": 3}, {"$items": [[0,
    1]]}, {"$items": [1]}, {"$counter": [["a", "b"]]}, {"$numbers": "nowhere"}, {"$piece": ["x",
    [1], [0]]}, {"$unknown": 1}, "a" * 10_000,
]  # fmt: skip


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.steps_taken = 0

    def step(self, closure: Any = None) -> Any:
        self.steps_taken += 1
        return super().step(closure)


class Counted(nn.Module):
    """A module with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


class Noted(nn.Linear):
    """A module with extra state."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": [1, 2, 3]}

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError("extra state must be a dict")


def make_job(adam: bool) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.Dropout(0.3),
        nn.GELU(),
        nn.Linear(16, 16),
        Counted(),
        nn.GELU(),
        Noted(16, 3),
    )
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2) if adam else Counting(model.parameters())
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x, y = torch.randn(48, 20, 6), torch.randint(3, (48,))
    data: Any = (x, y) if adam else list(zip(x.split(7), y.split(7), strict=True))
    return Job(model, loss, data, optimizer, 12, scheduler=scheduler)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).mean(dim=1), batch[1])


class Ended(Exception):
    """The run is left here."""


def originals(folder: Path) -> list[tuple[bool, Path]]:
    """A state between two steps and one in the middle of a step, of two jobs."""
    made = []
    for adam in (True, False):
        for middle in (True, False):
            place = folder / f"{adam}-{middle}"
            store = RankStates(place, Ranks()).store
            store.prepare()
            run = TrainingRun(make_job(adam), RunSettings(**SETTINGS), store=store)
            run._is_due = lambda: True  # type: ignore[method-assign]
            between = run._between

            def leave(
                *args: Any, run: TrainingRun = run, between: Any = between, middle: bool = middle
            ) -> None:
                between(*args)
                if middle and run.step_number == 1:
                    raise Ended

            run._between = leave  # type: ignore[method-assign]
            with contextlib.suppress(Ended):
                run.train()
            store.close()
            newest = store.names()[0]
            for name in store.names()[1:]:
                for suffix in (".json", ".safetensors"):
                    (place / f"{name}{suffix}").unlink(missing_ok=True)
            assert middle == (not newest.endswith("0000")), newest
            made.append((adam, place / newest))
    return made


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in the JSON; plans are JSON in JSON."""
    found = [path] if path else []
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, item in items:
        found += paths(item, (*path, key))
    return found


def pick(data: Any, draw: random.Random) -> tuple[Any, ...]:
    """A place, each top-level field as often as another."""
    field = draw.choice(list(data))
    return draw.choice([path for path in paths(data) if path[0] == field])


def change(data: Any, path: tuple[Any, ...], draw: random.Random) -> None:
    for key in path[:-1]:
        data = data[key]
    old = data[path[-1]]
    # a plan, or its profile
    if isinstance(old, str) and old.startswith("{") and draw.random() < 0.9:
        inner = json.loads(old)
        if draw.random() < 0.1:
            data[path[-1]] = "[" * 100_000 + "]" * 100_000
        else:
            change(inner, draw.choice(paths(inner)), draw)
            data[path[-1]] = json.dumps(inner)
    elif draw.random() < 0.15:
        del data[path[-1]]
    elif isinstance(old, int) and draw.random() < 0.3:
        data[path[-1]] = draw.choice(
            [old + 1, old - 1, -old, old * 1000, 10**400 if draw.random() < 0.1 else old]
        )
    elif isinstance(data, dict) and draw.random() < 0.1:
        data["strange"] = draw.choice(NONSENSE)
    else:
        data[path[-1]] = copy.deepcopy(draw.choice(NONSENSE))


def change_tensor(tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    way = draw.randrange(6)
    if way == 0:
        del tensors[name]
    elif way == 1:
        tensors[name] = tensor.reshape(-1)[: max(0, tensor.numel() - 1)].clone()
    elif way == 2:
        tensors[name] = tensor.to(torch.float32 if tensor.dtype != torch.float32 else torch.int32)
    elif way == 3:
        tensors["strange"] = torch.ones(3)
    else:
        raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for _ in range(draw.choice([1, 8, 64])):
            if raw:
                raw[draw.randrange(len(raw))] = draw.randrange(256)
        tensors[name] = (
            torch.frombuffer(raw, dtype=tensor.dtype).reshape(tensor.shape) if raw else tensor
        )


def mutate(original: Path, target: Path, draw: random.Random) -> str:
    """A changed copy of a state, with right checksums; says what was changed."""
    target.parent.mkdir(parents=True)
    tensors = load_file(original.with_suffix(".safetensors"))
    body = json.loads(original.with_suffix(".json").read_text())
    del body["checksum"]
    said = []
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        if draw.random() < 0.25 and tensors:
            change_tensor(tensors, draw)
            said.append("tensors")
        else:
            path = pick(body["content"], draw)
            change(body["content"], path, draw)
            said.append(".".join(map(str, path)))
    save_file(tensors, target.with_suffix(".safetensors"))
    body["sha256"] = _sync_and_hash(target.with_suffix(".safetensors"))
    target.with_suffix(".json").write_text(json.dumps({**body, "checksum": _checksum(body)}))
    return " ".join(said)


def resume(adam: bool, folder: Path) -> str:
    states = RankStates(folder, Ranks())
    try:
        saved = states.load()
        assert saved is not None
        numbers = saved.content["settings"]
        run = TrainingRun(
            make_job(adam),
            RunSettings(**{**SETTINGS, "batch_size": numbers["batch_size"]}),
            store=states.store,
        )
        run.resume(saved, lambda: states.read_all_ranks(saved))
        run.settings = RunSettings(**{**SETTINGS, "steps": min(run.step_number + 1, 2**60)})
        states.store.prepare()
        run.train()
    except gf.errors.GradfitError:
        return "refused"
    finally:
        states.store.close()
    torch.rand(3), random.random(), np.random.rand(2000)  # where a bad generator would crash
    return "resumed"


def main(count: int, seed: int) -> None:
    draw, wrong = random.Random(f"states:{seed}"), list[str]()
    outcomes: collections.Counter[str] = collections.Counter()
    folder = Path(tempfile.mkdtemp())
    try:
        good = originals(folder)
        for adam, path in good:
            shutil.copytree(path.parent, folder / "copy")
            assert resume(adam, folder / "copy") == "resumed", path
            shutil.rmtree(folder / "copy")
        for number in range(count):
            adam, path = draw.choice(good)
            target = folder / "changed" / path.name
            what = mutate(path, target, draw)
            try:
                outcomes[resume(adam, target.parent)] += 1
            except BaseException:
                wrong.append(
                    f"{number} {adam} {path.parent.name}: {what}\n{traceback.format_exc()[-1500:]}"
                )
            shutil.rmtree(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"states": sum(outcomes.values()) + len(wrong), **outcomes, "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
