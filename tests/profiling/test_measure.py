"""A measured profile: the run that it describes is the plain one, and it leaves no trace."""

from __future__ import annotations

import collections
import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from profiling_models import MODELS, OPTIMIZERS, make, square_loss
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import gradfit as gf
from gradfit._torch import schema_of, storage_key
from gradfit._torch_listen import _thread
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.snapshot import untouched
from gradfit.profiling.meter import tensors_in
from gradfit.profiling.optimizer_bytes import optimizer_cost
from gradfit.profiling.trace import Trace
from gradfit.tape.dropout_mask import MASK
from gradfit.tape.listener import OperationListener
from gradfit.tree import leaves, map_tensors


class Log(OperationListener):
    """The names of the operations that compute something; it knows them by their schemas alone."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        aliases = [
            argument.alias_info
            for argument in schema_of(func).arguments
            if argument.alias_info is not None
        ]
        is_view = aliases and not any(alias.is_write for alias in aliases)
        if (
            not is_view
            and isinstance(out, torch.Tensor | tuple | list)
            and "_unsafe_view" not in str(func)
        ):
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_of_a_plain_run(name: str) -> None:
    model, batch, loss_fn = make(name)
    found = gf.profile(model, loss_fn, batch)
    with Log() as log:
        loss_fn(model, batch)
    # Backward's own: the gradient of the loss with respect to itself.
    names = [op.name for op in found.operations]
    assert all(after == "aten.bernoulli_.float" for name, after in pairwise(names) if name == MASK)
    assert [name for name in names if name != MASK] == [*log.names, "aten.ones_like.default"]
    assert found.batch_size == 4
    assert all(op.seconds.at(4) > 0 for op in found.operations)


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_what_autograd_saves(name: str) -> None:
    model, batch, loss_fn = make(name)
    found = gf.profile(model, loss_fn, batch)
    static = {
        storage_key(tensor) for tensor in (*model.parameters(), *model.buffers(), *leaves(batch))
    }
    saved: dict[int, torch.Tensor] = {}  # holds each, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in static:
            saved[storage_key(tensor)] = tensor.detach()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss_fn(model, batch)
    assert result is not None
    assert found.saved_bytes(4) == sum(
        tensor.untyped_storage().nbytes() for tensor in saved.values()
    )


@pytest.mark.parametrize("name", ["perceptron", "gpt2", "resnet"])
def test_numbers_scale_to_a_batch_that_was_not_measured(name: str) -> None:
    model, batch, loss_fn = make(name)
    small = gf.profile(model, loss_fn, batch)
    big = gf.profile(model, loss_fn, map_tensors(batch, lambda rows: torch.cat([rows, rows])))
    assert big.batch_size == 8
    assert [value.nbytes.at(8) for value in small.values if value.operation is not None] == [
        value.nbytes.at(8) for value in big.values if value.operation is not None
    ]
    assert [node.needs for node in small.nodes] == [node.needs for node in big.nodes]
    assert small.saved_bytes(8) == big.saved_bytes(8)
    assert small.batch_bytes.at(8) == big.batch_bytes.at(8)


def test_every_gradient_arrives_once() -> None:
    model, batch, loss_fn = make("gpt2")  # its embedding is its head
    found = gf.profile(model, loss_fn, batch)
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.gradient_bytes == found.parameter_bytes == parameters
    assert sum(node.gradient_bytes for node in found.nodes) == parameters
    assert found.nodes[-1].after_bytes.at(4) == 0


def test_where_it_comes_from() -> None:
    model, batch, loss_fn = make("perceptron")
    found = gf.profile(model, loss_fn, batch)
    by_module = {op.module: op.name for op in found.operations}
    assert by_module["0"] == "aten.addmm.default"
    assert by_module["3"] == "aten.native_batch_norm.default"
    assert {op.source.split(":")[0] for op in found.operations} == {
        "tests/profiling/profiling_models.py",
        "tests/profiling/test_measure.py",
    }


def test_in_place_operations_pass_the_storage_on() -> None:
    model, batch, loss_fn = make("perceptron")
    found = gf.profile(model, loss_fn, batch)
    relu = next(op for op in found.operations if op.name == "aten.relu_.default")
    (old,), (new,) = relu.overwrites, relu.outputs
    assert found.values[old].overwritten
    assert not found.values[new].overwritten
    assert found.values[old].storage == found.values[new].storage
    assert found.operations[found.values[old].operation].name == "aten.addmm.default"


def test_what_dies_and_what_survives() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        short = x + 1
        long = short * 2  # nobody needs `short` for a gradient
        del short
        return (model(long) + long).sum()

    found = gf.profile(nn.Linear(8, 8), loss_fn, torch.randn(4, 8))
    names = [op.name for op in found.operations]
    assert names == [
        f"aten.{name}"
        for name in (
            "add.Tensor",
            "mul.Tensor",
            "addmm.default",
            "add.Tensor",
            "sum.default",
            "ones_like.default",
        )
    ]
    made = {value.operation: value for value in found.values if value.operation is not None}
    assert made[0].dies == 1
    assert made[1].dies in (3, 4)  # a local variable until loss_fn returns
    assert made[4].dies == len(names)  # the loss


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_changed(fails: bool) -> None:
    model, batch, _ = make("perceptron")
    kept = torch.full_like(model[0].weight, 2.0)
    model[0].weight.grad = kept
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square_loss(model, x)
        model.eval()
        if fails:
            raise KeyError("no such column")
        return loss

    if fails:
        with pytest.raises(KeyError, match="no such column"):
            gf.profile(model, loss_fn, batch, optimizer)
    else:
        gf.profile(model, loss_fn, batch, optimizer)
    assert model.training
    assert model[3].training
    assert model[0].weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 2.0))
    assert model[4].weight.grad is None
    assert not optimizer.state
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_untouched_puts_everything_back() -> None:
    model, batch, _ = make("perceptron")
    before = copy.deepcopy(model.state_dict())
    buffer = model[3].running_mean
    with untouched(model):
        square_loss(model, batch).backward()
        assert not torch.equal(buffer, before["3.running_mean"])
        model.eval()
        drawn = torch.rand(3)
    assert model[3].running_mean is buffer
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    with untouched(model):
        square_loss(model, batch)
        assert torch.equal(torch.rand(3), drawn)


class MadeAtOnce(torch.optim.Optimizer):
    """Makes its state in the constructor, and looks it up in the first step, as Adagrad did."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                held = {"sum": torch.zeros_like(parameter), "factors": [torch.ones(())]}
                self.state[parameter] = held

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"].add_(parameter.grad).mul_(state["factors"][0].mul_(0.5))
                parameter.data.sub_(state["sum"], alpha=group["lr"])


