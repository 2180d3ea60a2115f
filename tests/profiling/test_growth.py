"""What a profile and a plan do grows as the model does: counted in operators and simulated
operations, not seconds.
"""

from __future__ import annotations

import cProfile
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from warm_process import run_warm

import gradfit as gf
from gradfit import tree
from gradfit.batches import runner
from gradfit.batches.runner import run_part
from gradfit.planning.simulate import Simulator
from gradfit.profiling import sampled_sizes, traced_seconds
from gradfit.profiling.profile import Linear
from gradfit.profiling.trace import Trace
from gradfit.tree import leaves, size_of_batch, split_batch, unmarked


class _Chain(nn.Module):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.weight = rounds, nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = torch.sin(x * self.weight)
        return x


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operators a profile has watched."""
    count = [0]
    hear = Trace._observe

    def counting(self: Trace, func: Any, args: Any, kwargs: Any) -> Any:
        count[0] += 1
        return hear(self, func, args, kwargs)

    monkeypatch.setattr(Trace, "_observe", counting)
    return count


@pytest.mark.parametrize("memory", [None, 1 << 16])
def test_a_profile_watches_as_much_per_operation_however_many_there_are(
    watched: list[int], memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if every pass took long: how often and at how many sizes is then not the clock's choice
    monkeypatch.setattr(traced_seconds, "_ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(sampled_sizes, "_LONG_SECONDS", 0.0)
    per_operation = []
    for rounds in (600, 1200):
        watched[0] = 0
        found = gf.profile(_Chain(rounds), _loss, torch.rand(8, 4), memory_bytes=memory)
        per_operation.append(watched[0] / len(found.operations))
    assert per_operation[1] < 1.1 * per_operation[0]
    # of six runs, each a forward, a replay and a backward of two operators
    assert per_operation[1] < 60


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations were simulated."""
    count = [0]
    run = Simulator.run

    def counting(self: Simulator, *args: Any, **options: Any) -> Any:
        result = run(self, *args, **options)
        count[0] += len(self.graph.op_inputs) + sum(result.replays)
        return result

    monkeypatch.setattr(Simulator, "run", counting)
    return count


def test_a_plan_simulates_as_much_per_operation_however_many_there_are(
    simulated: list[int],
) -> None:
    per_operation = []
    for rounds in (200, 800):
        profile = gf.profile(_Chain(rounds), _loss, torch.rand(8, 4))
        kept = gf.plan(profile, memory="1 GiB")
        simulated[0] = 0
        gf.plan(profile, memory=kept.peak_bytes - kept.kept_bytes // 2)
        per_operation.append(simulated[0] / len(profile.operations))
    assert per_operation[1] < 1.5 * per_operation[0]


def _small_layers(number: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(number)])


