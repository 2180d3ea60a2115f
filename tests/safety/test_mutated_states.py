"""States that were changed and given right checksums again are refused, or resumed; no raw error,
no crash.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from warm_process import run_warm

import gradfit as gf
from gradfit.errors import StateError
from gradfit.fitting.plan_state import read_plan, write_plan
from gradfit.runs import job_state
from gradfit.runs import state_files as state_module
from gradfit.runs.job import Job
from gradfit.runs.random_state import random_state, restore_random
from gradfit.runs.run_state import check_state
from gradfit.runs.state_codec import flatten, unflatten
from gradfit.runs.state_files import StateStore
from gradfit.runs.training_run import RunSettings, TrainingRun
from gradfit.state_checks import same_kind


def changed_states(count: int, seed: int) -> dict[str, object]:
    script = Path(__file__).with_name("mutated_states.py")
    done = run_warm([sys.executable, str(script), str(count), str(seed)], timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_some_changed_states() -> None:
    found = changed_states(40, 0)
    assert found["wrong"] == []
    assert found["states"] == 40


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_changed_states(seed: int) -> None:
    found = changed_states(400, seed)
    assert found["wrong"] == []
    assert found["states"] == 400


@pytest.mark.parametrize("pos", [9_999_999, -3, 625, "x", None])
def test_a_position_beyond_numpys_generator_is_refused(pos: object) -> None:
    """NumPy does not look, and reads past the end of its memory at the next draw."""
    state = random_state()
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state()
    state["numpy"]["pos"] = pos
    torch.rand(1)
    with pytest.raises(StateError, match="pos"):
        restore_random(state)
    assert np.random.get_state()[1].tolist() == before[0]
    assert random.getstate() == before[1]


def content(**changes: object) -> dict[str, object]:
    saved: dict[str, object] = {
        "step": 1,
        "settings": {"batch_size": 4, "memory_bytes": 10, "seed": 0, "steps": 3, "epochs": None},
        "place": {
            "data": {
                "kind": "rows", "rows": 8, "epoch": 0, "position": 4, "offset": 0, "at_start": None,
                "before_pending": None, "own": [],
            },
            "random": random_state(),
        },
        "progress": None,
        "accumulator": None,
        "ranks": 1,
        "job": {"model": {}, "extra": {}, "optimizer": {}, "scheduler": None},
        "plans": [],
    }  # fmt: skip
    return {**saved, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 10**30},
        {"step": "x"},
        {"step": True},
        {"ranks": 99_999_999},
        {"ranks": 0},
        {"plans": [{"plan": "[" * 100_000, "profile": "{}", "shape": [], "peak_bytes": 0}]},
        {"strange": 1},
    ],
)
def test_numbers_that_no_run_has_are_refused(changes: dict[str, object]) -> None:
    check_state(content())
    with pytest.raises(StateError):
        check_state(content(**changes))


@pytest.mark.parametrize(
    ("name", "value"), [("position", -5), ("position", 9), ("epoch", "x"), ("offset", 3)]
)
def test_places_that_no_data_have_are_refused(name: str, value: object) -> None:
    saved = content()
    saved["place"]["data"][name] = value  # type: ignore[index]
    with pytest.raises(StateError):
        check_state(saved)


def test_options_of_another_kind_are_refused() -> None:
    here = {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "maximize": False, "params": [0, 1]}
    same_kind("group", {**here, "lr": 1, "foreach": True}, here)
    for change in (
        {"lr": "x"},
        {"lr": None},
        {"lr": float("nan")},
        {"betas": (0.9,)},
        {"maximize": 0.1},
        {"params": [0]},
    ):
        with pytest.raises(StateError, match=next(iter(change))):
            same_kind("group", {**here, **change}, here)


# --------------------------------------------------------------- the writer has the reader's limits


def nested(depth: int) -> object:
    found: object = 1
    for _ in range(depth):
        found = {"deeper": [found]}
    return found


@pytest.mark.parametrize("case", ["deep", "long", "wide integer"])
def test_what_could_not_be_read_is_not_written(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(tmp_path)
    store.prepare()
    store.save({"step": 1}, step=1)
    monkeypatch.setattr(state_module, "_MAX_JSON_BYTES", 2000)
    cases = {"deep": nested(80), "long": ["x"] * 1000, "wide integer": 10**5000}
    with pytest.raises(StateError):
        store.save({"step": 1, "more": cases[case]}, step=1)
    saved = store.load()
    assert saved is not None
    assert saved.content == {"step": 1}
    assert saved.passed_over == ()


def test_whatever_is_written_is_read_again_at_every_depth() -> None:
    for depth in range(1, 70):
        try:
            data, tensors = flatten(nested(depth))
        except StateError:
            continue
        assert unflatten(json.loads(json.dumps(data)), tensors) == nested(depth)


def test_long_lists_are_tensors_in_the_file(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.prepare()
    large = {
        "floats": [0.1 * n for n in range(100_000)] + [float("inf")],
        "integers": list(range(-50_000, 50_000)),
        "tuple": tuple(range(5000)),
        "mixed": [1, 2.0, "x"] * 1000,
        "\ud800": torch.ones(2),
    }
    path = store.save(large, step=1)
    assert path.stat().st_size < 2**17
    saved = store.load()
    assert saved is not None
    assert {**saved.content, "\ud800": None} == {**large, "\ud800": None}
    assert type(saved.content["integers"][0]) is int


class Counting(torch.optim.SGD):
    """Its rate depends on attributes of its own."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, lr=0.1)  # type: ignore[arg-type]
        self.steps_taken, self.pace = 0, torch.ones(())

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps_taken += 1
        self.pace.mul_(0.9)
        for group in self.param_groups:
            group["lr"] = 0.1 * float(self.pace) / self.steps_taken
        super().step()