@pytest.mark.parametrize("fake", [False, True])
def test_an_optimizer_that_makes_its_state_at_once(fake: bool) -> None:
    model, batch, loss_fn = make("perceptron")
    optimizer = MadeAtOnce(model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    profile = gf.profile(model, loss_fn, batch, optimizer, fake=fake)
    assert profile.optimizer_bytes == size + 4 * len(optimizer.state)
    for state in optimizer.state.values():
        assert not state["sum"].any()
        assert state["factors"][0] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_state_is_known_before_its_first_step(name: str) -> None:
    model, batch, loss_fn = make("perceptron")
    optimizer = OPTIMIZERS[name](model.parameters())
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    cost = optimizer_cost(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))
    # which makes its state when it is built
    assert not any(optimizer.state.values()) or name == "adagrad"

    loss_fn(model, batch).backward()
    optimizer.step()
    state = sum(t.untyped_storage().nbytes() for t in tensors_in(list(optimizer.state.values())))
    assert cost.state_bytes == state == gf.profile(model, loss_fn, batch, optimizer).optimizer_bytes
    with gf.meter(model, optimizer) as live:
        before = live.current_bytes
        optimizer.step()
    assert live.peak_bytes - before <= cost.burst_bytes
    assert cost.seconds > 0


def test_hooks_of_the_optimizer_are_not_called_while_its_bytes_are_measured() -> None:
    model, batch, loss_fn = make("perceptron")
    optimizer = torch.optim.Adam(model.parameters())
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    gf.profile(model, loss_fn, batch, optimizer)
    assert called == []


