"""Where the optimizer's temporaries are what does not fit, its parameters are updated in groups:
the same bits, the budget held, one step to everybody who watches.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import signal
from typing import Any

import pytest
import torch
from test_survive import FailAt
from torch import nn

import gradfit as gf
from gradfit.fitting.grouped_step import GroupedStep, cut
from gradfit.fitting.plan_state import read_plan, write_plan
from gradfit.profiling.optimizer_bytes import optimizer_cost
from gradfit.profiling.update_groups import may_be_cut

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True},
            {"weight_decay": 0.1, "maximize": True}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    "AdamW": [{}, {"amsgrad": True}, {"lr": torch.tensor(0.01), "capturable": False}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "ASGD": [{"weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}, {}],
    "Rprop": [{}],
}  # fmt: skip
ALONE: dict[str, list[dict[str, Any]]] = {"Adafactor": [{}], "AdamW": [{"fused": True}]}
CASES = [
    (name, {**options, "foreach": foreach})
    for name, many in OPTIONS.items()
    for options in many
    for foreach in (True, False)
    if not (foreach and isinstance(options.get("lr"), torch.Tensor))
] + [(name, options) for name, many in ALONE.items() for options in many]
CASES += [("Adafactor", {"foreach": True})]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(5)
    shapes = [(6, 4), (4,), (3, 2, 2), (1,), (8, 8), (5,)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def give_gradients(all_parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in all_parameters:
        scale = 10.0 ** torch.randint(-6, 6, (), generator=generator).item()
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    all_parameters[1].grad = None if seed % 2 else all_parameters[1].grad


def make(name: str, options: dict[str, Any], of: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(of, **options)  # type: ignore[no-any-return]


def two_groups(all_parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": all_parameters[:2], "lr": 0.02}, {"params": all_parameters[2:]}]


@pytest.mark.parametrize("groups", [(1, 1, 1, 1, 1, 1), (2, 3, 1), (1, 1, 2)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_same_bits(name: str, options: dict[str, Any], groups: tuple[int, ...]) -> None:
    mine, theirs = parameters(), parameters()
    one, other = make(name, options, two_groups(mine)), make(name, options, two_groups(theirs))
    for seed in range(4):
        give_gradients(mine, seed)
        give_gradients(theirs, seed)
        with GroupedStep(one, groups):
            one.step()
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert repr(one.state_dict()) == repr(other.state_dict())
    assert [list(group) for group in one.param_groups] == [
        list(group) for group in other.param_groups
    ]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_a_way_takes_is_what_it_was_said_to(name: str, options: dict[str, Any]) -> None:
    mine = [nn.Parameter(torch.randn(size, 30)) for size in (90, 30, 60, 30, 10, 120)]
    optimizer = make(name, options, mine)
    give_gradients(mine, 0)
    optimizer.step()
    cost = optimizer_cost(optimizer)
    for way in cost.ways:
        with gf.meter(mine, optimizer, [p.grad for p in mine]) as live:
            before = live.current_bytes
            with GroupedStep(optimizer, way.groups or (6,)):
                optimizer.step()
        assert live.peak_bytes - before <= way.burst_bytes + 64 * len(mine)  # and a few numbers
    if options.get("foreach") and cost.burst_bytes > 40_000:
        assert cost.ways[-1].burst_bytes < 0.5 * cost.burst_bytes


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(48, 3))


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


BATCH = torch.randn(6, 48, generator=torch.Generator().manual_seed(1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def least() -> int:
    model = network()
    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, adam(model), loss_fn, BATCH, memory=1000)
    return refused.value.min_bytes


LEAST = least()
# between these lie what a step in groups needs and what it needs as the optimizer is set
SIZE = sum(p.nbytes for p in network().parameters())


def by_hand(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = adam(model)
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, BATCH).backward()
        optimizer.step()
    return model, optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("more", [0.0, 0.3, 0.5, 1.0, 2.9, 3.1, 3.3, 3.6, 5.0])
def test_a_budget_that_the_update_would_pass(more: float) -> None:
    budget = LEAST + int(more * SIZE)
    model = network()
    optimizer = adam(model)
    with gf.meter(model, optimizer, BATCH) as live:
        step = gf.fit(model, optimizer, loss_fn, BATCH, memory=budget, micro_batch="whole")
        torch.manual_seed(3)
        peaks = [step(BATCH).peak_bytes for _ in range(3)]
    assert max(*peaks, live.peak_bytes) <= budget
    expected, their_optimizer = by_hand()
    assert same(model, expected)
    assert repr(optimizer.state_dict()) == repr(their_optimizer.state_dict())
    # As it is set, the optimizer takes a copy of the parameters; and that beside a copy to go back.
    assert bool(step.plan.update_groups) == (more < 0.9 or 3 < more < 3.9)
    assert step.known[0].copied == (more > 3)
    said = f"update in {len(step.plan.update_groups)} groups of parameters"
    assert (said in str(step.plan)) == bool(step.plan.update_groups)
    assert gf.Plan.from_json(step.plan.to_json()) == step.plan


def test_the_smallest_budget_is_smaller_than_with_the_update_at_once() -> None:
    class Own(torch.optim.AdamW):
        """Nobody knows what else it does."""

    model = network()
    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, Own(model.parameters(), foreach=True), loss_fn, BATCH, memory=1000)
    assert refused.value.min_bytes - LEAST > 0.6 * SIZE


def test_hooks_schedulers_and_counters_see_one_step() -> None:
    model = network()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    own_groups = optimizer.param_groups
    seen: list[Any] = []

    def look(*_: Any) -> None:
        assert optimizer.param_groups is own_groups
        seen.append(len(optimizer.param_groups))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    step = gf.fit(model, optimizer, loss_fn, BATCH, memory=LEAST)
    assert step.plan.update_groups
    seen.clear()
    hooks = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    step(BATCH)
    assert seen == [1, 1]
    assert getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    assert optimizer._opt_called  # type: ignore[attr-defined]
    scheduler.step()
    step(BATCH)
    assert optimizer.param_groups is own_groups
    assert own_groups[0]["lr"] == 0.005
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
    now = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    assert now == hooks


@pytest.mark.parametrize("roomy", [True, False])
def test_memory_that_runs_out_between_two_groups(roomy: bool) -> None:
    """With a copy the step is repeated; without, it is whole or refused, and never half done
    silently.
    """
    budget = LEAST + (int(3.3 * SIZE) if roomy else 0)
    known: Any = ()
    expected, their_optimizer = by_hand(2)
    state = repr(their_optimizer.state_dict())
    refused = 0
    for at in (30, 75):
        model = network()
        optimizer = adam(model)
        step = gf.fit(model, optimizer, loss_fn, BATCH, memory=budget, known=known,
                      micro_batch="whole")  # fmt: skip
        known = step.known
        assert known[0].plan.update_groups
        torch.manual_seed(3)
        step(BATCH)
        with FailAt() as mode:
            hook = optimizer.register_step_pre_hook(
                lambda *_, mode=mode, at=at: setattr(
                    mode, "at", mode.at or (mode.count + at, mode.count + at + 1)
                )
            )
            try:
                step(BATCH)
            except gf.StateError:
                refused += 1
            else:
                assert same(model, expected)
                assert repr(optimizer.state_dict()) == state
        hook.remove()
        assert len(optimizer.param_groups) == 1
    assert bool(refused) == (not roomy)


def test_an_interrupt_between_two_groups_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = adam(model)
    budget = LEAST + int(3.3 * SIZE)
    step = gf.fit(model, optimizer, loss_fn, BATCH, memory=budget, micro_batch="whole")
    assert step.plan.update_groups
    assert step.known[0].copied
    torch.manual_seed(3)
    step(BATCH)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    own_groups = optimizer.param_groups
    addcdiv, calls = torch._foreach_addcdiv_, [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            signal.raise_signal(signal.SIGINT)
        return addcdiv(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_addcdiv_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(BATCH)
    assert optimizer.param_groups is own_groups
    assert repr((model.state_dict(), optimizer.state_dict())) == repr(before)
    torch.set_rng_state(generator)
    step(BATCH)
    assert same(model, by_hand(2)[0])


def test_optimizers_of_others_are_not_cut() -> None:
    class Global(torch.optim.AdamW):
        """Its rate depends on all gradients."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            norm = sum(float(p.grad.norm()) for p in self.param_groups[0]["params"])
            self.param_groups[0]["lr"] = 0.1 / (1 + norm)
            return super().step(closure)

    model = network()
    assert optimizer_cost(Global(model.parameters(), foreach=True)).ways == ()
    replaced = adam(model)
    step = replaced.step
    replaced.step = lambda *args: step(*args)  # type: ignore[method-assign]
    assert optimizer_cost(replaced).ways == ()
    assert not may_be_cut(replaced, (1, 1))
    assert may_be_cut(replaced, ())


