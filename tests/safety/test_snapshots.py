"""Whatever is tried, or fails, leaves a model as it was: buffers, attributes and what is in them,
modes, gradients, generators.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.batches.snapshot import Snapshot, untouched
from gradfit.profiling.trace import Trace, watching
from gradfit.tape import generators


class Restless(nn.Module):
    """Changes all it can in each forward: writes to a buffer, puts others in their places, adds
    one, counts.
    """

    reassigned: torch.Tensor
    written: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.register_buffer("reassigned", torch.zeros(()))
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("absent", None)
        self.calls = 0
        self.held: dict[str, Any] = {
            "list": [0],
            "queue": deque([1, 2], maxlen=2),
            "names": {1.0},
            "counter": Counter("ab"),
            "in order": OrderedDict(a=1, b=2),
        }
        self.generators = (
            torch.Generator(),
            np.random.default_rng(0),
            np.random.RandomState(0),
            random.Random(0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change_what_it_holds()
        self.reassigned = self.reassigned + 1
        self.written.add_(float(np.random.rand()))
        self.absent = torch.ones(2)
        self.calls += 1
        if not hasattr(self, "cached"):
            self.register_buffer("cached", torch.ones(4) * random.random())
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2)) * (1 + 0.01 * self.calls)

    def change_what_it_holds(self) -> None:
        own, numpys, old_numpys, pythons = self.generators
        self.noise = torch.rand(1, generator=own)
        drawn = numpys.random() + old_numpys.random()
        self.held["list"].append(drawn + pythons.random())
        self.held["queue"].append(drawn)
        self.held["names"].add(drawn)
        self.held["counter"].update("a")
        self.held["in order"].move_to_end("a")
        self.held["in order"]["c"] = drawn


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def state(model: nn.Module) -> dict[str, Any]:
    """Everything a forward of `Restless` may change, as values."""
    tensors = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {
        "tensors": {
            name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors.items()
        },
        "gradients": {
            name: None if g is None else (id(g), g.clone()) for name, g in gradients.items()
        },
        "modes": [module.training for module in model.modules()],
        "calls": getattr(model, "calls", None),
        "held": {name: [*items] for name, items in getattr(model, "held", {}).items()},
        "own generators": [*map(drawn_next, getattr(model, "generators", ()))],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "collector": gc.get_threshold(),
    }


def drawn_next(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(torch.rand(3, generator=generator.clone_state()))
    return repr(copy.deepcopy(generator).random())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


BATCH = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
LARGE = BATCH.repeat(10, 1)


def fitted() -> tuple[nn.Module, gf.TrainStep]:
    model = Restless()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gf.ExactnessWarning)
        step = gf.fit(
            model,
            torch.optim.AdamW(model.parameters()),
            loss_fn,
            LARGE,
            memory="24 KiB",
            exact=False,
        )
    assert step.plan.steps > 1
    return model, step


@pytest.mark.parametrize("what", ["profile", "predict", "fit", "audit", "curve", "infeasible"])
def test_what_is_tried_leaves_no_trace(what: str) -> None:
    from gradfit.report.curves import measure_curve

    model = Restless()
    optimizer = torch.optim.AdamW(model.parameters())
    if what not in ("fit", "infeasible"):  # which clear the gradients for their step
        loss_fn(model, BATCH).backward()
    before = state(model)
    calls: dict[str, Callable[[], object]] = {
        "profile": lambda: gf.profile(model, loss_fn, BATCH, optimizer),
        "predict": lambda: gf.profile(model, loss_fn, BATCH, optimizer, fake=True),
        "fit": lambda: fit_quietly(model, optimizer, "1 MiB"),
        "audit": lambda: gf.audit(model, loss_fn, BATCH),
        "curve": lambda: measure_curve(model, optimizer, loss_fn, BATCH),
        "infeasible": lambda: fit_quietly(model, optimizer, 4000),
    }
    calls[what]()
    assert same(state(model), before)


def fit_quietly(model: nn.Module, optimizer: Any, memory: int | str) -> object:
    try:
        return gf.fit(model, optimizer, loss_fn, BATCH, memory=memory)
    except gf.BudgetInfeasible as refused:
        return refused


def test_the_first_step_is_that_of_plain_pytorch() -> None:
    """Not one buffer or counter is further than it should be when training begins."""
    ours, plain = Restless(), Restless()
    step = gf.fit(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss_fn, BATCH, memory="1 MiB")
    assert step.plan.steps == 1
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model, update in (
        (ours, lambda: step(BATCH)),
        (plain, lambda: plain_step(plain, optimizer)),
    ):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        update()
        update()
        assert model.calls == 2
        assert float(model.reassigned) == 2
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_fn(model, BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()


class Stop(BaseException):
    """As KeyboardInterrupt: no `except Exception` catches it."""


@pytest.mark.parametrize("at", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_step_that_is_broken_off_has_not_happened(at: str, error: type[BaseException]) -> None:
    model, step = fitted()
    step(LARGE)
    before, optimizer_state = state(model), repr(step.optimizer.state_dict())
    hooks = {
        "forward": lambda: model.last.register_forward_hook(lambda *_: raises(error)),
        "backward": lambda: model.norm.weight.register_hook(lambda _: raises(error)),
        "optimizer": lambda: step.optimizer.register_step_post_hook(lambda *_: raises(error)),
    }
    handle = hooks[at]()
    with pytest.raises(error):
        step(LARGE)
    handle.remove()
    assert same(state(model), before)
    assert repr(step.optimizer.state_dict()) == optimizer_state
    assert step(LARGE).stepped


def raises(error: type[BaseException]) -> None:
    raise error("stop")


def test_after_a_batch_that_cannot_fit_the_next_one_steps() -> None:
    """A trial that dies in its backward pass is no half micro-batch of the window."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    batch = torch.randn(4, 8)
    step = gf.fit(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, memory="12 KiB"
    )
    with pytest.raises(gf.BudgetInfeasible):
        step(torch.randn(4, 4096, 8))
    assert step(batch).stepped