def test_an_optimizer_that_wants_a_closure_is_refused() -> None:
    model, batch, loss_fn = make("perceptron")
    with pytest.raises(gf.MisuseError, match=r"LBFGS.*closure.*AdamW"):
        gf.profile(model, loss_fn, batch, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, b, f: (m.eval(), b, f), r"model\.train\(\)"),
        (lambda m, b, f: (m.requires_grad_(False), b, f), r"requires_grad_\(\)"),
        (lambda m, b, f: (m, b, lambda m, x: m(x)), r"one number.*\(4, 1\)"),
        (lambda m, b, f: (m, b, lambda m, x: f(m, x).item()), "returned a float"),
        (lambda m, b, f: (m, b, lambda m, x: f(m, x).detach()), "no graph"),
        (lambda m, b, f: (m, b, lambda m, x: f(m, x.mul_(2))), "changed the batch"),
        (
            lambda m, b, f: (m, [b, b[:2]], lambda m, x: f(m, x[0])),
            r"\[1\] has size 2.*\[0\] has 4 rows.*split=",
        ),
        (lambda m, b, f: (m, {"name": "x"}, f), "holds no tensor"),
        (lambda m, b, f: (m, b[:0], f), "0 rows"),
    ],
)
def test_bad_input(change: Any, message: str) -> None:
    model, batch, loss_fn = change(*make("perceptron"))
    with pytest.raises(gf.MisuseError, match=message):
        gf.profile(model, loss_fn, batch)


def test_with_a_budget_only_what_surely_fits_is_run() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    batch = torch.randn(1024, 64)
    whole = gf.profile(model, square_loss, batch)
    static = sum(p.nbytes for p in model.parameters()) * 2 + batch.nbytes
    budget = static + whole.saved_bytes(1024) // 4
    with gf.meter(model, batch) as live:
        part = gf.profile(model, square_loss, batch, memory_bytes=budget)
    assert live.peak_bytes <= budget
    assert part.batch_size < 1024
    assert part.saved_bytes(1024) == whole.saved_bytes(1024)


def is_traced() -> bool:
    """Whether a trace is among those who listen; meters listen, too."""
    link = _thread.innermost
    while link is not None:
        if isinstance(getattr(link.hear, "__self__", None), Trace):
            return True
        link = link.outer
    return False


class Watched:
    """A loss that counts the passes of each size that are watched."""

    def __init__(self, fails_at: int = -1) -> None:
        self.passes: collections.Counter[int] = collections.Counter()
        self._fails_at = fails_at  # so many rows, when they are watched again

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        watched = is_traced()
        self.passes[len(batch)] += watched
        if watched and len(batch) == self._fails_at and self.passes[len(batch)] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
        return square_loss(model, batch)


def test_only_the_sizes_that_a_profile_is_made_of_are_watched_again() -> None:
    loss = Watched()
    found = gf.profile(nn.Linear(64, 64), loss, torch.randn(16, 64), memory_bytes=1 << 30)
    assert found.batch_size == 16
    # a single row was run when it was measured whether parts make the whole
    assert [loss.passes[size] for size in (1, 2, 4)] == [0, 1, 1]
    assert min(loss.passes[8], loss.passes[16]) > 1


@pytest.mark.parametrize("rows", [8, 16])
def test_where_memory_runs_out_when_it_is_watched_again_once_must_do(rows: int) -> None:
    model = nn.Linear(64, 64)
    found = gf.profile(model, loss := Watched(rows), torch.randn(16, 64), memory_bytes=1 << 30)
    assert loss.passes[rows] == 2
    assert found.batch_size == 16
    assert found.saved_bytes(16) == gf.profile(model, square_loss, torch.randn(16, 64)).saved_bytes(
        16
    )
    assert all(parameter.grad is None for parameter in model.parameters())


class Gated(nn.Module):
    """Attention and a gated MLP: between its operations much leads over, between blocks little."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkvo = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (self.qkvo[at](h).cos()[:, None] for at in range(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.qkvo[3](mixed[:, 0])
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def test_a_deep_network_is_watched_in_the_memory_of_a_few_blocks() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Gated() for _ in range(6))), torch.randn(1, 512, 32)
    static = 2 * sum(p.nbytes for p in model.parameters()) + x.nbytes
    room = 30 * x.nbytes  # all values together are 130 times as large as one
    found = gf.profile(
        model,
        lambda model, x: model(x).square().mean(),
        x,
        memory_bytes=static + room,
        additivity=Additivity("rows"),
        tile=False,
    )
    assert found.measuring_bytes <= static + room