def test_plans_of_another_optimizer_are_not_gone_by() -> None:
    model = network()
    grouped = gf.fit(model, adam(model), loss_fn, BATCH, memory=LEAST)
    assert grouped.plan.update_groups

    class Own(torch.optim.AdamW):
        pass

    with pytest.raises(gf.BudgetInfeasible):
        gf.fit(model, Own(model.parameters(), foreach=True), loss_fn, BATCH, memory=LEAST,
               known=grouped.known)  # fmt: skip


def test_a_sparse_gradient_is_refused_before_the_update() -> None:
    table = nn.Parameter(torch.randn(9, 4))
    other = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.Adagrad([table, other], foreach=True)
    nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()
    other.grad = torch.ones(4)
    with GroupedStep(optimizer, (1, 1)), pytest.raises(gf.MisuseError, match="is sparse"):
        optimizer.step()
    assert optimizer.state[other]["step"].item() == 0 if optimizer.state else True
    assert len(optimizer.param_groups) == 1
    model = nn.Sequential(nn.Embedding(20, 16, sparse=True), nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), foreach=True)
    step = gf.fit(
        model, optimizer, lambda m, x: m(x).square().mean(), torch.arange(8), memory="1 MiB"
    )
    assert step.profile.update_ways == ()


def test_a_saved_plan_is_read_and_checked() -> None:
    model = network()
    tested = gf.fit(model, adam(model), loss_fn, BATCH, memory=LEAST).known[0]
    saved = json.loads(json.dumps(write_plan(tested, lambda record: record.to_json())))
    again = read_plan(saved)
    assert again.plan == tested.plan
    assert again.profile.update_ways == tested.profile.update_ways
    wrong = dataclasses.replace(tested, plan=dataclasses.replace(tested.plan, update_groups=(1, 7)))
    with pytest.raises(gf.StateError, match="2 groups"):
        read_plan(json.loads(json.dumps(write_plan(wrong, lambda record: record.to_json()))))


def test_parameters_that_were_added_since_are_updated_alone() -> None:
    groups = [{"params": [1, 2, 3], "lr": 1}, {"params": [4, 5]}]
    assert [one["params"] for one in cut(groups, (2, 1, 2))] == [[1, 2], [3], [4, 5]]
    assert [one["params"] for one in cut(groups, (3,))] == [[1, 2, 3], [4], [5]]
    assert [one.get("lr") for one in cut(groups, (2,))] == [1, 1, None, None]


def test_an_estimate_lists_it() -> None:
    model = network()
    found = gf.estimate(model, loss_fn, BATCH, adam(model), hardware="t4")
    lever = next(one for one in found.levers if one.name.startswith("the update in"))
    assert lever.peak_bytes < found.peak_bytes
    assert lever.how == "fit(...)"


def test_a_scaler_steps_once() -> None:
    model = network()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    step = gf.fit(model, optimizer, loss_fn, BATCH, memory=LEAST + 4096, scaler=scaler, clip=0.01)
    assert step.plan.update_groups
    for _ in range(2):
        assert step(BATCH).stepped
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
