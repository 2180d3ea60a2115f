"""Ctrl-C at any moment: nothing is half done, and the next step is right. Each kind of work in a
child of its own.
"""

from __future__ import annotations

import _thread
import copy
import gc
import itertools
import json
import operator
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import WHERE, AtLine, interrupted
from warm_process import run_warm

import gradfit as gf
from gradfit import interrupts as interrupts_module
from gradfit._torch_listen import DispatchMode, unseen
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.fitting import any_loop
from gradfit.interrupts import uninterrupted, when_gone
from gradfit.own_passes import owner_of
from gradfit.recompute import offload
from gradfit.tape import generators, process_settings
from gradfit.tape.recorder import is_recording
from gradfit.tape.values import Tape

# Python drops what is raised in a callback of a weak reference, of which torch's compiler has some
# for tensors of other tests: then the work just goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


KINDS = ("step", "fit", "profile", "audit", "scopes", "saves")


def interrupt(kind: str, count: int, seed: int) -> dict[str, Any]:
    script = Path(__file__).with_name("interrupts.py")
    done = run_warm([sys.executable, str(script), kind, str(count), str(seed)], timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_some_interrupts(kind: str) -> None:
    found = interrupt(kind, 4, 0)
    assert found["wrong"] == []
    assert found["interrupts"] == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_interrupts(kind: str) -> None:
    found = interrupt(kind, 340, 1)
    assert found["wrong"] == []
    assert found["interrupts"] == 340


def test_an_interrupt_waits_for_the_end_and_then_comes() -> None:
    done = []

    def two_blocks() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("beyond")

    with pytest.raises(KeyboardInterrupt):
        two_blocks()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Raised(Exception):
    """By a handler of the user's."""


def test_whatever_signal_has_a_handler_waits_and_all_of_them_come() -> None:
    done: list[str] = []

    def raises(number: int, frame: object) -> None:
        done.append(signal.Signals(number).name)
        raise Raised(number)

    def work() -> None:
        with uninterrupted():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGTERM):
                signal.raise_signal(number)
            done.append("all of it")

    numbers = (signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, raises) for number in numbers]
    try:
        with pytest.raises(Raised):
            work()
        assert [signal.getsignal(number) for number in numbers] == [raises, raises]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert done == ["all of it", "SIGTERM", "SIGALRM"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_in_an_update_that_cannot_be_taken_back_waits() -> None:
    """In a budget without room for a copy."""
    model = torch.nn.Linear(64, 64)

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if armed:
                signal.raise_signal(signal.SIGTERM)
                super().step()

    def raises(number: int, frame: object) -> None:
        raise Raised

    armed: list[int] = []
    optimizer = Interrupted(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    batch = torch.ones(8, 64)
    with pytest.raises(gf.BudgetInfeasible) as refused:
        gf.fit(model, optimizer, loss, batch, memory=1000)
    step = gf.fit(model, optimizer, loss, batch, memory=refused.value.min_bytes + 2048)
    step(batch)
    plain = copy.deepcopy(model)
    again = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss(plain, batch).backward()
    again.step()
    again.step()
    armed.append(1)
    before = signal.signal(signal.SIGTERM, raises)
    try:
        with pytest.raises(Raised):
            step(batch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert torch.equal(model.weight, plain.weight)


class _CtrlC(weakref.ref):  # type: ignore[type-arg]
    """Ctrl-C that comes while what this refers to dies, and not one line of Python runs."""

    __slots__ = ("send",)
    send: Callable[[], None]


class Dies:
    """To be referred to."""


def watched() -> tuple[Any, Callable[[], bool]]:
    done: list[int] = []
    owner = Dies()
    when_gone(owner, lambda: done.append(1))
    return owner, lambda: len(done) > 0


def tape() -> tuple[Any, Callable[[], bool]]:
    return Tape(), lambda: gc.get_threshold()[0] < 100_000


def file() -> tuple[Any, Callable[[], bool]]:
    one = offload._File()
    number = one.descriptor
    return one, lambda: not os.path.exists(f"/proc/self/fd/{number}")


@pytest.fixture
def no_other_tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that live in what other tests have left hold the collector back, too."""
    before = gc.get_threshold()
    monkeypatch.setattr(process_settings, "_patience", None)
    monkeypatch.setattr(process_settings, "_threshold", None)
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("no_other_tape")
@pytest.mark.parametrize("make", [watched, tape, file])
def test_ctrl_c_while_something_dies_comes_afterwards(make: Any) -> None:
    dies, is_done = make()
    sender = Dies()
    ctrl_c = _CtrlC(sender, operator.methodcaller("send"))
    ctrl_c.send = _thread.interrupt_main
    both = [dies, sender]  # a list lets go of its last first
    del dies, sender

    def let_go() -> None:
        both.clear()
        for _ in range(2000):
            time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        let_go()
    assert ctrl_c() is None
    assert is_done()


def test_what_outlives_the_interpreters_modules_is_no_work() -> None:
    """Their names are gone by then: it would end every such process with a traceback."""
    owner, done = Dies(), list[int]()
    when_gone(owner, lambda: done.append(1))
    del interrupts_module._watches[max(interrupts_module._watches)]
    assert not done
    del owner
    assert not done


def test_ctrl_c_while_a_generator_is_rewound_waits_and_leaves_no_lock() -> None:
    """It may come as soon as the lock is taken, before any `try` begins: then nobody would give it
    back.
    """
    before = torch.get_rng_state()
    lines = 0

    def rewind() -> None:
        with generators.Rewound() as rewound:
            rewound.start(
                (torch.default_generator, torch.Generator().manual_seed(3).get_state()), False
            )
            torch.rand(3)

    while True:
        lines += 1
        tracer = AtLine(lines)
        interrupted(rewind, tracer)
        assert not generators._global._is_owned(), lines  # type: ignore[attr-defined]
        assert torch.equal(torch.get_rng_state(), before), lines
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if tracer.lines < lines:
            break
    assert lines > 20


class Looks(DispatchMode):
    """Looks at each result, as audits do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with unseen():
            torch.isfinite(out)
        return out


def test_ctrl_c_at_every_line_while_a_mode_looks_leaves_autograd_on() -> None:
    weight = torch.ones(2, requires_grad=True)

    def look() -> None:
        with untouched(torch.nn.Identity()), Looks():
            weight.sin().sum()

    look()  # what is imported in the first call is half imported after an interrupt
    for line in itertools.count(1):
        moment = AtLine(line)
        interrupted(look, moment)
        assert weight.sin().requires_grad, WHERE[0]
        assert sys.exc_info()[0] is None, WHERE[0]
        assert owner_of(threading.get_ident()) is None, WHERE[0]
        if moment.lines < line:
            break
    assert line > 50


class Counts(torch.nn.Module):
    """Counts its calls in a buffer that it replaces."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> None:
        self.count = self.count + 1


def test_ctrl_c_at_every_line_of_a_trial_leaves_no_trace() -> None:
    """As `__exit__` begins, too, before its first line."""
    model = Counts()
    first = model.count

    def tried() -> None:
        with trials_end(), untouched(model), torch.no_grad():
            model()
            torch.rand(1)

    tried()
    drawn = torch.get_rng_state()
    for line in itertools.count(1):
        moment = AtLine(line)
        interrupted(tried, moment)
        assert model.count is first, WHERE[0]
        assert int(first) == 0, WHERE[0]
        assert torch.is_grad_enabled(), WHERE[0]
        assert torch.equal(torch.get_rng_state(), drawn), WHERE[0]
        if moment.lines < line:
            break
    assert line > 100


MODEL = torch.nn.Linear(2, 2)


@pytest.fixture
def few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither collections nor a budget look at what other tests have left."""
    monkeypatch.setattr(any_loop, "live_tensors", lambda: iter(()))
    gc.collect()
    gc.freeze()  # for good: thawed, all that is imported is looked through in later tests, too


def set_by_a_manager() -> tuple[Any, ...]:
    modules = torch.nn.modules.module
    return gc.get_threshold(), list(modules._global_forward_pre_hooks), is_recording()


def test_ctrl_c_while_a_manager_begins_leaves_nothing_on() -> None:
    """A `with` whose `__enter__` raises calls no `__exit__`."""
    manager = gf.CheckpointManager(max_memory_mb=64, auto_checkpoint=True)
    with manager:
        MODEL(torch.ones(2, 2)).sum().backward()
    before = set_by_a_manager()
    for line in itertools.count(1):
        moment = AtLine(line)
        came = interrupted(manager.__enter__, moment)
        if not came or "in __enter__" not in WHERE[0]:  # when it had returned
            manager.stop()
        assert set_by_a_manager() == before, WHERE[0]
        if moment.lines < line:
            break
    assert line > 20


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_while_a_budget_begins_leaves_none(every: int) -> None:
    """Nobody has the handle yet, by which it would be removed."""

    def hold() -> None:
        handles.append(gf.auto_checkpoint(MODEL, "1 GiB"))

    for line in itertools.count(1, every):
        handles: list[gf.MemoryBudget] = []
        moment = AtLine(line, at_returns=False)  # what a call gives back is not lost
        interrupted(hold, moment)
        for handle in handles:
            handle.remove()
        assert any_loop._thread.budgets is None, WHERE[0]
        if moment.lines < line:
            break
    assert line > 20


def test_ctrl_c_while_an_automatic_manager_is_made_leaves_no_hook_that_fails() -> None:
    def make() -> None:
        gf.CheckpointManager(max_memory_mb=64, auto_checkpoint=True)

    for line in itertools.count(1):
        moment = AtLine(line)
        interrupted(make, moment)
        MODEL(torch.ones(2, 2))
        if moment.lines < line:
            break
    gc.collect()  # managers that are not at work warn of backward passes as long as they are there
    assert line > 5
