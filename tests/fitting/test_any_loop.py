"""A budget in loops that are not ours: held by the meter, and not a bit is changed."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops_of_others import LOOPS, adam, deep, state
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import gradfit as gf
from gradfit._torch import FakeTensorMode
from gradfit.fitting import any_loop
from gradfit.fitting.budget import live_tensors
from gradfit.planning.api import PlansInOnePiece

pytestmark = pytest.mark.exact


def meter() -> gf.Meter:
    """Of the memory that a budget is about: on an accelerator the host's is not counted."""
    device = torch.get_default_device()
    return gf.meter(device=None if device.type == "cpu" else device.type)


def generators() -> list[torch.Tensor]:
    """The states of the host's generator and of the device's."""
    device = torch.get_default_device()
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return [torch.get_rng_state(), *own]


def bytes_there() -> int:
    """Of all tensors that other tests have left behind: they are in the memory, too."""
    gc.collect()
    live = meter()
    for tensor in live_tensors():
        live.watch(tensor)
    return live.current_bytes


class Held:
    """What a run under a budget was like."""

    def __init__(self) -> None:
        self.handles: list[gf.MemoryBudget] = []

    @property
    def evictions(self) -> int:
        return max((handle.use.evictions for handle in self.handles), default=0)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def run(name: str, limit: int | None, way: str) -> tuple[list[torch.Tensor], int, int]:
    """What a loop has come to, with the generator's state; its peak, and how often something was
    dropped.
    """
    held = Held()
    torch.manual_seed(0)
    block: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if limit is not None and way == "block":
        block = gf.budget(limit)

    def hold(*models: nn.Module) -> None:
        if limit is not None and way == "handles":
            held.handles += [gf.auto_checkpoint(model, limit) for model in models]

    try:
        with meter() as live, block as entered:
            if entered is not None:
                held.handles.append(entered)
            found = LOOPS[name](hold)
            count = held.evictions
    finally:
        held.remove()
    return [*found, *generators()], live.peak_bytes, count


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert any_loop._thread.budgets is None
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_pre_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("way", ["handles", "block"])
@pytest.mark.parametrize("name", LOOPS)
def test_exact_and_held_or_refused(name: str, way: str) -> None:
    expected, peak, _ = run(name, None, way)
    held = 0
    for share in (1.05, 0.97, 0.9, 0.8, 0.7, 0.5):
        others = bytes_there()
        try:
            found, high, evictions = run(name, others + int(share * peak), way)
        except gf.BudgetInfeasible:
            assert share < 1
            break
        assert high <= share * peak
        assert same(found, expected)
        held += evictions > 0
    assert held >= 1


def test_a_model_has_nothing_of_ours_in_it() -> None:
    model = deep(layers=2)
    plain = deep(layers=2)
    with gf.auto_checkpoint(model, "1 GiB"):
        model(torch.randn(8, 48)).sum().backward()
        assert vars(model).keys() == vars(plain).keys()
        assert all(
            vars(one).keys() == vars(other).keys()
            for one, other in zip(model.modules(), plain.modules(), strict=True)
        )
        assert list(model.state_dict()) == list(plain.state_dict())
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert b"gradfit" not in pickle.dumps(model)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"gradfit" not in file.getvalue()
        twin = copy.deepcopy(model)
    twin(torch.randn(8, 48)).sum().backward()


def passes(model: nn.Module, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(128, 48)).square().mean().backward()
        optimizer.step()


