"""A prediction on shapes: the same operations, values and bytes as a real run, and nothing of the
model is touched.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiling_models import MODELS, OPTIMIZERS, make, mixtral, perceptron, square_loss
from torch import nn

import gradfit as gf
from gradfit._torch import FakeTensor, FakeTensorMode, fake_mode
from gradfit.profiling.meter import tensors_in
from gradfit.profiling.predict import _optimizer_cost
from gradfit.profiling.roofline import LAUNCH_SECONDS, Roofline

ROOT = Path(__file__).parents[2]
A100 = gf.Hardware(memory="80 GiB", name="A100")


def predicted(
    model: nn.Module, batch: Any, loss_fn: Any, optimizer: Any = None, **options: Any
) -> gf.Profile:
    return gf.profile(
        model, loss_fn, batch, optimizer, **{"fake": True, "hardware": A100, **options}
    )


def _comparable(op: Any, alike: bool) -> Any:
    """An operation without what a prediction cannot know."""
    op = replace(op, seconds=None, source="")
    return op if alike else replace(op, name=op.name.replace("_.", ".", 1), overwrites=())


@pytest.mark.parametrize("name", MODELS)
def test_the_structure_is_that_of_a_real_run(name: str) -> None:
    model, batch, loss_fn = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    real = gf.profile(model, loss_fn, batch, optimizer)
    fake = predicted(model, batch, loss_fn, optimizer)
    # Some of torch's own code writes in place, but not to fake tensors: attention that is many
    # operations, which llama's is, too, where a device has none of its own.
    alike = [op.name for op in fake.operations] == [op.name for op in real.operations]
    without_kernel = () if torch.get_default_device().type == "cpu" else ("llama",)
    assert alike == (name not in ("gpt2", "bert", "t5", *without_kernel))
    # The last operation is backward's, called from here and there.
    assert [_comparable(op, alike) for op in fake.operations] == [
        _comparable(op, alike) for op in real.operations
    ]
    assert [op.source for op in fake.operations[:-1]] == [op.source for op in real.operations[:-1]]
    assert len(fake.values) == len(real.values)
    for mine, its in zip(fake.values, real.values, strict=True):
        assert mine.operation == its.operation
        if alike:
            assert (mine.storage, mine.overwritten) == (its.storage, its.overwritten)
        if mine.operation is not None:
            assert mine.dies == its.dies or not alike
            assert [mine.nbytes.at(n) for n in (2, 4, 32)] == [its.nbytes.at(n) for n in (2, 4, 32)]
    assert [(node.name, node.needs, node.gradient_bytes) for node in fake.nodes] == [
        (node.name, node.needs, node.gradient_bytes) for node in real.nodes
    ]
    for part in ("before_bytes", "peak_bytes", "after_bytes"):
        assert [round(getattr(n, part).at(4)) for n in fake.nodes] == [
            round(getattr(n, part).at(4)) for n in real.nodes
        ]
    for part in (
        "parameter_bytes",
        "gradient_bytes",
        "buffer_bytes",
        "optimizer_bytes",
        "optimizer_burst_bytes",
        "batch_bytes",
        "batch_size",
    ):
        assert getattr(fake, part) == getattr(real, part), part


def test_a_plan_made_from_a_prediction_works_on_the_real_model() -> None:
    model, batch, loss_fn = make("gpt2")
    profile = replace(predicted(model, batch, loss_fn), host_bandwidth=0.0)  # nothing is moved out
    plain = gf.plan(profile, memory="1 GiB")
    plan = gf.plan(profile, memory=int(plain.peak_bytes * 0.7))
    assert "rebuild" in plan.actions
    assert plan.predicted

    torch.manual_seed(1)
    expected = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    torch.manual_seed(1)
    with gf.apply(model, plan):
        loss = loss_fn(model, batch)
        found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_model_without_memory_gives_the_same(where: str) -> None:
    with torch.device("meta") if where == "meta" else FakeTensorMode():
        model, _, loss_fn = perceptron()
        optimizer = torch.optim.AdamW(model.parameters())
    real, batch, _ = make("perceptron")
    expected = predicted(real, batch, loss_fn, torch.optim.AdamW(real.parameters()))
    with torch.device("meta"):
        nothing = torch.empty(4, 16)
    for rows in (batch, nothing):
        found = predicted(model, rows, loss_fn, optimizer)
        assert found.optimizer_seconds == pytest.approx(expected.optimizer_seconds, rel=0.2)
        # What is on meta will be on an accelerator, where torch's optimizers step all parameters at
        # once. Where none is here, it is the update of the CPU that does so, with twice as many
        # temporaries as an accelerator's has.
        elsewhere = where == "meta" and torch.get_default_device().type == "cpu"
        burst = 2 * found.parameter_bytes if elsewhere else expected.optimizer_burst_bytes
        assert found.optimizer_burst_bytes == burst
        same = {
            name: getattr(expected, name) for name in ("optimizer_seconds", "optimizer_burst_bytes")
        }
        assert [way.groups for way in found.update_ways] == [(), (1, 5)]
        same["update_ways"] = expected.update_ways
        assert replace(found, **same) == expected


def test_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        model, batch, loss_fn = perceptron()
        assert predicted(model, batch, loss_fn, torch.optim.AdamW(model.parameters())).predicted


def test_nothing_of_the_model_is_touched() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.scale = torch.ones(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = self.norm(self.recurrent(x)[0] * self.scale)
            self.register_buffer("later", x.detach() + 1)
            self.eval()
            return self.cache

    model = Caching()
    model.norm.weight.grad = torch.full((4,), 3.0)
    generator = torch.get_rng_state()
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    content = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for loss_fn in (square_loss, lambda m, x: 1 / 0 if m(x) is not None else None):
        with contextlib.suppress(ZeroDivisionError):
            predicted(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), loss_fn)
        for now, before in attributes:
            assert now.keys() == before.keys()
            assert all(now[key] is before[key] for key in now)
        assert model.state_dict().keys() == content.keys()
        assert all(
            torch.equal(tensor, content[name]) for name, tensor in model.state_dict().items()
        )
        assert not any(isinstance(tensor, FakeTensor) for tensor in tensors_in(model))
        assert torch.equal(model.norm.weight.grad, torch.full((4,), 3.0))
        assert torch.equal(torch.get_rng_state(), generator)


def test_tied_parameters_are_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    found = predicted(model, torch.randn(2, 8), square_loss)
    assert found.parameter_bytes == found.gradient_bytes == 256
    assert sum(node.gradient_bytes for node in found.nodes) == 256


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_is_predicted(name: str) -> None:
    model, batch, loss_fn = make("perceptron")
    optimizer = OPTIMIZERS[name](model.parameters())
    with torch.device("meta"):
        shapes = perceptron()[0]
    found = predicted(shapes, batch, loss_fn, OPTIMIZERS[name](shapes.parameters()))
    loss_fn(model, batch).backward()
    optimizer.step()
    assert found.optimizer_bytes == sum(
        t.nbytes for t in tensors_in(list(optimizer.state.values()))
    )
    assert found.optimizer_seconds > 0


def test_sharding_divides_all_but_activations() -> None:
    def build() -> nn.Module:
        blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 130, bias=False)})

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        for block in model["blocks"]:
            x = block(x).relu()
        return model["head"](x).square().mean()

    with torch.device("meta"):
        model = build()
    batch, optimizer = torch.randn(4, 64), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    alone = predicted(model, batch, loss_fn, optimizer)
    spread = predicted(model, batch, loss_fn, optimizer, hardware=replace(A100, devices=4))
    block, head = 64 * 64 * 4, 130 * 64 * 4
    shards = 8 * block // 4 + math.ceil(130 / 4) * 64 * 4
    assert (
        alone.parameter_bytes == alone.gradient_bytes == alone.optimizer_bytes == 8 * block + head
    )
    # the largest unit in use, the next one being fetched
    assert spread.parameter_bytes == shards + 2 * head
    assert spread.gradient_bytes == shards + head
    assert spread.optimizer_bytes == shards
    assert spread.saved_bytes(4) == alone.saved_bytes(4)
    assert sum(node.gradient_bytes for node in spread.nodes) <= shards


def test_seconds_are_the_rooflines() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    hardware = gf.Hardware(memory="1 GiB", flops=1e12, bandwidth=1e9)
    found = predicted(
        model, torch.randn(500, 1000), lambda m, x: m(x).exp().sum(), hardware=hardware
    )
    seconds = {op.name: op.seconds.at(500) - LAUNCH_SECONDS for op in found.operations}
    # read and written
    assert seconds["aten.exp.default"] == pytest.approx(2 * 500 * 1000 * 4 / 1e9)
    quick = predicted(
        model,
        torch.randn(500, 1000),
        lambda m, x: m(x).exp().sum(),
        hardware=replace(hardware, bandwidth=1e15),
    )
    assert quick.operations[0].seconds.at(500) - LAUNCH_SECONDS == pytest.approx(
        2 * 500 * 1000 * 1000 / 1e12
    )
    assert quick.backward_seconds(500) < found.backward_seconds(500)


def test_without_hardware_it_is_this_machine() -> None:
    model, batch, loss_fn = make("perceptron")
    found = gf.profile(model, loss_fn, batch, fake=True)
    assert str(found).startswith("predicted on this machine (cpu) at batch 4")
    assert found.forward_seconds(4) > 0
    assert str(predicted(model, batch, loss_fn)).startswith("predicted on A100 at batch 4")


def test_a_batch_that_only_split_can_cut() -> None:
    model = nn.Linear(8, 8)
    batch = [torch.randn(8) for _ in range(6)]
    found = predicted(
        model,
        batch,
        lambda m, rows: m(torch.stack(rows)).square().mean(),
        split=lambda rows, size: [rows[i : i + size] for i in range(0, len(rows), size)],
    )
    assert found.batch_size == 6
    product = next(value for value in found.values if value.operation == 1)
    assert (product.nbytes.fixed, product.nbytes.per_item) == (0, 32)


def test_what_depends_on_content_says_so() -> None:
    model, batch, loss_fn = mixtral()
    model.train()
    with pytest.raises(
        gf.UnsupportedOp, match=r"nonzero.* at transformers.*has only a shape.*gf\.profile\("
    ):
        predicted(model, batch, loss_fn)
    model, batch, _ = make("perceptron")
    with pytest.raises(gf.UnsupportedOp, match=r"_local_scalar_dense.* at .*test_fake\.py"):
        predicted(model, batch, lambda m, x: m(x).sum() * m(x).max().item())


def test_an_operation_that_fails_says_where() -> None:
    with pytest.raises(
        gf.UnsupportedOp,
        match=r"addmm.* at .*profiling_models\.py.*failed on fake tensors.*If real ones",
    ):
        predicted(nn.Linear(3, 3), torch.randn(4, 5), square_loss)


def test_an_operation_without_a_fake_kernel() -> None:
    library = torch.library.Library("gradfit_tests", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    with pytest.raises(gf.UnsupportedOp, match=r"opaque.*torch\.library\.register_fake"):
        predicted(
            nn.Linear(3, 3),
            torch.randn(4, 3),
            lambda m, x: m(torch.ops.gradfit_tests.opaque(x)).sum(),
        )


def test_misuse_is_refused_as_in_a_real_run() -> None:
    model, batch, loss_fn = make("perceptron")
    with pytest.raises(gf.MisuseError, match=r"model\.train\(\)"):
        predicted(model.eval(), batch, loss_fn)
    with pytest.raises(gf.MisuseError, match="one number"):
        predicted(model.train(), batch, lambda m, x: m(x))
    with pytest.raises(gf.MisuseError, match="changed the batch"):
        predicted(model, batch, lambda m, x: m(x.add_(1)).sum())


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The guide's snippets are run with those of all pages."""
    runpy.run_path(str(ROOT / "examples/plan_for_another_machine.py"))
    assert "1 × 40 GiB: Smallest feasible peak" in capsys.readouterr().out


