"""Whether the gradients of a few rows' parts make the gradient of the rows, and whether parts see
each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf
from gradfit.batches.additivity import measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.snapshot import untouched

ROWS = 12


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 3))


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measured(model: nn.Module, loss_fn: Callable[..., Any] = entropy, **options: Any) -> Additivity:
    with untouched(model) as before:
        return measure_additivity(model, loss_fn, rows(), rewind=before.rewind, **options)


def in_a_layer(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        out.register_hook(hook)
        return F.cross_entropy(out, batch[1])

    return loss_fn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hooks_of_activations(dtype: torch.dtype) -> None:
    model = network().to(dtype)

    def cast(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda model, batch: loss_fn(model, (batch[0].to(dtype), batch[1]))

    assert measured(model, cast(in_a_layer(lambda g: g / g.norm()))).over is None
    assert "'" in measured(model, cast(in_a_layer(lambda g: g.clamp(-0.1, 0.1)))).reason
    assert measured(model, cast(in_a_layer(lambda g: g * 3))).over == "divisor"


def test_a_module_whose_backward_is_changed() -> None:
    model = network()

    def halve(module: nn.Module, inside: Any, outside: Any) -> Any:
        return tuple(None if one is None else one / one.abs().max() for one in inside)

    model[3].register_full_backward_hook(halve)
    found = measured(model)
    assert (found.over, "gradients do not" in found.reason) == (None, True)


def test_a_clamp_that_few_rows_do_not_reach_is_found_all_the_same() -> None:
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-2.0, 2.0))
    found = measured(model)
    assert found.over is None
    assert "'0.weight' is not linear" in found.reason


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: gradient.clamp(-0.01, 0.01),
        lambda gradient: gradient + 1e-3,
        lambda gradient: gradient.relu(),
        lambda gradient: gradient.sign(),
        lambda gradient: gradient / gradient.norm(),
    ],
    ids=["clamp", "shift", "relu", "sign", "norm"],
)
def test_hooks_of_parameters_that_are_not_linear(hook: Callable[[Tensor], Tensor]) -> None:
    model = network()
    model[0].weight.register_hook(hook)
    found = measured(model)
    assert (found.over, "'0.weight'" in found.reason) == (None, True)


def test_gradients_that_are_nothing_add_up() -> None:
    """Rows far on the flat side: a value, and no gradient at all."""

    def flat(model: nn.Module, batch: Any) -> Tensor:
        return (1 + F.relu(model(batch[0]) - 1e4)).sum(1).mean()

    assert measured(network(), flat).over == "divisor"


def test_gradients_that_cancel_add_up() -> None:
    """A key's bias shifts all scores alike: its gradient is rounding alone."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            states = x[:, None] + torch.arange(6.0)[:, None]
            scores = self.query(states) @ self.key(states).mT
            return (scores.softmax(-1) @ states).sum(1)[:, :3]

    torch.manual_seed(0)
    found = measured(Attends())
    assert found.over == "divisor"


@pytest.mark.parametrize("seed", range(3))
def test_few_bits_are_no_reason_to_refuse(seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 3))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0][:, None].expand(-1, 5, -1).to(model[0].weight.dtype)
        return F.cross_entropy(model(x).mean(1).float(), batch[1])

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return loss_fn(model, batch)

    assert measured(model, under_autocast).over == "divisor"
    assert measured(model.bfloat16(), loss_fn).over == "divisor"
    assert measured(model.half(), loss_fn).over == "divisor"


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(network(), Counter())
    held = torch.ones_like(model[0][0].weight)
    model[0][0].weight.grad = held
    found = measured(model)
    assert found.over == "divisor"
    assert model[0][0].weight.grad is held
    assert torch.equal(held, torch.ones_like(held))
    assert all(p.grad is None for p in model.parameters() if p is not model[0][0].weight)
    assert int(model[1].batches) == 0
    assert torch.equal(model[1].mean, torch.zeros(3))


class Counter(nn.Module):
    """Writes, and reads what it says."""

    batches: Tensor
    mean: Tensor

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out = x
        if self.reads == "mean":
            out = x - self.mean
        elif self.reads == "batches":  # a warm-up
            out = x * (1 + self.batches) / 1000
        elif self.reads == "replaced":
            out = x * (1 + self.mean)
            self.mean = self.mean + 0.1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        self.batches += 1
        return out


@pytest.mark.parametrize("reads", ["mean", "batches", "replaced"])
@pytest.mark.parametrize("gradient_rows", [0, 5])
def test_buffers_that_the_next_part_reads(reads: str, gradient_rows: int) -> None:
    found = measured(nn.Sequential(network(), Counter(reads)), gradient_rows=gradient_rows)
    assert found.over is None
    assert "'1." in found.reason
    assert found.error > 0


