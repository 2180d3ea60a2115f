"""Values that a thread writes to a file and reads back beside computation: the same gradients, and
nothing left behind whatever goes wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from waiting import eventually

import gradfit as gf
from gradfit.planning.recording_extent import in_effect, operations_recorded
from gradfit.planning.simulate import ACTION_NAMES, KEEP, OFFLOAD, REBUILD, Simulator
from gradfit.recompute import copying_thread, offload
from gradfit.recompute.offload import Store


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, wanted, strict=True)
    )


# ------------------------------------------------------------------------ a model that moves values


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks), torch.randn(64, 32)


def moving_plan(model: nn.Module, batch: Tensor) -> gf.Plan:
    """Everything that can be moved out is."""
    profile = gf.profile(model, square, batch, host_bandwidth=1e9)
    base, graph = gf.plan(profile, memory="1 GiB"), profile.at(len(batch), accumulates=False)
    actions = [
        OFFLOAD if op >= 0 and keepable and last >= 0 else REBUILD if unkeepable else KEEP
        for op, keepable, unkeepable, last in zip(
            graph.producer, graph.keepable, graph.unkeepable, graph.last_need, strict=True
        )
    ]
    simulator = Simulator(graph)
    actions = in_effect(actions, simulator.alive_until(actions))
    assert actions.count(OFFLOAD) > 5
    return dataclasses.replace(
        base,
        actions=tuple(
            "external" if op < 0 else ACTION_NAMES[action]
            for action, op in zip(actions, graph.producer, strict=True)
        ),
        heard=operations_recorded(graph, actions),
        peak_bytes=simulator.run(actions).peak_bytes,
    )


def after_plain(model: nn.Module, batch: Tensor) -> list[Tensor | None]:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    torch.manual_seed(5)
    square(plain, batch).backward()
    return gradients(plain)


def forward(model: nn.Module, plan: gf.Plan, batch: Tensor) -> Tensor:
    torch.manual_seed(5)
    with gf.apply(model, plan):
        return square(model, batch)


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [path for path in found if "gradfit-" in path or "(deleted)" in path]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = len(open_files())
    yield
    gc.collect()
    assert eventually(lambda: len(open_files()) <= before)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time, so that copies are under way when something happens."""

    def write(file: Any, content: Any, position: int, write_all: Any = offload._write_all) -> None:
        time.sleep(0.01)
        write_all(file, content, position)

    monkeypatch.setattr(offload, "_write_all", write)


def test_on_a_slow_disk_the_peak_and_the_gradients_are_the_same(slow: None) -> None:
    model, batch = network()
    wanted, plan = after_plain(model, batch), moving_plan(model, batch)
    peaks = []
    for _ in range(3):
        model.zero_grad()
        with gf.meter(model, batch, device=batch.device) as live:
            forward(model, plan, batch).backward()
        assert same(gradients(model), wanted)
        peaks.append(live.peak_bytes)
    assert len(set(peaks)) == 1
    assert peaks[0] <= plan.peak_bytes