def test_an_accelerator_that_torch_is_built_for_and_the_machine_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `pip install torch` gives on a laptop: built for CUDA, and no driver."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    assert predicted(
        model, torch.ones(4, 8), square_loss, torch.optim.AdamW(model.parameters())
    ).operations


def test_an_accelerators_optimizer_updates_all_parameters_in_one_call() -> None:
    """As torch chooses there: of AdamW, temporaries are as large as all parameters, once."""
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (1, 64))]
    optimizer = torch.optim.AdamW(parameters)
    cuda = torch.device("cuda")
    cost = _optimizer_cost(optimizer, fake_mode(), Roofline(A100), cuda, devices=1)
    assert cost.burst_bytes == 4 * (64 * 64 + 64)


_SEVENTY_BILLION = """
import torch, transformers, gradfit as gf
config = transformers.LlamaConfig(
    num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, dtype=torch.bfloat16,
)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
profile = gf.profile(
    model, lambda m, ids: m(input_ids=ids, labels=ids).loss, torch.zeros(1, 4096, dtype=torch.long),
    torch.optim.AdamW(model.parameters()), fake=True,
    hardware=gf.Hardware(memory="80 GiB", devices=64),
)
plan = gf.plan(profile, memory="80 GiB", batch_size=8)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(
    sum(p.numel() for p in model.parameters()), plan.peak_bytes, plan.predicted,
    plan.steps * plan.micro_batch,
)
print(int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
def test_seventy_billion_parameters_over_64_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SEVENTY_BILLION], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    first, memory = done.stdout.splitlines()
    parameters, peak_bytes, is_prediction, batch_size = first.split()
    assert int(parameters) > 70e9
    assert int(peak_bytes) <= 80 << 30
    assert (is_prediction, batch_size) == ("True", "8")
    assert int(memory) <= 4e9


def test_nothing_is_left_for_the_garbage_collector() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    model.register_buffer("positions", torch.arange(1000))
    batch = torch.ones(8, 4)
    gc.collect()
    gc.disable()
    try:
        with gf.meter(model, batch) as live:
            before = live.current_bytes
            gf.profile(model, lambda m, x: m(x).square().mean(), batch, fake=True)
            assert live.current_bytes == before
    finally:
        gc.enable()
