"""The smallest budget that `fit` names is enough, for measuring and for every step; noticeably less
is not.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import gradfit as gf

Case = tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def chain() -> Case:
    """Large values of one size."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh())]
    return nn.Sequential(*layers), squares, torch.randn(6, 16, 48)


def wide_activations() -> Case:
    """Two rows of a forward alone take more than one row of a step does."""
    model = nn.Sequential(
        nn.Linear(8, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8), nn.LayerNorm(8)
    )
    return model, squares, torch.randn(8, 64, 8)


def one_row() -> Case:
    layers = [
        layer for _ in range(5) for layer in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    ]
    return nn.Sequential(*layers), squares, torch.randn(1, 128, 32)


class Routed(nn.Module):
    """Which rows go through which layer is decided by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layers = (
            nn.Linear(12, 2),
            nn.ModuleList(nn.Linear(12, 12) for _ in range(2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, layer(x[rows]).tanh())
        return out


def routed() -> Case:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.flatten(0, 1)).square().mean()

    return nn.Sequential(Routed(), Routed()), loss_fn, torch.randn(4, 8, 12)


def classes() -> Case:
    """Two means that ignore different rows."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16))
            self.first, self.second = nn.Linear(16, 5), nn.Linear(16, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.body(x)
            return self.first(h), self.second(h)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, first, second = batch
        one, other = model(x)
        return F.cross_entropy(one, first) + F.cross_entropy(other, second)

    first, second = torch.randint(0, 5, (12,)), torch.randint(0, 5, (12,))
    first[:5], second[3::2] = -100, -100
    return Heads(), loss_fn, (torch.randn(12, 8), first, second)


CASES = {case.__name__: case for case in (chain, wide_activations, one_row, routed, classes)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda tensors: torch.optim.SGD(tensors, lr=0.01),
    "AdamW": lambda tensors: torch.optim.AdamW(tensors, lr=0.001),
}


def attempt(
    make: Callable[[], Case], optimizer_of: Any, memory: int, *, steps: int = 3, **settings: Any
) -> tuple[int, int]:
    """`fit` and some steps at a budget: the peak of everything, and the least that was named, or 0
    if it fitted.
    """
    torch.manual_seed(0)
    model, loss_fn, batch = make()
    optimizer = optimizer_of(model.parameters())
    gc.collect()
    with gf.meter(model, optimizer, batch) as live:
        try:
            step = gf.fit(model, optimizer, loss_fn, batch, memory=memory, **settings)
        except gf.BudgetInfeasible as refusal:
            return live.peak_bytes, refusal.min_bytes
        for _ in range(steps):
            step(batch)
    return live.peak_bytes, 0


def check(
    make: Callable[[], Case], optimizer_of: Any, *, is_clocked: bool = False, **settings: Any
) -> None:
    taken, least = attempt(make, optimizer_of, 1000, **settings)
    assert least > 1000
    assert taken <= least, "to find the number more was taken than it says"
    taken, refused = attempt(make, optimizer_of, least, **settings)
    assert not refused, f"{least} was named, and then {refused}"
    assert taken <= least
    less = int(least * (0.85 if is_clocked else 0.96))
    taken, refused = attempt(make, optimizer_of, less, **settings)
    assert refused, f"{least} was named, and {less} is enough"
    assert taken <= max(less, refused)


QUICK = {("chain", "AdamW"), ("wide_activations", "SGD"), ("one_row", "AdamW"), ("classes", "SGD")}
PAIRS = [
    pytest.param(name, optimizer, marks=() if (name, optimizer) in QUICK else pytest.mark.slow)
    for name in CASES
    for optimizer in OPTIMIZERS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_the_smallest_budget_is_enough_and_less_is_not(name: str, optimizer: str) -> None:
    check(CASES[name], OPTIMIZERS[optimizer], is_clocked=name == "routed")


@pytest.mark.filterwarnings("ignore")
def test_a_step_at_its_smallest_budget_is_planned_once() -> None:
    """A real step holds some numbers that a trial does not: that alone is no reason to plan
    again.
    """
    _, least = attempt(chain, OPTIMIZERS["AdamW"], 1000)
    torch.manual_seed(0)
    model, loss_fn, batch = chain()
    step = gf.fit(model, OPTIMIZERS["AdamW"](model.parameters()), loss_fn, batch, memory=least)
    profile = step.profile
    for _ in range(4):
        step(batch)
    assert step.profile is profile


def read_loss() -> Case:
    """Its forward reads the data, so shapes alone do not tell what more rows take; the gradients of
    parameters are the most of it.
    """

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = squares(model, x)
        if not torch.isfinite(loss).item():
            raise ValueError("the loss is not finite")
        return loss

    model, _, _ = chain()
    return model, loss_fn, torch.randn(15, 48)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("micro_batch", ["whole", 12])
def test_gradients_of_one_row_are_not_taken_for_many(micro_batch: Any) -> None:
    check(read_loss, OPTIMIZERS["SGD"], micro_batch=micro_batch)


class WideBackward(torch.autograd.Function):
    """Its backward pass takes far more than its forward, for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient[..., None] * gradient.new_ones(512)).mean(-1) * 2


def wide_backward() -> Case:
    """Two rows of a backward pass, in which gradients are compared, take more than a step of one
    does; what a forward takes does not tell.
    """

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return WideBackward.apply(model(x)).square().mean()

    return nn.Linear(8, 16), loss_fn, torch.randn(8, 8)


def unused_head() -> Case:
    """Some parameters never get a gradient: a trial with gradients there is run again without."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model[:2](x).square().mean()

    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 1))
    return model, loss_fn, torch.randn(8, 24)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [wide_backward, unused_head])