class BeginsWithConstants(nn.Module):
    """A recurrent cell whose first state is made of nothing, and is saved for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8)
        for _ in range(4):
            state = self.cell(x, state) * torch.full_like(x, 0.5)
        return state


def test_constants_that_a_plan_moves_out_are_what_was_read() -> None:
    model, batch = BeginsWithConstants(), torch.randn(64, 8)
    expected = after_plain(model, batch)
    forward(model, moving_plan(model, batch), batch).backward()
    assert same(gradients(model), expected)


def test_a_graph_may_be_dropped_used_twice_and_kept(slow: None) -> None:
    model, batch = network()
    wanted, plan = after_plain(model, batch), moving_plan(model, batch)
    loss = forward(model, plan, batch)
    del loss  # without a backward pass
    loss = forward(model, plan, batch)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    assert same(list(first), wanted)
    assert same(list(again), wanted)
    one, other = forward(model, plan, batch), forward(model, plan, batch)
    model.zero_grad()
    one.backward()
    assert same(gradients(model), wanted)
    model.zero_grad()
    other.backward()
    assert same(gradients(model), wanted)


def test_gradients_of_gradients(slow: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())])
    batch = torch.randn(256, 16)
    plan = moving_plan(model, batch)

    def second(loss: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(loss, [model[0].weight], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), list(model.parameters())[:3]))

    with gf.apply(model, plan):
        loss = square(model, batch)
    assert same(second(loss), second(square(model, batch)))


def test_several_threads_at_once(slow: None) -> None:
    model, batch = network()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # they would share a generator
            module.p = 0.0
    plan = moving_plan(model, batch)
    wanted, found = after_plain(model, batch), {}

    def work(number: int) -> None:
        own = copy.deepcopy(model)
        own.zero_grad()
        with gf.apply(own, plan):
            loss = square(own, batch)
        loss.backward()
        found[number] = same(gradients(own), wanted)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(4), True)


def test_an_exception_in_the_middle(slow: None) -> None:
    model, batch = network()
    wanted, plan = after_plain(model, batch), moving_plan(model, batch)
    for kind in (KeyError, KeyboardInterrupt):
        stop = model[3].register_forward_hook(lambda *_, kind=kind: (_ for _ in ()).throw(kind()))
        with pytest.raises(kind):
            forward(model, plan, batch)
        stop.remove()
        gc.collect()
    model.zero_grad()
    forward(model, plan, batch).backward()
    assert same(gradients(model), wanted)


def test_a_write_waits_for_the_copy_of_what_it_writes_over(slow: None) -> None:
    """The plan is another model's, which does not write there: the gradients are right all the
    same.
    """

    class Writing(nn.Module):
        def __init__(self, writes: bool) -> None:
            super().__init__()
            self.first, self.second, self.writes = nn.Linear(64, 64), nn.Linear(64, 1), writes

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            result = hidden * hidden
            weighed = result * 2.0
            if self.writes:
                result.zero_()
            return self.second(weighed.sin() * weighed)

    torch.manual_seed(0)
    batch = torch.randn(64, 64)
    still, writing = Writing(False), Writing(True)
    writing.load_state_dict(still.state_dict())
    profile = gf.profile(still, square, batch, host_bandwidth=1e13)
    base, graph = gf.plan(profile, memory="1 GiB"), profile.at(64)
    results = [value for value, op in enumerate(graph.producer) if op >= 0]
    actions = ["external" if op < 0 else "keep" for op in graph.producer]
    # What is written over is on its way out then, and what was made from it is rebuilt.
    for number, action in ((1, "offload"), (2, "rebuild"), (4, "offload")):
        actions[results[number]] = action
    plan = dataclasses.replace(base, actions=tuple(actions), heard=len(graph.op_inputs))
    square(writing, batch).backward()
    wanted = [None if g is None else g.clone() for g in gradients(writing)]
    writing.zero_grad()
    with pytest.warns(UserWarning, match="no longer follows"), gf.apply(writing, plan):
        loss = square(writing, batch)
    loss.backward()
    assert same(gradients(writing), wanted)


# ------------------------------------------------------------------------------ a disk that says no


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_undoes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()]
    model, batch = nn.Sequential(*copy.deepcopy(layers), *layers), torch.randn(512, 32)
    for number in (0, 4):
        model[number].register_forward_hook(lambda _, __, result: gf.name(result, "first"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = gf.fit(model, optimizer, square, batch, memory="8 MiB", offload=["first"])
    assert "offload" in step.plan.actions
    step(batch)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        with pytest.raises(gf.OffloadError, match=r"could not be written.*No space left.*TMPDIR"):
            step(batch)
    after = model.state_dict(), optimizer.state_dict()
    assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
    assert str(after[1]) == str(before[1])
    step(batch)


@pytest.mark.parametrize("what", ["pwrite", "preadv", "folder"])
def test_what_goes_wrong_is_one_error(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, batch = network()
    wanted, plan = after_plain(model, batch), moving_plan(model, batch)
    with monkeypatch.context() as broken:
        if what == "folder":
            broken.setattr(offload.tempfile, "tempdir", str(tmp_path / "gone"))
        else:
            broken.setattr(os, what, full)
        with pytest.raises(gf.OffloadError) as raised:
            forward(model, plan, batch).backward()
        assert "leave offload out" in str(raised.value)
        assert isinstance(raised.value, OSError)
    model.zero_grad()
    forward(model, plan, batch).backward()
    assert same(gradients(model), wanted)


def test_a_limit_on_the_size_of_files() -> None:
    """Of the system, which has a signal for it: the process goes on."""
    with _FileLimit(64 << 10):
        store = Store()
        for _ in range(2):
            store.put(torch.ones(1 << 14))
        with pytest.raises(gf.OffloadError, match="File too large"):
            store.finish()


class _FileLimit:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# ----------------------------------------------------------------------------------- the thread


def test_the_thread_ends_when_nothing_is_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_thread, "_IDLE_SECONDS", 0.05)
    store = Store()
    load = store.put(torch.arange(1000.0))
    assert torch.equal(load(), torch.arange(1000.0))

    def is_gone() -> bool:
        return not any(thread.name == "gradfit-copies" for thread in threading.enumerate())

    assert eventually(is_gone)
    assert torch.equal(store.put(torch.ones(1000))(), torch.ones(1000))


def test_without_a_thread_whoever_waits_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying_thread, "_thread", copying_thread._CopyingThread())
    monkeypatch.setattr(threading.Thread, "start", cannot)
    store = Store()
    loads = [store.put(torch.full((1000,), float(number))) for number in range(5)]
    for number, load in reversed(list(enumerate(loads))):
        assert torch.equal(load(), torch.full((1000,), float(number)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_can_go_on() -> None:
    store = Store()
    loads = [store.put(torch.full((1 << 18,), float(number))) for number in range(6)]
    child = os.fork()
    if child == 0:
        good = all(bool((load() == number).all()) for number, load in enumerate(loads))
        more = Store().put(torch.ones(1000))
        os._exit(0 if good and bool((more() == 1).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(bool((load() == number).all()) for number, load in enumerate(loads))


@pytest.mark.parametrize("ends", ["returns", "raises", "is interrupted"])
def test_a_process_ends_while_copies_are_under_way(ends: str) -> None:
    code = f"""
import os, signal, time, torch
from gradfit.recompute import offload
write_all = offload._write_all
def slowly(*given):
    time.sleep(0.2)
    write_all(*given)
offload._write_all = slowly
store = offload.Store()
loads = [store.put(torch.ones(1 << 16)) for _ in range(2)]
print("there", flush=True)
if {ends!r} == "raises":
    raise KeyError("here")
if {ends!r} == "is interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    store.finish()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "there\n"
    codes = {"returns": (0,), "raises": (1,), "is interrupted": (-signal.SIGINT, 130)}
    assert done.returncode in codes[ends], done.stderr
    assert "Fatal" not in done.stderr
