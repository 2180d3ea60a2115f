"""Plans do with named values what was asked for, exactly as they predict; what cannot be is
refused.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_graphs import random_profile
from torch import Tensor, nn

import gradfit as gf
from gradfit.planning.named_choices import fix_by_name, fix_known_names
from gradfit.planning.simulate import simulate
from gradfit.planning.solver import FastSolver

WIDTH, ROWS = 32, 16
Model = nn.Module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = gf.name(self.qkv(x), "qkv").chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1)
        return x + self.down(gf.name(hidden, "mlp"))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        gf.name(x, "batch")
        for block in self.blocks:
            x = block(x)
        scaled = gf.name(x * 2, "written")
        return scaled.mul_(3)


def square(model: Model, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, 12, WIDTH)


@pytest.fixture(scope="module")
def profile() -> gf.Profile:
    return gf.profile(network(), square, rows(), host_bandwidth=1e9)


def actions(plan: gf.Plan, profile: gf.Profile, name: str) -> set[str]:
    return {plan.actions[value] for value in profile.names[name]}


def test_a_profile_knows_the_names(profile: gf.Profile) -> None:
    assert {name: len(values) for name, values in profile.names.items()} == {
        "batch": 0,
        "qkv": 3,
        "mlp": 3,
        "written": 1,
    }
    made_by = [profile.values[v].operation for v in profile.names["qkv"]]
    assert {profile.operations[op or 0].name for op in made_by} == {"aten.addmm.default"}
    assert gf.Profile.from_json(profile.to_json()) == profile


def test_a_profile_on_shapes_knows_the_names(profile: gf.Profile) -> None:
    predicted = gf.profile(network(), square, rows(), fake=True)
    assert list(predicted.names) == list(profile.names)
    assert len(predicted.names["qkv"]) == 3


CHOICES: list[dict[str, list[str]]] = [
    {"keep": ["qkv"]},
    {"rebuild": ["qkv"]},
    {"offload": ["mlp"]},
    {"keep": ["mlp"], "rebuild": ["qkv"]},
    {"keep": ["qkv", "batch"], "offload": ["mlp"]},
    {"rebuild": ["qkv", "mlp"]},
]


@pytest.mark.exact
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_a_plan_does_what_was_asked_for(
    profile: gf.Profile, choices: dict[str, list[str]], share: float
) -> None:
    """At the peak that it predicts, with the gradients of plain PyTorch."""
    everything = gf.plan(profile, memory="1 GiB").peak_bytes
    plan = gf.plan(profile, memory=int(share * everything), **choices)
    for action, names in choices.items():
        for name in names:
            assert actions(plan, profile, name) <= {action}
    assert [choice.name for choice in plan.named] == [n for ns in choices.values() for n in ns]
    assert f"fixed by name: {plan.named[0]}" in str(plan)
    assert gf.Plan.from_json(plan.to_json()) == plan

    model, batch = network(), rows()
    torch.manual_seed(2)
    square(model, batch).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):  # the second is not observed to its end
        torch.manual_seed(2)
        # on a device the budget is about its memory, and what is moved to the host is not there
        with gf.meter(model, batch, device=torch.get_default_device().type) as live:
            with gf.apply(model, plan):
                loss = square(model, batch)
            loss.backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
        model.zero_grad()
    assert live.peak_bytes <= plan.peak_bytes


def test_names_cost_what_they_say(profile: gf.Profile) -> None:
    """Rebuilding a name where there is room takes its bytes out of what is kept."""
    free = gf.plan(profile, memory="1 GiB")
    plan = gf.plan(profile, memory="1 GiB", rebuild=["qkv"])
    (choice,) = plan.named
    assert choice.nbytes == 3 * ROWS * 12 * 3 * WIDTH * 4
    assert free.kept_bytes - plan.kept_bytes == choice.nbytes
    assert plan.extra_seconds > 0


def test_only_named_values_are_moved_out(profile: gf.Profile) -> None:
    everything = gf.plan(profile, memory="1 GiB").peak_bytes
    # the least is 2 % above 0.6 on a device
    share = 0.6 if torch.get_default_device().type == "cpu" else 0.65
    plan = gf.plan(profile, memory=int(share * everything), offload=["mlp"])
    moved = {value for value, action in enumerate(plan.actions) if action == "offload"}
    assert moved == set(profile.names["mlp"])


def test_a_budget_that_names_do_not_allow_is_refused_with_their_bytes(profile: gf.Profile) -> None:
    everything = gf.plan(profile, memory="1 GiB").peak_bytes
    tight = int(0.5 * everything)
    gf.plan(profile, memory=tight)
    with pytest.raises(gf.BudgetInfeasible, match=r"Fixed by name: 'qkv' kept \(3 values") as said:
        gf.plan(profile, memory=tight, keep=["qkv", "mlp"])
    assert "without names the smallest is" in str(said.value)
    gf.plan(profile, memory=said.value.min_bytes, keep=["qkv", "mlp"])


def test_unknown_names_are_refused_with_those_there_are(profile: gf.Profile) -> None:
    with pytest.raises(gf.UnknownName, match=r"'nothing'.*There are 'batch', 'qkv', 'mlp'"):
        gf.plan(profile, memory="1 GiB", keep=["nothing"])
    unnamed = gf.profile(nn.Linear(4, 4), square, torch.ones(2, 4))
    with pytest.raises(gf.UnknownName, match="names no value"):
        gf.plan(unnamed, memory="1 GiB", keep=["qkv"])


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"keep": ["qkv"], "rebuild": ["qkv"]}, "in one of them"),
        ({"keep": ["written"]}, "written over in place"),
        ({"offload": ["written"]}, "written over in place"),
        ({"rebuild": ["batch"]}, "there all the time"),
        ({"keep": "qkv"}, r"keep=\['qkv'\]"),
        ({"keep": [1]}, r"keep\[0\]"),
    ],
)
def test_what_cannot_be_is_refused(
    profile: gf.Profile, choices: dict[str, Any], reason: str
) -> None:
    with pytest.raises(gf.MisuseError, match=reason):
        gf.plan(profile, memory="1 GiB", **choices)


def test_offloading_needs_a_bandwidth() -> None:
    without = gf.profile(network(), square, rows())
    with pytest.raises(gf.MisuseError, match="host_bandwidth"):
        gf.plan(without, memory="1 GiB", offload=["mlp"])


def test_two_names_of_one_value_must_agree() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = gf.name(self.layer(x), "all")
            gf.name(h[:, :2], "left")
            return torch.tanh(h)

    both = gf.profile(Twice(), square, torch.ones(2, 4))
    assert both.names["all"] == both.names["left"]
    gf.plan(both, memory="1 GiB", keep=["all", "left"])
    with pytest.raises(gf.MisuseError, match="the same value"):
        gf.plan(both, memory="1 GiB", keep=["all"], rebuild=["left"])


def test_what_cannot_be_replayed_cannot_be_rebuilt(profile: gf.Profile) -> None:
    operations = list(profile.operations)
    operation = profile.values[profile.names["mlp"][0]].operation
    assert operation is not None
    operations[operation] = dataclasses.replace(operations[operation], replayable=False)
    kept = dataclasses.replace(profile, operations=tuple(operations))
    with pytest.raises(gf.MisuseError, match="cannot be replayed"):
        gf.plan(kept, memory="1 GiB", rebuild=["mlp"])


def test_a_name_of_what_nothing_needs_changes_nothing(profile: gf.Profile) -> None:
    plan = gf.plan(profile, memory="1 GiB", rebuild=["written"])
    assert plan.keeps_everything
    assert "'written', which nothing needs after the forward" in str(plan)


def test_a_batch_in_parts(profile: gf.Profile) -> None:
    """Each micro-batch does it."""
    whole = gf.plan(profile, memory="1 GiB").peak_bytes
    plan = gf.plan(profile, memory=int(0.4 * whole), batch_size=ROWS, keep=["qkv", "mlp"])
    assert plan.steps > 1
    assert actions(plan, profile, "qkv") == {"keep"}


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.integers(2, 30))
def test_random_names_in_random_graphs(seed: int, size: int) -> None:
    """Every plan does what was asked for, within its budget, and could be run."""
    dice = random.Random(seed)
    free = random_profile(seed, size, bandwidth=50.0)
    made = [v for v, value in enumerate(free.values) if value.operation is not None]
    chosen = dice.sample(made, min(len(made), dice.randint(1, 4)))
    names = {f"value {v}": (v,) for v in chosen}
    free = dataclasses.replace(free, names=names)
    wanted = {name: dice.choice(["keep", "rebuild", "offload"]) for name in names}
    asked = fix_known_names(free, wanted).fixed  # what can be
    lists = {
        action: [name for name, one in asked.items() if one == action]
        for action in ("keep", "rebuild", "offload")
    }
    fixed = fix_by_name(free, asked)
    graph = fixed.at(1)
    solver = FastSolver(graph)
    least, most = solver.smallest().peak_bytes, solver.plain.peak_bytes
    for budget in {least, (least + most) // 2, most}:
        solution = solver.solve(budget)
        assert solution is not None
        assert solution.can_be_run
        assert solution.peak_bytes <= budget
        assert all(solution.actions[v] == action for v, action in fixed.fixed_actions.items())
        assert simulate(graph, solution.actions, solution.segments) == solution.simulation
        plan = gf.plan(free, memory=budget, **lists)
        assert plan.peak_bytes <= budget
        assert {(one.name, one.action) for one in plan.named} == set(asked.items())


def test_a_damaged_profile_is_refused(profile: gf.Profile) -> None:
    text = profile.to_json()
    with pytest.raises(gf.StateError, match="'qkv'"):
        gf.Profile.from_json(text.replace('"qkv": [', '"qkv": [99999, ', 1))
    with pytest.raises(gf.StateError, match="no choice"):
        gf.Profile.from_json(text.replace('"fixed": {}', '"fixed": {"qkv": "burn"}', 1))
