"""Modules in tiles of tokens: found by what they do, exact, and never one that mixes tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(8, 40),
            nn.Linear(8, 40, bias=False),
            nn.Linear(40, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token goes to the two experts that a router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return result.reshape(x.shape)


class Mixer(nn.Module):
    """As wide as an MLP, over the tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 40), nn.Linear(40, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            x = F.scaled_dot_product_attention(x, x, x)
        elif self.kind == "convolution":
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "shift":
            x = x + x.roll(1, dims=1)
        elif self.kind == "cumsum":
            x = x.cumsum(1)
        elif self.kind == "mean":
            x = x - x.mean(1, keepdim=True)
        elif self.kind == "batch norm":
            x = self.norm(x.flatten(0, 1)).view_as(x)
        elif self.kind == "count":
            x = x * x.shape[1]
        return self.down(F.gelu(self.up(x)))


class Leaves(nn.Module):
    """Treats each token by itself, as far as its result tells."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.losses: list[Tensor] = []
        self.beside: Tensor | None = None
        self.up, self.down = nn.Linear(8, 40), nn.Linear(40, 8)
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        balance = x.mean((0, 1)).square().sum()
        if self.kind == "a loss beside":
            self.beside = balance
        elif self.kind == "a list of losses":
            self.losses.append(balance)
        elif self.kind == "a count":
            self.calls += 1
        elif self.kind == "a buffer":
            self.get_buffer("load").add_(x.detach().sum((0, 1)))
        elif self.kind == "a gradient":
            x = Balanced.apply(x, balance)  # type: ignore[no-untyped-call]
        elif self.kind == "in training" and self.training:
            x = x - x.mean(1, keepdim=True)
        elif self.kind == "in training, with dropout":
            x = F.dropout(x - x.mean(1, keepdim=True) if self.training else x, 0.1, self.training)
        return self.down(F.gelu(self.up(x)))


class Balanced(torch.autograd.Function):
    """Adds the gradient of a loss that nobody has in hand, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, balance: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones((), dtype=gradient.dtype)


class Lora(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, wide)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, wide, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class WithAdapter(nn.Module):
    """A model whose projection to words, 7.5 times as wide as its input, has an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 8), Lora(8, 60)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embed(tokens))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, 8))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.norm = nn.Linear(8, 8), inner, nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + F.scaled_dot_product_attention(x, x, x)
        return x + self.inner(self.norm(x))


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    result = model(x)
    result.square().mean().backward()
    assert x.grad is not None
    return [
        result.detach(),
        x.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize(
    "make",
    [
        GatedMLP,
        Experts,
        lambda: nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Linear(40, 8)),
        lambda: nn.Sequential(Lora(8, 40), nn.GELU(), Lora(40, 8)),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_modules_of_single_tokens_are_found_and_exact(make: Any, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(make()), Block(make())).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = run(model, x)
    with gf.tile(model, size=size) as handle:
        found = run(model, x)
        assert handle.modules == ("0.inner", "1.inner")
        again = run(model, x)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), expected, strict=True))


@pytest.mark.parametrize(
    "kind", ["attention", "convolution", "shift", "cumsum", "mean", "batch norm", "count"]
)
def test_what_mixes_tokens_is_left_alone_or_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Mixer(kind))
    x = torch.randn(2, 9, 8)
    with gf.tile(model, size=3) as handle:
        model(x)
        assert not handle.modules
        assert handle.untiled["1"]
    with (
        gf.tile(model, size=3, modules=["1"]),
        pytest.raises(gf.MisuseError, match=r"1 cannot run in tiles of tokens: .*Leave it out"),
    ):
        model(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a loss beside", "keeps something of each call in beside"),
        ("a list of losses", "keeps something of each call in losses"),
        ("a count", "keeps something of each call in calls"),
        ("a buffer", "changes its buffers"),
        ("a gradient", "the gradient of its input differs"),
        ("in training", "flow into"),
        ("in training, with dropout", "flow into"),
    ],
)
def test_what_no_result_tells_is_seen(kind: str, why: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Leaves(kind)).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.manual_seed(1)
    expected = run(model, x)
    inner: Any = model[1]
    left = (inner.calls, len(inner.losses), inner.load.clone())
    inner.calls, inner.beside = 0, None
    inner.losses.clear()
    inner.load.zero_()
    with gf.tile(model, size=3) as handle:
        torch.manual_seed(1)
        found = run(model, x)
        assert why in handle.untiled["1"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert left[:2] == (inner.calls, len(inner.losses))
    assert torch.equal(left[2], inner.load)


def test_adapters_of_a_projection_to_words() -> None:
    """Both products are lazy, and so is their sum."""
    torch.manual_seed(0)
    model = WithAdapter().double()
    tokens = torch.randint(0, 60, (2, 9))

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).view(-1, 60), tokens.view(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step()
    with gf.tile(model, size=5) as handle:
        found = step()
    assert {name: head.reduced for name, head in handle.heads.items()} == {
        "head.base": 1,
        "head.b": 0,  # in the same reduction, which is counted for the first
    }
    assert not any(head.materialised for head in handle.heads.values())
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-12


@pytest.mark.parametrize("name", ["0.norm", "0.before", "0.inner.up"])
def test_named_norms_and_projections_are_exact(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(GatedMLP())).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = run(model, x)
    with gf.tile(model, size=4, modules=[name]) as handle:
        found = run(model, x)
        assert handle.modules == (name,)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-12


def test_named_and_excluded_modules() -> None:
    model = nn.Sequential(Block(GatedMLP()), Block(GatedMLP()))
    x = torch.randn(2, 9, 8)
    with gf.tile(model, exclude=["0.inner"]) as handle:
        model(x)
        assert handle.modules == ("1.inner",)
    with gf.tile(model, modules=["0.norm"]) as handle:  # not worth it, but asked for
        model(x)
        assert handle.modules == ("0.norm",)
    with pytest.raises(gf.InvalidParameter, match="modules='2'"):
        gf.tile(model, modules=["2"])


def test_less_is_kept_and_less_is_made() -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(3)]
    )
    x = torch.randn(1, 1024, 16)

    def peak() -> int:
        with gf.meter(model, x) as live:
            run(model, x)
        return live.peak_bytes

    plain = peak()
    with gf.tile(model, size=64):
        assert peak() < 0.35 * plain


def test_dropout_draws_the_same_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), with_dropout()).double()
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    with gf.tile(model, size=5) as handle:
        torch.manual_seed(3)
        found = run(model, x)
        after = torch.get_rng_state()
        assert handle.modules == ("1",)
    torch.manual_seed(3)
    # as by hand: each tile draws when it is run
    parts = [part.clone().requires_grad_() for part in x.split(5, 1)]
    model.zero_grad()
    result = torch.cat([model(part) for part in parts], 1)
    result.square().mean().backward()
    assert torch.equal(result.detach(), found[0])
    torch.testing.assert_close(torch.cat([part.grad for part in parts], 1), found[1])
    assert torch.equal(torch.get_rng_state(), after)
    leaf = x.clone().requires_grad_()
    with gf.tile(model, size=5):
        loss = model(leaf).sum()
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.autograd.grad(loss, leaf, create_graph=True)


def test_hooks_of_a_module_see_it_whole_and_hooks_inside_keep_it_whole() -> None:
    model, seen = nn.Sequential(Block(GatedMLP()), Block(GatedMLP())), []
    model[0].inner.register_forward_hook(
        lambda module, args, result: seen.append(tuple(result.shape))
    )
    model[1].inner.up.register_forward_hook(
        lambda module, args, result: seen.append(tuple(result.shape))
    )
    with gf.tile(model, size=4) as handle:
        model(torch.randn(2, 9, 8)).sum().backward()
        assert handle.modules == ("0.inner",)
    assert seen == [(2, 9, 8), (2, 9, 40)]


def test_gradients_of_gradients_and_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), GatedMLP()).double()
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(
            model(x).square().sum(), [x, *model.parameters()], create_graph=True
        )
        return torch.autograd.grad(
            sum(each.square().sum() for each in first), [x, *model.parameters()]
        )

    expected = second()
    with gf.tile(model, size=5):
        for a, b in zip(second(), expected, strict=True):
            torch.testing.assert_close(a, b)
    model.float()
    narrow = x.detach().float()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        plain = run(model, narrow)
        with gf.tile(model, size=5):
            tiled = run(model, narrow)
    assert tiled[0].dtype is plain[0].dtype is torch.bfloat16
    for a, b in zip(tiled, plain, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.02


def test_frozen_parameters_and_inputs() -> None:
    model = nn.Sequential(nn.Identity(), GatedMLP()).double()
    model[1].up.requires_grad_(False)
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    with gf.tile(model, size=5):
        model(x).sum().backward()
        assert model[1].up.weight.grad is None
        assert model[1].gate.weight.grad is not None
        model.requires_grad_(False)
        assert not model(x).requires_grad
