"""docs/process.md lists what gradfit changes outside of its own objects: each row is looked at."""

from __future__ import annotations

import contextlib
import copy
import gc
import locale
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.nn.modules import module as modules

import gradfit as gf
from gradfit import _torch
from gradfit.interrupts import uninterrupted

PAGE = (Path(__file__).parents[2] / "docs" / "process.md").read_text(encoding="utf-8")
KEY = torch._C._dispatch_key_parse("Fake")

State = Any
Look = Callable[[], State]


class Row(NamedTuple):
    """How to read a state, and a program that calls what it is given while the state may be
    changed.
    """

    read: Callable[[], State]
    use: Callable[[Callable[[], None]], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


def in_a_scope(look: Callable[[], None]) -> None:
    model = net()
    with gf.CheckpointScope("looked at"):
        loss = model(torch.ones(3, 4)).sum()
        look()
    loss.backward()


def in_a_meter(look: Callable[[], None]) -> None:
    with gf.meter():
        look()


def in_a_profile(look: Callable[[], None]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        look()
        return loss

    gf.profile(nn.Linear(4, 1), loss_fn, torch.ones(6, 4))


def in_a_fit(look: Callable[[], None]) -> None:
    """With a loss that draws from every generator there is, and warns."""
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model.register_buffer("calls", torch.zeros(()))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.get_buffer("calls").add_(1)
        random.random(), np.random.random(), torch.rand(1)
        look()
        return model(x).square().mean()  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gf.fit(model, optimizer, loss_fn, torch.ones(6, 4), memory="1 MiB")


def in_uninterrupted(look: Callable[[], None]) -> None:
    with uninterrupted():
        look()


def in_a_replay(look: Callable[[], None]) -> None:
    """A backward pass of one's own inside a check, under `no_grad`."""

    def function(x: torch.Tensor) -> torch.Tensor:
        look()
        return x.square()

    with torch.no_grad():
        gf.check_gradients(function, torch.ones(2))


def while_predicting(look: Callable[[], None]) -> None:
    def operator(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    assert _torch.output_bytes(operator, (torch.ones(4),), {}) == 16


def resizing_functions() -> State:
    where = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]
    return where.alloc_storage, where.free_storage


def stance() -> State:
    return sys.modules["torch._dynamo.eval_frame"]._stance


def compiled_functions() -> State:
    """What torch.compile calls around each function, and for each graph."""
    dynamo = sys.modules["torch._dynamo.eval_frame"]
    return dynamo.set_eval_frame, dynamo._callback_from_stance, modules._has_any_global_hook


def generators() -> State:
    numbers: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]


UNDONE = {
    "garbage collector": Row(gc.get_threshold, in_a_scope),
    "compiled functions": Row(compiled_functions, in_a_scope),
    "dynamo's stance": Row(stance, in_a_fit),
    "dispatch key": Row(lambda: torch._C._dispatch_tls_is_dispatch_key_included(KEY), in_a_scope),
    "saved-tensor hooks": Row(
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False), in_a_scope
    ),
    "dispatch modes": Row(torch._C._len_torch_dispatch_stack, while_predicting),
    "function modes": Row(torch._C._len_torch_function_stack, in_a_fit),
    "global module hooks": Row(
        lambda: (list(modules._global_forward_hooks), list(modules._global_forward_pre_hooks)),
        in_a_profile,
    ),
    "FSDP2's functions": Row(resizing_functions, in_a_meter),
    "Ctrl-C": Row(lambda: signal.getsignal(signal.SIGINT), in_uninterrupted),
    "random generators": Row(generators, in_a_fit),
    "gradient mode": Row(torch.is_grad_enabled, in_a_replay),
    "warning filters": Row(lambda: list(warnings.filters), in_a_fit),
    "torch's logger": Row(
        lambda: logging.getLogger("torch._subclasses.fake_tensor").disabled, while_predicting
    ),
}