def test_what_is_run_before_the_first_step_stays_below_the_smallest_budget(
    case: Callable[[], Case],
) -> None:
    check(case, OPTIMIZERS["SGD"], micro_batch=1)


def test_how_a_larger_batch_adds_up_is_measured_in_the_budget() -> None:
    """That is not known of a sample of one row, and is measured in a later step."""

    def one_row_of_it() -> Case:
        model, loss_fn, batch = wide_backward()
        return model, loss_fn, batch[:1]

    _, least = attempt(one_row_of_it, OPTIMIZERS["SGD"], 1000)
    memory = int(1.2 * least)
    model, loss_fn, batch = wide_backward()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    step = gf.fit(model, optimizer, loss_fn, batch[:1], memory=memory)
    with gf.meter(model, optimizer, batch) as live:
        assert step(batch).micro_batches > 1
    assert live.peak_bytes <= memory


def convolutions() -> Case:
    """Of one row alone torch runs other operations: so what is measured in little memory tells of
    other plans than what is measured in more.
    """
    config = transformers.ConvNextConfig(
        patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3,
    )  # fmt: skip

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    images = torch.randn(6, 3, 16, 16, dtype=torch.float64)
    model = transformers.ConvNextForImageClassification(config).double().train()
    return model, loss_fn, {"pixel_values": images, "labels": torch.arange(6) % 3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_smallest_budget_does_not_depend_on_what_was_measured(optimizer: str) -> None:
    check(convolutions, OPTIMIZERS[optimizer], micro_batch="whole", tile=False)


BLOCKS: list[Callable[[int], nn.Module]] = [
    lambda width: nn.Linear(width, width),
    lambda width: nn.Sequential(
        nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
    ),
    lambda width: nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.2), nn.SiLU()),
    lambda width: nn.Sequential(nn.Tanh(), nn.Softmax(-1)),
    lambda width: nn.Sequential(
        nn.Linear(width, width // 2), nn.ReLU(inplace=True), nn.Linear(width // 2, width)
    ),
]


def random_case(seed: int) -> Callable[[], Case]:
    def make() -> Case:
        dice = random.Random(seed)
        width = dice.choice([8, 16, 32])
        layers = [dice.choice(BLOCKS)(width) for _ in range(dice.randrange(2, 7))]
        rows, length = dice.choice([1, 2, 5, 8]), dice.choice([1, 8, 64])
        return (
            nn.Sequential(nn.Linear(width, width), *layers),
            squares,
            torch.randn(rows, length, width),
        )

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))]
)
def test_random_models_at_their_smallest_budget(seed: int) -> None:
    check(random_case(seed), OPTIMIZERS["AdamW" if seed % 2 else "SGD"])