def test_leftover_gradients_are_no_part_of_a_step_nor_of_its_memory() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batch = torch.randn(64, 64)
    ours, optimizer = made()
    for parameter in ours.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    with gf.meter(ours, optimizer, batch) as live:
        step = gf.fit(ours, optimizer, loss_fn, batch, memory="300 KiB")
        for parameter in ours.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)
        live.reset_peak()
        step(batch)
    assert live.peak_bytes <= step.budget_bytes
    plain, optimizer = made()
    loss_fn(plain, batch).backward()
    optimizer.step()
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def test_plans_of_a_larger_budget_are_not_taken_over() -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(512, 16)
    large = gf.fit(model, optimizer, loss_fn, batch, memory="4 MiB")
    small = gf.fit(model, optimizer, loss_fn, batch, memory="200 KiB", known=large.known)
    with gf.meter(model, optimizer, batch) as live:
        small(batch)
    assert live.peak_bytes <= 200 * 1024


def test_rows_beyond_the_batch_are_refused() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(gf.MisuseError, match=r"rows=9 .* 8 rows"):
        gf.profile(model, loss_fn, torch.ones(8, 4), rows=9)
    assert gf.profile(model, loss_fn, torch.ones(8, 4), rows=8).batch_size == 8


def test_a_profile_whose_backward_fails_leaks_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient today")

    def failing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = model[1](model[0](x))
        hidden.register_hook(fail)
        return model[2](hidden).sum()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no gradient today"):
            gf.profile(model, failing, torch.ones(4, 8))
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Trace]


def test_an_interrupt_while_watching_begins_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = torch.nn.modules.module
    before = len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)
    model = nn.Linear(2, 2)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradfit.profiling.trace.after_accumulation", interrupted)
    with pytest.raises(KeyboardInterrupt), watching(model, 1.0):
        pass
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == before