def rows(title: str) -> list[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| \*\*(.+?)\*\* \|", section, re.MULTILINE)


def test_every_row_is_looked_at() -> None:
    assert sorted(rows("While something runs, then as before")) == sorted([*UNDONE, "the model"])
    assert len(rows("As long as an object lives")) == 5
    assert rows("Until the process ends") == [
        "kernels on a dispatch key",
        "exception hook",
        "fork handler",
    ]


@pytest.mark.parametrize("name", sorted(UNDONE))
def test_it_is_put_back(name: str) -> None:
    row = UNDONE[name]
    in_a_scope(lambda: None)  # kernels are registered, dynamo is imported
    with torch.no_grad() if name == "gradient mode" else contextlib.nullcontext():
        before, during = row.read(), []
        row.use(lambda: during.append(row.read()))
        assert row.read() == before
    assert during
    assert any(state != before for state in during), (
        "it is not changed at all: the page need not list it"
    )


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            "garbage collector",
            "compiled functions",
            "dynamo's stance",
            "dispatch key",
            "saved-tensor hooks",
            "dispatch modes",
            "FSDP2's functions",
            "Ctrl-C",
            "global module hooks",
            "random generators",
            "warning filters",
            "function modes",
        }
    ),
)
def test_it_is_put_back_after_an_interrupt(name: str) -> None:
    row = UNDONE[name]
    in_a_scope(lambda: None)
    before = row.read()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        row.use(interrupt)
    gc.collect()  # the traceback has held the tape
    assert row.read() == before


def test_the_model_is_put_back() -> None:
    model = net()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    gf.audit(model, lambda model, x: model(x).square().mean(), torch.randn(6, 4))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


def parameter_hooks(model: nn.Module) -> int:
    return sum(
        len(hooks or ())
        for parameter in model.parameters()
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
    )


def test_hooks_on_parameters_go_with_the_accumulator() -> None:
    model = net()
    accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=2)
    assert parameter_hooks(model) > 0
    accumulator.close()
    assert parameter_hooks(model) == 0


def test_hooks_on_the_model_go_with_the_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    profile = gf.profile(model, lambda model, x: model(x).square().mean(), torch.ones(6, 4))
    handle = gf.apply(model, gf.plan(profile, memory="1 MiB"))
    assert model._forward_hooks
    handle.remove()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_forwards_of_layers_are_the_class_s_again() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 100))
    before = sorted(vars(model[1]))
    with gf.tile(model):
        assert "forward" in vars(model[1])
    assert sorted(vars(model[1])) == before


def test_hooks_on_the_optimizer_do_nothing_afterwards() -> None:
    model = net()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    gf.GradientAccumulator(optimizer, steps=2).close()
    assert not other._optimizer_step_pre_hooks
    model(torch.ones(3, 4)).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


SEVERAL_RANKS = """
import sys, tempfile, torch
import gradfit as gf
from torch.nn.parallel import DistributedDataParallel
before = sys.excepthook
torch.distributed.init_process_group(
    "gloo", rank=0, world_size=1, store=torch.distributed.FileStore(tempfile.mktemp(), 1)
)
inside = []
class Net(torch.nn.Linear):
    def forward(self, x):
        inside.append(model.require_backward_grad_sync)
        return super().forward(x)
model = DistributedDataParallel(Net(4, 1))
accumulator = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
accumulator.backward(model(torch.ones(3, 4)).mean())
assert inside == [False] and model.require_backward_grad_sync
accumulator.step()
accumulator.close()
assert sys.excepthook is not before
hook = sys.excepthook
gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
assert sys.excepthook is hook  # one, however many accumulators
torch.distributed.destroy_process_group()
raise ValueError("an error of one's own")
"""


def test_flags_of_ddp_and_the_exception_hook() -> None:
    child = subprocess.run(
        [sys.executable, "-c", SEVERAL_RANKS], capture_output=True, text=True, check=False
    )
    assert child.stderr.rstrip().endswith("ValueError: an error of one's own"), child.stderr


IMPORTED = """
import gc, signal, sys, threading, warnings, torch
def state():
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "Fake")
    return (sys.excepthook, gc.get_threshold(), signal.getsignal(signal.SIGINT), kernel,
            threading.active_count(), list(sys.path), torch.get_rng_state().tolist())
import numpy, scipy, rich
before = state()
import gradfit as gf
assert state() == before
with gf.CheckpointScope("first"):
    torch.ones(2, 2) @ torch.ones(2, 2, requires_grad=True)
assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "Fake")
"""


def test_nothing_happens_at_import_and_kernels_come_with_the_first_recording() -> None:
    child = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr


def settings() -> State:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        dict(os.environ),
        os.getcwd(),
        locale.setlocale(locale.LC_ALL),
        threading.active_count(),
    )


def test_what_is_never_touched() -> None:
    before, during = settings(), []
    for use in (in_a_scope, in_a_meter, in_a_profile, in_a_fit):
        use(lambda: during.append(settings()))
    assert during
    assert all(state == before for state in during)
    assert settings() == before


def test_scopes_of_other_threads_are_their_own() -> None:
    """The dispatch key and the hooks are of a thread: another one runs as without gradfit."""
    seen: list[State] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(UNDONE["dispatch key"].read()))
        thread.start()
        thread.join()

    in_a_scope(look)
    assert seen == [False]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()