def test_removed_between_forward_and_backward() -> None:
    def gradients(share: float | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        others = bytes_there()
        model = deep()
        evictions = 0
        with meter() as live:
            x = torch.randn(128, 48)
            handle = None if share is None else gf.auto_checkpoint(model, others + int(share))
            loss = model(x).square().mean()
            if handle is not None:
                evictions = handle.use.evictions
                handle.remove()
                handle.remove()  # which may be said twice
                assert not handle.is_active
                assert handle.use.evictions == evictions
            loss.backward()
        assert share is None or evictions > 0
        return state(model), live.peak_bytes

    expected, peak = gradients(None)
    assert same(gradients(0.6 * peak)[0], expected)


def test_removed_inside_a_forward() -> None:
    class Removes(nn.Module):
        handle: gf.MemoryBudget | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.handle is not None:
                self.handle.remove()
            return x

    def gradients(*, held: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        middle = Removes()
        model = nn.Sequential(deep(layers=2, out=48), middle, deep(layers=2))
        if held:
            middle.handle = gf.auto_checkpoint(model, "1 GiB")
        model(torch.randn(64, 48)).square().mean().backward()
        return state(model)

    assert same(gradients(held=True), gradients(held=False))


def test_only_forwards_with_gradients_are_recorded() -> None:
    model = deep(layers=2)
    with gf.auto_checkpoint(model, "1 GiB") as handle:
        with torch.no_grad():
            model(torch.randn(8, 48))
        with torch.inference_mode():
            model(torch.randn(8, 48))
        deep(layers=1)(torch.randn(8, 48))  # not this model's
        assert handle.use.forwards == 0
        model(torch.randn(8, 48))
        assert handle.use.forwards == 1


def test_what_the_budget_is_and_what_it_took_is_said() -> None:
    model = deep(layers=2)
    with gf.budget("1 GiB") as held:
        passes(model, 2)
        assert repr(held).startswith("<budget of 1 GiB, at work: peak ")
    assert held.use.budget_bytes == held.limit_bytes == 1 << 30
    assert held.use.forwards == 2
    assert "forwards: 2, values dropped: 0, 0 s to rebuild them" in str(held.use)
    assert held.plan is not None
    assert held.plan.keeps_everything
    assert held.plan.budget_bytes == 1 << 30


class Steps:
    """What a loop has come to, and what its budget was like in every step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.peak_bytes = 0
        self.uses: list[gf.BudgetUse] = []
        self.plans: list[gf.Plan | None] = []


def train(share: float, lengths: list[int], layers: int = 16) -> tuple[Steps, Steps]:
    """A loop without a budget, and below this share of its peak."""

    def run(limit: int | None) -> Steps:
        steps = Steps()
        torch.manual_seed(0)
        blocks = [(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)]
        model = nn.Sequential(*[part for block in blocks for part in block])
        optimizer = adam(model)
        with meter() as live:
            handle = None if limit is None else gf.auto_checkpoint(model, limit)
            for length in lengths:
                optimizer.zero_grad()
                model(torch.randn(length, 48)).square().mean().backward()
                optimizer.step()
                if handle is not None:
                    steps.uses.append(handle.use)
                    steps.plans.append(handle.plan)
            steps.found = [*state(model), *generators()]
            if handle is not None:
                handle.remove()
        steps.peak_bytes = live.peak_bytes
        return steps

    plain = run(None)
    others = bytes_there()
    return plain, run(others + int(share * plain.peak_bytes))


def test_from_the_second_forward_on_by_a_plan() -> None:
    plain, held = train(0.6, [256] * 6)
    assert same(held.found, plain.found)
    assert held.peak_bytes <= 0.6 * plain.peak_bytes
    assert [use.planned for use in held.uses] == [0, 1, 2, 3, 4, 5]
    assert all(plan is not None and "rebuild" in plan.actions for plan in held.plans)
    first, second, last = held.uses[0], held.uses[1], held.uses[-1]
    assert first.evictions > 0
    assert last.evictions - second.evictions < second.evictions  # the plan holds it by itself
    assert last.rebuilt_seconds > second.rebuilt_seconds
    assert last.planning_seconds > 0
    assert "(5 by a plan)" in str(last)


def test_a_plan_for_each_length() -> None:
    plain, held = train(0.7, [256, 128, 256, 192, 128, 256, 192, 128, 64])
    assert same(held.found, plain.found)
    assert held.peak_bytes <= 0.7 * plain.peak_bytes
    assert held.uses[-1].planned >= 4


def test_where_memory_is_not_short_the_plan_is_made_when_it_is_asked_for() -> None:
    model = deep(layers=2)
    with gf.budget("1 GiB") as held:
        before = held.plan
        assert before is None  # nothing has run yet
        passes(model, 3)
        assert held.use.planned == 0
        assert held.use.planning_seconds == 0
        plan = held.plan
        assert plan is not None
        assert plan.keeps_everything
        assert held.plan is plan
    assert held.plan is plan  # afterwards, too


def test_a_budget_ends_without_making_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than a step, Ctrl-C waits for it, and few look at it."""
    made: list[int] = []
    within = PlansInOnePiece.within

    def counting(self: PlansInOnePiece, *memory: int) -> gf.Plan:
        made.append(1)
        return within(self, *memory)

    monkeypatch.setattr(PlansInOnePiece, "within", counting)
    model = deep(layers=2)
    with gf.budget("1 GiB") as held:
        passes(model, 2)
    assert not made
    model = None  # type: ignore[assignment]
    plan = held.plan
    assert plan is not None
    assert plan.budget_bytes == 1 << 30
    assert held.plan is plan
    assert len(made) == 1


def test_a_forward_that_leaves_its_plan_goes_on_online() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(12)]
            self.layers, self.odd = nn.ModuleList(layers), nn.Linear(48, 48)

        def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.relu(self.odd(x)) if number == at else layer(x)
            return x

    def run(limit: int | None) -> tuple[list[torch.Tensor], int, int]:
        torch.manual_seed(0)
        model = Branches()
        optimizer = adam(model)
        with meter() as live, contextlib.ExitStack() as stack:
            handle = stack.enter_context(gf.budget(limit)) if limit is not None else None
            for at in (3, 3, 9, 3, 0, 9, 99, 3):
                optimizer.zero_grad()
                model(torch.randn(256, 48), at).square().mean().backward()
                optimizer.step()
            planned = 0 if handle is None else handle.use.planned
        return state(model), live.peak_bytes, planned

    expected, peak, _ = run(None)
    others = bytes_there()
    found, high, planned = run(others + int(0.7 * peak))
    assert same(found, expected)
    assert high <= 0.7 * peak
    assert planned > 0


def test_sequences_that_are_not_run_again_are_forgotten() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with gf.budget("1 GiB") as held:
        for rows in range(1, 40):
            model(torch.randn(rows, 8)).sum().backward()
        known = held._work.plans._known[model]  # type: ignore[union-attr]
        assert len(known) == 16


def test_a_block_is_entered_once_at_a_time() -> None:
    block = gf.budget("1 GiB")
    with block:
        with pytest.raises(gf.MisuseError, match="entered already"), block:
            pass
        assert block.is_active
    with block:
        pass


def test_the_smallest_of_several_holds() -> None:
    others = bytes_there()
    with gf.budget("1 GiB"), gf.budget(others + 4096):
        with pytest.raises(gf.BudgetInfeasible, match=r"the limit is .*gf\.fit\("):
            torch.zeros(4096)
        torch.zeros(8)
    with gf.budget("1 GiB"):
        torch.zeros(4096)


def test_the_budget_behind_an_error_is_the_smallest_that_was_found() -> None:
    model, x = deep(), torch.randn(128, 48)
    others = bytes_there()
    with gf.budget(others + 70_000), pytest.raises(gf.BudgetInfeasible) as caught:
        model(x).square().mean().backward()
    assert caught.value.min_bytes > others + 70_000
    model(x).square().mean().backward()  # nothing is limited any more


def test_what_is_there_already_is_above_the_budget() -> None:
    model = deep(layers=2)
    with pytest.raises(gf.BudgetInfeasible, match=r"there already take .*, the budget is 1 KiB"):
        gf.auto_checkpoint(model, "1 KiB")
    with pytest.raises(gf.BudgetInfeasible) as caught, gf.budget(1024):
        pass
    assert caught.value.min_bytes >= bytes_there()


def test_a_part_of_what_there_is() -> None:
    model = deep(layers=1)
    with gf.auto_checkpoint(model, "auto") as handle, gf.budget("auto") as block:
        assert min(handle.limit_bytes, block.limit_bytes) > 1 << 20
    half, whole = (gf.budget(part).limit_bytes for part in ("50%", "100%"))
    assert abs(2 * half - whole) <= 1


def test_a_smaller_budget_drops_what_an_open_graph_holds() -> None:
    model, x = deep(dropout=0.0), torch.randn(128, 48)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with gf.budget("1 GiB") as held:
        loss = model(x).square().mean()
        live = bytes_there()
        with gf.budget(live - 100_000):
            assert held.use.evictions > 0
            assert bytes_there() <= live - 100_000
        loss.backward()
    assert same([p.grad for p in model.parameters() if p.grad is not None], expected)


def test_a_refusal_holds_nothing_of_the_loop() -> None:
    def is_refused(room: int) -> bool:
        model = deep()
        loss: torch.Tensor | None = None
        try:
            with gf.budget(before + room):
                loss = model(torch.randn(128, 48)).square().mean()
                loss.backward()
        except gf.BudgetInfeasible:
            return loss is not None  # in the backward pass
        return False

    before = bytes_there()
    assert any(is_refused(room) for room in range(500_000, 100_000, -20_000))
    assert bytes_there() == before


@pytest.mark.parametrize("count", [1, 2])
def test_a_thread_has_budgets_of_its_own(count: int) -> None:
    def train(limit: int | None, found: list[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(8)]
        model = nn.Sequential(*layers)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        block: Any = contextlib.nullcontext()
        if limit is not None:
            block = gf.auto_checkpoint(model, limit)
            handles.append(block)
        with block:
            for _ in range(3):
                x = torch.randn(256, 48, generator=generator)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        found += state(model)

    handles: list[gf.MemoryBudget] = []
    expected: list[torch.Tensor] = []
    with meter() as live:
        train(None, expected)
    # what the other thread has at the beginning is counted, too
    limit = bytes_there() + int((0.7 if count == 1 else 1.7) * live.peak_bytes)
    results: list[list[torch.Tensor]] = [[] for _ in range(count)]
    threads = [threading.Thread(target=train, args=(limit, each)) for each in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found, expected) for found in results)
    assert all(handle.use.forwards == 3 for handle in handles)
    assert count > 1 or handles[0].use.evictions > 0


def test_a_model_that_dies_takes_its_budget_along() -> None:
    model = deep(layers=1)
    handle = gf.auto_checkpoint(model, "1 GiB")
    del model
    gc.collect()
    assert not handle.is_active


def test_what_is_remembered_does_not_grow_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradfit.recompute.evict._MANY", 100)
    model = deep(layers=2)
    with gf.budget("1 GiB") as held:
        passes(model, 40)
        evictor = held._work._evictor  # type: ignore[union-attr]
        assert len(evictor._held) < 400
        assert len(evictor._seconds) < 400
        assert len(evictor._used) < 2000


def test_a_compiled_model() -> None:
    def gradients(limit: int | None) -> tuple[list[torch.Tensor], int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*[deep(layers=2, out=48, dropout=0.0) for _ in range(3)])
        for place, part in enumerate(model):
            model[place] = torch.compile(part, backend="aot_eager")  # type: ignore[assignment]
        optimizer = adam(model)
        with meter() as live:
            handle = gf.auto_checkpoint(model, limit) if limit is not None else None
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(128, 48)).square().mean().backward()
                optimizer.step()
            dropped = 0 if handle is None else handle.use.evictions + handle.use.planned
            if handle is not None:
                handle.remove()
        return state(model), live.peak_bytes, dropped

    expected, peak, _ = gradients(None)
    found, _, dropped = gradients(1 << 30)
    assert same(found, expected)
    assert dropped == 0
    others = bytes_there()
    found, high, dropped = gradients(others + int(0.9 * peak))
    assert same(found, expected)
    assert high <= 0.9 * peak
    assert dropped > 0


