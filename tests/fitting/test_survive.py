"""Memory that runs out in the middle of a step: the step is repeated tighter, and ends as if
nothing had happened.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_models import OPTIMIZERS, make, plain_peak, plain_steps, same_state, tokens

import gradfit as gf
from gradfit.tree import size_of_batch

Failure = Callable[[], BaseException]
FAILURES: dict[str, Failure] = {
    "accelerator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
}


_WITHOUT_MEMORY = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._has_compatible_shallow_copy_type.default,
)


class FailAt(TorchDispatchMode):
    """Fails at the n-th operation; counts them. Copying into what is there, and giving a tensor
    other data, allocate nothing, so they cannot fail.
    """

    def __init__(self, *at: int, failure: Failure = FAILURES["accelerator"]) -> None:
        super().__init__()
        self.at, self.failure = at, failure
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func not in _WITHOUT_MEMORY:
            self.count += 1
            if self.count in self.at:
                raise self.failure()
        return func(*args, **(kwargs or {}))


class Setting:
    """A fitted model, made anew for each fault with the plans of the first."""

    def __init__(self, name: str, optimizer: str, share: float) -> None:
        self.name, self.optimizer = name, optimizer
        self.budget = int(plain_peak(name, optimizer) * share)
        self.known: tuple[Any, ...] = ()
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        _, _, step, batch = self.fresh()
        self.known = step.known
        torch.manual_seed(7)
        with FailAt() as counted:
            step(batch)
        self.operations = counted.count

    def fresh(self) -> tuple[Any, Any, gf.TrainStep, Any]:
        model, batch, loss_fn = make(self.name)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        step = gf.fit(model, optimizer, loss_fn, batch, memory=self.budget, known=self.known)
        return model, optimizer, step, batch

    def plain(self, micro_batch: int) -> dict[str, torch.Tensor]:
        _, batch, _ = make(self.name)
        if micro_batch not in self.expected:
            self.expected[micro_batch] = plain_steps(
                self.name, self.optimizer, [batch, batch], [micro_batch] * 2
            )
        return self.expected[micro_batch]

    def survives(self, *at: int, failure: Failure = FAILURES["accelerator"]) -> None:
        model, optimizer, step, batch = self.fresh()
        torch.manual_seed(7)
        with FailAt(*at, failure=failure):
            result = step(batch)
        assert result.stepped, at
        assert result.attempts == 1 + len(at), at
        assert result.weight % size_of_batch(batch) == 0, at
        assert result.micro_batches == step.plan.steps, at
        with gf.meter(model, optimizer, batch) as live:
            assert step(batch).attempts == 1
        assert live.peak_bytes <= self.budget, at
        assert same_state(model, self.plain(step.plan.micro_batch)), at


@pytest.fixture(scope="module")
def gpt2() -> Setting:
    return Setting("gpt2", "adamw", 0.8)


def test_a_failure_anywhere_in_a_step(gpt2: Setting) -> None:
    points = random.Random(0).sample(range(1, gpt2.operations + 1), 10)
    for at in sorted({1, *points, gpt2.operations}):
        gpt2.survives(at)


@pytest.mark.parametrize("kind", FAILURES)
def test_every_way_of_saying_it(gpt2: Setting, kind: str) -> None:
    gpt2.survives(gpt2.operations // 2, failure=FAILURES[kind])


def test_several_failures_in_one_step(gpt2: Setting) -> None:
    third = gpt2.operations // 3
    gpt2.survives(third, 2 * third)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_failure_at_each_operation(name: str, optimizer: str) -> None:
    setting = Setting(name, optimizer, 0.8)
    for at in range(1, setting.operations + 1):
        setting.survives(at)


def test_running_statistics_are_put_back() -> None:
    setting = Setting("resnet", "sgd", 1.1)
    for at in (setting.operations // 4, setting.operations // 2, setting.operations - 1):
        setting.survives(at)


def test_where_nothing_helps_the_error_comes_out_and_nothing_has_changed(gpt2: Setting) -> None:
    model, optimizer, step, batch = gpt2.fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    with (
        FailAt(*range(20, 100_000)),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        step(batch)
    assert same_state(model, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step(batch).stepped


def test_another_error_is_the_callers(gpt2: Setting) -> None:
    model, _, step, batch = gpt2.fresh()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (
        FailAt(gpt2.operations // 2, failure=lambda: RuntimeError("shapes do not match")),
        pytest.raises(RuntimeError, match="shapes do not match"),
    ):
        step(batch)
    assert same_state(model, before)
    torch.manual_seed(7)
    assert step(batch).attempts == 1


def test_a_new_shape_that_fails_while_it_is_measured_leaves_the_window_clean(gpt2: Setting) -> None:
    model, _, step, batch = gpt2.fresh()
    # From there on: what only looks whether something could be done differently takes a failure for
    # a no.
    failing = FailAt(*range(30, 3000), failure=lambda: RuntimeError("not today"))
    with failing, pytest.raises(RuntimeError, match="not today"):
        step(tokens(16, 24))  # more rows than any plan is for
    torch.manual_seed(7)
    assert step(batch).stepped
    assert step(batch).stepped
    assert same_state(model, gpt2.plain(step.plan.micro_batch))


CAPPED = textwrap.dedent("""
    import json, resource, sys
    import torch
    import gradfit as gf

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[
        layer for _ in range(8)
        for layer in (torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1))
    ])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16384, 256)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    # Once below the cap everything that Python and the libraries load or set up once is there.
    other = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    some = batch[:64].clone()
    gf.fit(
        other, torch.optim.AdamW(other.parameters()), loss_fn, some, memory="5 MiB", plan_ahead=True
    )(some)
    from scipy import optimize, sparse  # which planning loads where memory is short
    budget = 96 << 20

    def data_bytes():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

    # What is there already holds the parameters and the batch, which the budget counts too.
    cap = data_bytes() + budget
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    if sys.argv[1] == "plain":
        loss_fn(model, batch).backward()
        optimizer.step()
        print(json.dumps({"stepped": True}))
    else:
        step = gf.fit(model, optimizer, loss_fn, batch, memory=budget)
        results = [step(batch) for _ in range(2)]
        print(json.dumps({
            "losses": [r.loss for r in results], "peak": max(r.peak_bytes for r in results),
            "attempts": [r.attempts for r in results], "plan": str(step.plan).splitlines()[0],
        }))
    """)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="reads what is in use from /proc"
)
def test_under_a_cap_of_the_system_plain_dies_and_fit_trains() -> None:
    def run(mode: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", CAPPED, mode]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=240, check=False
        )

    plain = run("plain")
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr
    fitted = run("fit")
    assert fitted.returncode == 0, fitted.stderr
    found = json.loads(fitted.stdout.splitlines()[-1])
    assert found["peak"] <= 96 << 20
    assert found["losses"][1] < found["losses"][0]
