"""A plan keeps a mask's bits: they are never drawn again, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sampled
from torch import nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.tape.dropout_mask import MASK, pack, packed_bytes, packing_bytes
from gradfit.tape.generators import Rewound


class Net(nn.Module):
    """Linear layers with something random after each."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.noise(torch.tanh(layer(x)))
        return x


def own_mask(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).bernoulli_(0.7)


def own_mask_read_twice(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5)
    return x * mask + torch.sigmoid(mask)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.t(), 0.3).t()


def with_a_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(4))


def per_element(x: torch.Tensor) -> torch.Tensor:
    """The node of the sigmoid dies unused."""
    return x * torch.empty_like(x).bernoulli_(torch.sigmoid(x).detach())


def part_of_a_tensor(x: torch.Tensor) -> torch.Tensor:
    noise = torch.ones(x.size(0), 2 * x.size(1), dtype=x.dtype)
    noise[:, : x.size(1)].bernoulli_(0.5)
    return x * noise[:, : x.size(1)]


NOISES = [
    F.dropout,
    own_mask,
    own_mask_read_twice,
    transposed,
    with_a_generator,
    per_element,
    part_of_a_tensor,
]


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients(
    model: nn.Module, x: torch.Tensor, plan: gf.Plan | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(9)
    model.zero_grad()
    if plan is None:
        loss = loss_fn(model, x)
    else:
        with gf.apply(model, plan):
            loss = loss_fn(model, x)
    loss.backward()
    return [p.grad for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(
    ("noise", "dtype"),
    sampled(
        itertools.product(NOISES, [torch.float32, torch.float64, torch.bfloat16]),
        lambda pair: pair[0] is F.dropout or pair[1] is torch.float32,
    ),
)
def test_bit_by_bit_at_every_budget(
    noise: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = Net(noise).to(dtype)
    x = torch.randn(16, 24).to(dtype)
    expected, generator = gradients(copy.deepcopy(model), x, None)
    found = gf.profile(model, loss_fn, x)
    plain = gf.plan(found, memory="1 GiB", batch_size=16, micro_batch=16).peak_bytes
    with pytest.raises(gf.BudgetInfeasible) as caught:
        gf.plan(found, memory=1, batch_size=16, micro_batch=16)
    least = caught.value.min_bytes
    for budget in range(least, plain, max(1, (plain - least) // 3)):
        plan = gf.plan(found, memory=budget, batch_size=16, micro_batch=16)
        with gf.meter(model, x) as live:
            actual, after = gradients(model, x, plan)
        assert live.peak_bytes <= plan.peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(after, generator)
        del actual


def test_bits_that_are_kept_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Any] = []
    start = Rewound.start
    monkeypatch.setattr(Rewound, "start", lambda *args: draws.append(args) or start(*args))
    torch.manual_seed(1)
    model, x = Net(F.dropout), torch.randn(16, 24)
    expected, _ = gradients(copy.deepcopy(model), x, None)
    found = gf.profile(model, loss_fn, x)
    values = [number for number, value in enumerate(found.values) if _makes(found, value) == MASK]
    assert [round(found.values[number].nbytes.at(16)) for number in values] == [16 * 24 // 8] * 4
    actions = [
        "keep" if action == "keep" else "rebuild" for action in _everything_kept(found).actions
    ]
    chain = ("aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar")
    for number, value in enumerate(found.values):
        if _makes(found, value) in chain:
            actions[number] = "rebuild"
    for kept, drawn in ((True, 0), (False, 4)):
        for number in values:
            actions[number] = "keep" if kept else "rebuild"
        full = _everything_kept(found)
        given = [
            "external" if was == "external" else now
            for was, now in zip(full.actions, actions, strict=True)
        ]
        plan = gf.Plan.from_json(full.to_json())
        object.__setattr__(plan, "actions", tuple(given))
        draws.clear()
        actual, _ = gradients(model, x, plan)
        assert len(draws) == drawn
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def _makes(found: Any, value: Any) -> str | None:
    return None if value.operation is None else found.operations[value.operation].name


def _everything_kept(found: Any) -> gf.Plan:
    return gf.plan(found, memory="1 GiB", batch_size=16, micro_batch=16)


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    dtype=st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
    ),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_bits_are_the_mask(shape: list[int], dtype: torch.dtype, order: Any) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    mask = torch.empty(shape).bernoulli_(0.5).to(dtype).permute(dims)
    with gf.meter(mask) as live:
        before = live.current_bytes
        widen = pack(mask)
        assert live.current_bytes - before == packed_bytes(mask) == -(-mask.numel() // 8)
        again = widen()
        peak = live.peak_bytes - before
    assert torch.equal(again, mask)
    assert again.stride() == mask.stride()
    assert again.dtype == mask.dtype
    assert again.untyped_storage().nbytes() == mask.untyped_storage().nbytes()
    assert peak <= max(mask.nbytes, 4 * packed_bytes(mask)) + packed_bytes(mask) + packing_bytes(
        mask
    )