def test_an_optimizer_with_attributes_of_its_own_resumes(tmp_path: Path) -> None:
    def made(steps: int, folder: str) -> TrainingRun:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        job = Job(
            model,
            lambda m, x: m(x).square().mean(),
            torch.randn(32, 4),
            Counting(model.parameters()),
            8,
        )
        store = StateStore(tmp_path / folder, check_state)
        store.prepare()
        return TrainingRun(job, RunSettings(8, 2**20, steps=steps), store=store)

    whole, first = made(6, "whole"), made(3, "parts")
    whole.train()
    first.train()
    assert first.store is not None
    first.store.close()
    rest = made(6, "parts")
    assert rest.store is not None
    saved = rest.store.load()
    assert saved is not None
    rest.resume(saved)
    rest.train()
    assert rest.job.optimizer.steps_taken == 6  # type: ignore[attr-defined]
    assert torch.equal(rest.job.model.weight, whole.job.model.weight)  # type: ignore[arg-type]


def stepped_once() -> Job:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    job = Job(
        model,
        lambda m, x: m(x).square().mean(),
        torch.randn(32, 4),
        torch.optim.AdamW(model.parameters()),
        8,
    )
    job.loss_fn(model, job.data).backward()
    job.optimizer.step()
    return job


@pytest.mark.parametrize("count", [-3.0, -(2.0**100), 2.0**100, math.nan, math.inf])
def test_a_count_of_steps_that_no_optimizer_reaches_is_refused(count: float) -> None:
    """AdamW takes a power of it, and a raw OverflowError came in the first step after resuming."""
    job = stepped_once()
    state = copy.deepcopy(job_state.capture(job))
    job_state.check(job, state)
    state["optimizer"]["state"][0]["step"].fill_(count)
    with pytest.raises(StateError, match="step"):
        job_state.check(job, state)


def test_a_plan_without_one_of_its_numbers_is_refused() -> None:
    job = stepped_once()
    step = gf.fit(job.model, job.optimizer, job.loss_fn, job.data, "1 MiB")
    saved = write_plan(step.known[0], lambda record: record.to_json())
    # How much larger values may be follows from the budget of the step that takes it up.
    assert read_plan(saved) == dataclasses.replace(step.known[0], slack=1.0)
    for name in saved:
        without = {key: value for key, value in saved.items() if key != name}
        for other in (without, {**saved, name: "x"}, {**saved, name: None}):
            try:
                read_plan(other)
            except StateError:
                continue
            assert other.get(name) is None, name  # what a state of an earlier version may not have
            assert name not in ("plan", "profile", "shape", "peak_bytes", "steady")