def test_a_budget_that_layers_cannot_hold_is_refused_after_as_much_for_each_of_them(
    simulated: list[int],
) -> None:
    """Of blocks that repeat, pieces are cut alike and solved once, however many there are."""
    per_operation = []
    for layers in (300, 600):
        profile = gf.profile(_small_layers(layers), _loss, torch.rand(8, 4))
        kept = gf.plan(profile, memory="1 GiB")
        simulated[0] = 0
        with pytest.raises(gf.BudgetInfeasible):
            gf.plan(profile, memory=kept.peak_bytes // 2)
        per_operation.append(simulated[0] / len(profile.operations))
    assert per_operation[1] < 1.15 * per_operation[0]
    assert per_operation[1] < 300


def test_the_seconds_of_a_profile_do_not_decide_how_much_is_simulated(
    simulated: list[int],
) -> None:
    """As if the machine had been busy: each operation's seconds are multiplied by chance."""
    measured = gf.profile(_small_layers(150), _loss, torch.rand(8, 4))
    budget = gf.plan(measured, memory="1 GiB").peak_bytes // 2
    work = []
    for profile in (measured, *(_disturbed(measured, random.Random(seed)) for seed in range(3))):
        simulated[0] = 0
        with pytest.raises(gf.BudgetInfeasible):
            gf.plan(profile, memory=budget)
        work.append(simulated[0])
    assert all(0.9 * work[0] < one < 1.1 * work[0] for one in work)


def _disturbed(profile: gf.Profile, chance: random.Random) -> gf.Profile:
    operations = [
        replace(op, seconds=Linear(op.seconds.at(8) * chance.lognormvariate(0, 2)))
        for op in profile.operations
    ]
    return replace(
        profile,
        operations=tuple(operations),
        record_overhead_seconds=profile.record_overhead_seconds * chance.lognormvariate(0, 2),
        replay_overhead_seconds=profile.replay_overhead_seconds * chance.lognormvariate(0, 2),
    )


def test_less_memory_than_any_plan_can_hold_is_not_searched_for(simulated: list[int]) -> None:
    profile = gf.profile(_small_layers(50), _loss, torch.rand(1, 4))
    simulated[0] = 0
    # most of its peak are gradients: no plan has a twentieth less
    assert gf.plan(profile, memory="1 GiB").less_memory is None
    assert simulated[0] == len(profile.operations)


def _calls(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many Python functions are called, but for what a default device does: that is a mode of
    torch's, asked for each call of torch, and nobody who trains needs one.
    """
    watch = cProfile.Profile(builtins=False)
    watch.enable()
    try:
        result = run()
    finally:
        watch.disable()
    ours = (one for one in watch.getstats() if one.code.co_filename != torch.utils._device.__file__)
    return sum(one.callcount for one in ours), result


def _first(model: nn.Module, batch: Any) -> torch.Tensor:
    return _loss(model, batch["x"])


def _operations(size: int) -> tuple[nn.Module, Any]:
    return _Chain(size // 2), {"x": torch.rand(8, 4)}


def _layers(size: int) -> tuple[nn.Module, Any]:
    layers = [nn.Linear(4, 4) for _ in range(size // 4)]
    return nn.Sequential(*layers), {"x": torch.rand(8, 4)}


def _strings(size: int) -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), {"x": torch.rand(10 * size, 4), "text": ["word"] * (10 * size)}


def _tensors(size: int) -> tuple[nn.Module, Any]:
    return nn.Linear(4, 4), {"x": torch.rand(8, 4), "more": [torch.rand(8) for _ in range(size)]}


@pytest.mark.parametrize("make", [_operations, _layers, _strings, _tensors])
def test_fit_and_a_step_call_as_much_for_each_of_what_there_is(
    make: Callable[[int], tuple[nn.Module, Any]],
) -> None:
    fits, steps = [], []
    for size in (100, 400):
        torch.manual_seed(1)  # of other weights a deep chain's loss may be 0, and is asked more
        model, batch = make(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        calls, step = _calls(lambda: gf.fit(model, optimizer, _first, batch, memory="1 GiB"))  # noqa: B023
        fits.append(calls / size)
        for _ in range(3):
            step(batch)
        steps.append(_calls(lambda: step(batch))[0] / size)  # noqa: B023
    assert fits[1] < 1.1 * fits[0]
    assert steps[1] < 1.1 * steps[0]


def test_a_profile_cuts_each_tensor_of_a_batch_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [0]
    take = tree._take

    def counting(*args: Any) -> Any:
        cuts[0] += 1
        return take(*args)

    monkeypatch.setattr(tree, "_take", counting)
    model, batch = _tensors(10)
    gf.profile(model, _first, batch)
    # three sizes to measure, one of which is for tiles, too, and rows by which it is seen whether
    # parts make the whole: three of them, and two parts, of which each is cut once
    assert cuts[0] <= 6


def test_a_profile_asks_the_tensors_of_a_batch_a_few_times_for_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"writes": 0, "rows": 0}

    def count(name: str, module: Any, function: str) -> None:
        original = getattr(module, function)

        def counting(*args: Any) -> Any:
            asked[name] += 1
            return original(*args)

        monkeypatch.setattr(module, function, counting)

    count("writes", runner, "counted_writes_of")
    count("rows", tree, "_rows_of_tensors")
    model, batch = _tensors(10)
    gf.profile(model, _first, batch)
    assert asked["writes"] <= 2 * 3  # before and after the first pass of each size
    assert asked["rows"] <= 2  # of the batch alone


def test_a_loss_that_changes_its_batch_is_refused_by_a_profile() -> None:
    model, batch = _tensors(2)

    def changes(model: nn.Module, batch: Any) -> torch.Tensor:
        batch["x"].mul_(1.0)
        return _first(model, batch)

    with pytest.raises(gf.MisuseError, match="changed the batch"):
        gf.profile(model, changes, batch)


def test_each_run_has_the_same_views_in_containers_of_its_own() -> None:
    model, batch = _tensors(2)
    step = sampled_sizes.MeasuredStep(model, _first, batch, None, None)
    sampler = sampled_sizes.SizeSampler(step, 8, float("inf"), gf.meter)
    first = sampler.part(4)
    taken = first.pop("x")
    assert sampler.part(4)["x"] is taken
    taken.requires_grad_()
    assert not sampler.part(4)["x"].requires_grad


def test_walking_a_list_of_tensors_calls_nothing_of_pythons_for_each() -> None:
    batch = {"x": torch.rand(8, 4), "more": [torch.rand(8) for _ in range(1000)]}
    for walk in (size_of_batch, unmarked, leaves):
        assert _calls(lambda: walk(batch))[0] < 100  # noqa: B023
    assert _calls(lambda: next(split_batch(batch, 2)))[0] < 1100  # one for each that is cut


def test_walking_many_small_dicts_calls_little_for_each() -> None:
    samples = [{"a": torch.rand(8), "b": "word"} for _ in range(1000)]
    batch = {"x": torch.rand(8, 4), "more": samples}
    for walk, most in ((size_of_batch, 9), (unmarked, 4), (lambda nest: [*leaves(nest)], 6)):
        assert _calls(lambda: walk(batch))[0] < 1000 * most  # noqa: B023


def test_that_a_batch_was_not_changed_is_asked_without_a_call_for_each_tensor() -> None:
    model, batch = _tensors(1000)
    assert _calls(lambda: run_part(_first, model, batch))[0] < 200


# In a thread of little stack, so that few nodes are enough, with bounds that are as much smaller:
# with a stack as it usually is, it is some 30,000 nodes.
_LONG_GRAPHS = """
import threading
import torch
from torch import nn
from warm_process import run_warm
import gradfit as gf
from gradfit.batches import denominator

denominator._LONGEST_WAY = 350

def of_many_operations(model, x):
    y = model(x)
    for _ in range(2500):
        y = torch.sin(y)
    return y.square().mean()

def of_many_numbers(model, x):
    y = model(x).square().mean()
    for _ in range(2500):
        y = y * 1.0
    return y

def run(loss_fn, memory):
    model = nn.Linear(4, 4)
    profile = gf.profile(model, loss_fn, torch.rand(2, 4), memory_bytes=memory)
    print(len(profile.operations) >= 2500)

threading.stack_size(256 * 1024)
for loss_fn in (of_many_operations, of_many_numbers):
    for memory in (None, 700_000):
        thread = threading.Thread(target=run, args=(loss_fn, memory))
        thread.start()
        thread.join()
"""


def test_a_graph_of_many_nodes_is_watched_and_freed(tmp_path: Path) -> None:
    """Nodes that Python has seen free each other, one inside of the other, until the stack is full:
    then the process dies.
    """
    program = tmp_path / "long_graphs.py"
    program.write_text(_LONG_GRAPHS)
    done = run_warm([sys.executable, str(program)])
    assert done.stdout.split() == ["True"] * 4, done.stderr[-2000:]