def test_a_model_compiled_as_a_whole_is_the_same() -> None:
    def gradients(limit: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = deep(layers=2, dropout=0.0)
        compiled = torch.compile(model, backend="aot_eager")
        with contextlib.nullcontext() if limit is None else gf.auto_checkpoint(compiled, limit):
            for _ in range(2):
                compiled(torch.randn(64, 48)).square().mean().backward()
        return state(model)

    assert same(gradients(1 << 30), gradients(None))


def test_fake_tensors_have_no_memory() -> None:
    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    real = torch.empty(4)
    found = {id(one) for one in live_tensors()}
    assert id(real) in found
    assert id(fake) not in found


# ---------------------------------------------------------- inside of what others do with saves


@pytest.mark.parametrize("way", ["budget", "auto_checkpoint"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_inside_of_torchs_checkpoint(way: str, reentrant: bool) -> None:
    """torch pairs what is saved the second time with the first time's, by its order alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8, requires_grad=True)

    def block(t: torch.Tensor) -> torch.Tensor:
        return model(t.sin()).cos() * t.exp()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
        return [leaf.grad.clone() for leaf in (x, *model.parameters()) if leaf.grad is not None]

    expected = gradients()
    with gf.budget("1 GiB") if way == "budget" else gf.auto_checkpoint(model, "1 GiB"):
        assert same(gradients(), expected)
    assert len(expected) == 3


def test_hooks_of_somebody_else_are_given_what_they_are_given_without_a_budget() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8)
    saved: list[list[torch.Tensor]] = []
    for there in (contextlib.nullcontext(), gf.budget("1 GiB")):
        saved.append([])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved[-1].append(tensor.detach().clone()) or tensor.bfloat16(),
            lambda packed: packed.float(),
        )
        with there, hooks:
            model(x).sum().backward()
    assert saved[0]
    assert same(*saved)


def test_where_hooks_are_disabled_nothing_is_recorded() -> None:
    model, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).exp().sum(), x)
    disabled = torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")
    with gf.budget("1 GiB") as held, disabled:
        (found,) = torch.autograd.grad(model(x).exp().sum(), x)
    assert torch.equal(found, expected)
    assert held.use.forwards == 0


def test_torch_func_in_a_budget_is_refused_in_words() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda t: t.exp().sum())(x) * x

    x = torch.ones(3, requires_grad=True)
    words = r"torch\.func was used inside a block of gf\.budget"
    with pytest.raises(gf.UnsupportedOp, match=words), gf.budget("1 GiB"):
        Inner()(x)


class WithQueue(nn.Module):
    """Compares with what earlier batches have left, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
        )
        self.register_buffer("queue", torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.encode(x) @ (self.queue * 2).sin().T).tanh() @ self.queue.clone().exp()


@pytest.mark.parametrize("when", ["before the backward", "in the next forward", "elsewhere"])
def test_what_a_forward_has_read_may_be_written_to_before_its_backward(when: str) -> None:
    """Plain autograd has not saved it: only a replay reads it again."""

    def loop(limit: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model, x = WithQueue(), torch.randn(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = gf.budget(limit or 10**12)
        with held, gf.meter() as live:
            for _ in range(2):
                optimizer.zero_grad()
                y = model(x)
                if when == "in the next forward":
                    model.queue.mul_(0.9)
                    y = y + model(x)
                elif when == "before the backward":
                    model.queue[3:6] = y.detach()[3:6]
                else:
                    with torch.no_grad():
                        torch._foreach_mul_([x.clone(), model.queue], 0.9)
                (y + y.sin()).square().mean().backward()
                optimizer.step()
        assert live.peak_bytes <= held.use.peak_bytes
        return [p.grad.clone() for p in model.parameters()], held.use.peak_bytes  # type: ignore[union-attr]

    expected, high = loop(None)
    evictions = 0
    for share in (0.99, 0.97, 0.95, 0.9, 0.85):
        limit = int(high * share)
        with contextlib.suppress(gf.BudgetInfeasible):
            found, peak = loop(limit)
            assert peak <= limit
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            evictions += 1
    assert evictions


def test_what_a_lazy_module_has_not_made_yet_is_not_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())
    with gf.meter(model), gf.budget("1 GiB"):
        model(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