def test_buffers_that_have_nearly_converged_are_still_read() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    assert "'0.parametrizations.weight.0._u'" in measured(nn.Sequential(layer)).reason
    layer.eval()
    assert measured(nn.Sequential(layer)).over == "divisor"


class Doubled(torch.autograd.Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_without_room_for_gradients_it_is_named_what_may_change_them() -> None:
    assert measured(network(), gradient_rows=1).over == "divisor"
    assert not measured(network(), gradient_rows=1).uncompared
    hooked = measured(network(), in_a_layer(lambda g: g * 3), gradient_rows=1)
    assert hooked.uncompared == ("a hook that the loss function sets",)

    def doubled(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(Doubled.apply(model(batch[0])), batch[1])

    assert measured(network(), doubled, gradient_rows=1).uncompared == ("DoubledBackward",)
    assert not measured(network(), doubled).uncompared
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model[3].register_full_backward_hook(lambda module, inside, outside: None)
    named = measured(model, gradient_rows=1).uncompared
    assert named[:2] == ("a hook of '0.weight'", "a backward hook of '3'")


def test_a_tight_budget_is_held_while_gradients_are_compared() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(64, 400, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = 12 * 2 * x[:5].nbytes
    budget = x.nbytes + 12 * 32 * 33 * 8 + plain
    with gf.meter(model, optimizer, x) as live:
        step = gf.fit(
            model, optimizer, lambda m, b: Doubled.apply(m(b)).square().mean(), x, memory=budget
        )
    assert step.plan.steps > 1
    assert live.peak_bytes <= budget
    assert step.profile.additivity is not None
    assert not step.profile.additivity.uncompared  # so it was compared


def own_memory(x: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """torch gives a dropout's result memory of its own, to which a residual may be added."""
    h = drop(torch.tanh(x))
    h += x
    return h


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda h: F.dropout(h, 0.5),
    "named": lambda h: F.dropout(input=h, p=0.5, training=True),
    "torch": lambda h: torch.dropout(h, 0.5, True),
    "alpha": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "module": nn.Dropout(0.5),
    "rows": lambda h: F.dropout1d(h[None], 0.5)[0],
}


@pytest.mark.parametrize("drop", DROPOUTS.values(), ids=list(DROPOUTS))
def test_a_dropout_that_is_left_out_gives_memory_of_its_own(
    drop: Callable[[Tensor], Tensor],
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return own_memory(model(batch[0]), drop).square().mean()

    assert measured(network(), loss_fn).over == "divisor"


def test_a_dropout_in_evaluation_mode_gives_memory_of_its_own_too() -> None:
    """A loss that is random in training alone is compared in evaluation mode."""
    draws = itertools.count(1)  # never twice the same, and no generator's that could be put back

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        noise = model.training * next(draws)
        drop = nn.functional.dropout
        h = own_memory(model(batch[0]), lambda h: drop(h, 0.5, training=model.training))
        return h.square().mean() + noise

    assert measured(network(), loss_fn).over == "divisor"


def test_a_dropout_in_place_writes() -> None:
    """Where a write is refused, in training, it is also refused where nothing is dropped."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        h = torch.tanh(model(batch[0]))
        version = h._version
        F.dropout(h, 0.5, inplace=True)
        assert h._version == version + 1
        return h.detach().mean() + model(batch[0]).square().mean()

    assert measured(network(), loss_fn).over == "divisor"


def test_a_dropout_of_nothing_gives_its_argument() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        h = model(batch[0])
        assert F.dropout(h, 0.0) is h
        assert F.dropout(h, 0.5, training=False) is h
        return h.square().mean()

    assert measured(network(), loss_fn).over == "divisor"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_the_same_forward_again(use_reentrant: bool) -> None:
    """In the backward pass, where dropout is left out as it was in the forward."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        run = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
        return F.cross_entropy(run, batch[1])

    assert measured(network(), loss_fn).over == "divisor"


class ManyRows(torch.autograd.Function):
    """Its backward is made for whole batches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if len(gradient) < ROWS:
            raise ArithmeticError(f"{len(gradient)} rows")
        return gradient


def test_a_backward_that_few_rows_cannot_run_leaves_the_batch_whole() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(ManyRows.apply(model(batch[0])), batch[1])

    said = measured(network(), loss_fn)
    assert said.over is None
    assert "backward pass of fewer rows raises ArithmeticError: " in said.reason
    profile = gf.profile(network(), loss_fn, rows())
    assert gf.plan(profile, memory="1 GiB").micro_batch == ROWS