def test_a_generator_that_cannot_be_read_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: object) -> None:
        raise RuntimeError("no state")

    rewound = generators.Rewound()
    with monkeypatch.context() as patched:
        patched.setattr(generators, "get_state", broken)
        with rewound, pytest.raises(RuntimeError, match="no state"):
            rewound.start((torch.default_generator, torch.get_rng_state()), takes_generator=False)
    import threading

    free: list[bool] = []

    def take_the_lock() -> None:
        free.append(generators._global.acquire(timeout=5))
        if free == [True]:
            generators._global.release()

    other = threading.Thread(target=take_the_lock)
    other.start()
    other.join()
    assert free == [True]


def test_a_recorder_that_cannot_begin_leaves_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfit.recompute.evict import Online

    online = Online(1 << 20)
    monkeypatch.setattr(online._recorder, "policy", None)
    monkeypatch.setattr(type(online._recorder), "__enter__", lambda _: raises(RuntimeError))
    with pytest.raises(RuntimeError, match="stop"):
        online.__enter__()
    counted = online.evictor.peak_bytes
    torch.ones(1000)
    assert online.evictor.peak_bytes == counted


def test_the_evictor_counts_tensors_in_lists() -> None:
    from gradfit.recompute.evict import Evictor

    parts = [torch.ones(256) for _ in range(8)]
    with Evictor(1 << 20) as evictor:
        joined = torch.cat(parts)
    assert evictor.current_bytes == joined.nbytes + sum(part.nbytes for part in parts)


def test_buffers_by_name_and_shared_ones() -> None:
    model = Restless()
    model.register_buffer("again", model.written)
    before = Snapshot(model)
    assert before.buffers.keys() == dict(model.named_buffers()).keys()
    with untouched(model):
        model(BATCH)
    assert model.again is model.written
    assert float(model.written.sum()) == 0


class Hooked(torch.nn.Module):
    """Sets a hook in its first forward and notes that it has, as models of transformers 5 do for
    hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.collected: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "is_hooked", False):
            self.linear.register_forward_hook(
                lambda module, args, out: self.collected.append(out.detach())
            )
            self.is_hooked = True
        self.collected.clear()
        result: torch.Tensor = self.linear(x)
        return result


def test_a_hook_that_a_trial_sets_goes_with_it() -> None:
    model = Hooked()
    with untouched(model):
        model(torch.ones(1, 2))
    assert not model.linear._forward_hooks
    model(torch.ones(1, 2))
    assert len(model.collected) == 1
    with untouched(model):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(model.collected) == 1


def test_an_object_of_another_kind_is_not_looked_into() -> None:
    """It may be a trainer, or the data."""

    class Trainer:
        def __init__(self) -> None:
            self.seen: list[int] = []

    model, trainer = nn.Linear(2, 2), Trainer()
    model.trainer = trainer  # type: ignore[assignment]
    with untouched(model):
        trainer.seen.append(1)
    assert trainer.seen == [1]


def test_the_gradient_of_a_tied_parameter_is_added_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    weight.grad = torch.full_like(weight, 2.0)
    before = Snapshot(model, [weight])
    before.clear_gradients()
    weight.grad = torch.ones_like(weight)
    before.add_gradients()
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(3, 6))])
def test_models_of_torchscript(make: Callable[[nn.Module], Any]) -> None:
    """Their tables of buffers are no dicts, and those of a traced model are another module's."""
    batch = torch.randn(12, 6)
    ends = []
    for fitted in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        plain.register_buffer("scale", torch.ones(3))
        model = make(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(batch).square().mean()
            return loss

        if fitted:
            step = gf.fit(model, optimizer, loss_fn, batch, memory=None, micro_batch=4)
            assert step(batch).micro_batches == 3
        else:
            loss_fn(model, batch).backward()
            optimizer.step()
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor)


def test_buffers_of_torchscript_are_put_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with untouched(model):
        model(BATCH)
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
