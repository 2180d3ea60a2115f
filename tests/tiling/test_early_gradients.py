"""Gradients that a loss in tiles computes with its value: those of the untiled run, once, and only
where they are exact and wanted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfit as gf
from gradfit.tiling import reduce_rows

WORDS, WIDTH, TOKENS, SIZE = 71, 8, 29, 7
TILES = -(-TOKENS // SIZE)
LABELS = torch.arange(TOKENS) * 5 % WORDS
LABELS[3:6] = -100
Loss = Callable[[Any], Tensor]


class Words(nn.Module):
    """Tokens to logits; `heads` of them."""

    def __init__(self, heads: int = 1, *, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS, bias=bias) for _ in range(heads))

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.body(self.embed(tokens)).tanh().to(self.body.weight.dtype)
        logits = [head(hidden) for head in self.heads]
        return logits[0] if len(logits) == 1 else logits


def make(heads: int = 1, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Words:
    torch.manual_seed(0)
    model = Words(heads).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


TOKENS_IN = torch.arange(TOKENS) * 7 % WORDS
TEACHER = torch.softmax(torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(2)), -1)
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, WORDS, dtype=torch.float64)


def gradients_of(model: nn.Module, loss: Loss, times: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss(model(TOKENS_IN))
    (value * times).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **found}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    names = [name for name in expected if name != "loss"]
    difference = sum(
        float((found[n].double() - expected[n].double()).square().sum()) for n in names
    )
    return float(
        (difference / sum(float(expected[n].double().square().sum()) for n in names)) ** 0.5
    )


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each tile whose logits were made."""
    seen: list[int] = []
    own = reduce_rows._Tensors.logits

    def counted(self: Any, hidden: list[Tensor]) -> list[Tensor]:
        seen.append(hidden[0].shape[0])
        return own(self, hidden)

    monkeypatch.setattr(reduce_rows._Tensors, "logits", counted)
    return seen


def cross_entropy(logits: Any) -> Tensor:
    return F.cross_entropy(logits, LABELS)


def capped(logits: Any) -> Tensor:
    return F.cross_entropy((logits / 3.0).tanh() * 3.0, LABELS)


def mse(logits: Any) -> Tensor:
    return F.mse_loss(logits, TEACHER.to(logits.dtype))


EARLY: dict[str, Loss] = {
    "mean": cross_entropy,
    "sum": lambda logits: F.cross_entropy(logits, LABELS, reduction="sum") / 17,
    "smoothed": lambda logits: F.cross_entropy(logits, LABELS, label_smoothing=0.1),
    "class weights": lambda logits: F.cross_entropy(
        logits, LABELS, weight=CLASS_WEIGHTS.to(logits.dtype)
    ),
    "probabilities": lambda logits: F.cross_entropy(logits, TEACHER.to(logits.dtype)),
    "nll": lambda logits: F.nll_loss(F.log_softmax(logits, -1), LABELS),
    "distilled": lambda logits: F.kl_div(
        F.log_softmax(logits, -1), TEACHER.to(logits.dtype), reduction="batchmean"
    ),
    "of many words": lambda logits: F.binary_cross_entropy_with_logits(
        logits, (TEACHER > 0.02).to(logits.dtype)
    ),
    "squares": mse,
    "soft-capped": capped,
    "scaled": lambda logits: F.cross_entropy(logits * 0.25, LABELS),
}
LATE: dict[str, Loss] = {
    "weighted rows": lambda logits: (
        F.cross_entropy(logits, LABELS, reduction="none") * torch.linspace(0, 1, TOKENS)
    ).sum(),
    "z-loss": lambda logits: torch.logsumexp(logits, -1).square().mean(),
    "policy": lambda logits: (
        F.log_softmax(logits, -1).gather(-1, TOKENS_IN[:, None]).squeeze(-1)
        * torch.linspace(-1, 1, TOKENS)
    ).mean(),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_sum_of_rows_makes_each_tile_once(name: str, visits: list[int]) -> None:
    model, loss = make(), EARLY[name]
    expected = gradients_of(model, loss, 3.0)
    with gf.tile(model, size=SIZE, modules=[]):
        found = gradients_of(model, loss, 3.0)
        assert len(visits) == TILES
        again = gradients_of(model, loss, 3.0)
    assert error(found, expected) < 1e-12
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-13)
    assert all(torch.equal(found[key], again[key]) for key in found)


@pytest.mark.parametrize("name", LATE)
def test_what_is_no_sum_of_rows_comes_in_the_backward_pass(name: str, visits: list[int]) -> None:
    model, loss = make(), LATE[name]
    expected = gradients_of(model, loss)
    with gf.tile(model, size=SIZE, modules=[]):
        found = gradients_of(model, loss)
    assert len(visits) == 2 * TILES
    assert error(found, expected) < 1e-12


def test_a_loss_of_two_terms_on_the_same_logits() -> None:
    def loss(logits: Any) -> Tensor:
        return cross_entropy(logits) + 1e-2 * LATE["z-loss"](logits) + 0.5 * EARLY["sum"](logits)

    model = make()
    expected = gradients_of(model, loss)
    with gf.tile(model, size=SIZE):
        assert error(gradients_of(model, loss), expected) < 1e-12


def test_gradients_of_one_loss_are_there_at_a_time(visits: list[int]) -> None:
    """Those of a second loss of the same weights would take their memory once more."""

    def loss(logits: Any) -> Tensor:
        first = F.cross_entropy(logits[:14], LABELS[:14])
        return first + F.cross_entropy(logits[14:], LABELS[14:])

    model = make()
    expected = gradients_of(model, loss)
    with gf.tile(model, size=SIZE):
        assert error(gradients_of(model, loss), expected) < 1e-12
    assert visits == [7, 7, 7, 7, 1, 7, 7, 1]


def test_several_heads_each_have_their_own(visits: list[int]) -> None:
    def loss(logits: Any) -> Tensor:
        return sum(
            (F.cross_entropy(one[: TOKENS - n], LABELS[n:]) for n, one in enumerate(logits)),
            torch.zeros(()),
        )

    model = make(heads=3)
    expected = gradients_of(model, loss)
    with gf.tile(model, size=SIZE):
        assert error(gradients_of(model, loss), expected) < 1e-12
    assert len(visits) == 5 + 4 + 4


@pytest.mark.parametrize("name", EARLY)
def test_narrower_types_are_no_further_from_float64(name: str) -> None:
    loss = EARLY[name]
    for dtype in (torch.float32, torch.bfloat16):
        model = make(dtype=dtype)
        plain = gradients_of(model, loss)
        with gf.tile(model, size=SIZE):
            found = gradients_of(model, loss)
        exact = gradients_of(model.double(), loss)
        assert error(found, exact) <= max(1.02 * error(plain, exact), 2e-6)


@pytest.mark.parametrize("name", ["mean", "smoothed", "soft-capped"])
def test_autocast_is_no_further_from_float64(name: str, visits: list[int]) -> None:
    def loss(logits: Any) -> Tensor:
        return EARLY[name](logits.float())

    def run(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast(TOKENS_IN.device.type, dtype=torch.bfloat16):
            value = loss(model(TOKENS_IN))
        (value / 3).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model = make(dtype=torch.float32)
    plain = run(model)
    with gf.tile(model, size=SIZE):
        found = run(model)
    assert len(visits) == TILES
    exact = gradients_of(model.double(), EARLY[name], 1 / 3)
    del exact["loss"]
    assert error(found, exact) <= 1.05 * error(plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_predictions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = (torch.randn(64, 64) * 3).to(dtype).requires_grad_()
    head = nn.Linear(64, 32, bias=False).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.linalg.qr(torch.randn(64, 32))[0].t() * 12)
    labels = head(hidden).argmax(-1)
    probability = torch.softmax(head(hidden).float(), -1).gather(-1, labels[:, None])
    sure = (probability >= 0.999).squeeze(-1)
    assert sure.sum() > 20

    def run(head: nn.Linear, hidden: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(head(hidden)[sure].float(), labels[sure])
        of_hidden, of_weight = torch.autograd.grad(loss, [hidden, head.weight])
        return {"hidden": of_hidden, "weight": of_weight}

    plain = run(head, hidden)
    with gf.tile(head, size=9):
        found = run(head, hidden)
    exact = run(head.double(), hidden.detach().double().requires_grad_())
    assert error(found, exact) <= max(1.02 * error(plain, exact), 2e-6)


def test_every_label_ignored() -> None:
    def loss(logits: Any) -> Tensor:
        return F.cross_entropy(logits, torch.full_like(LABELS, -100))

    model = make()
    with gf.tile(model, size=SIZE):
        found = gradients_of(model, loss)
    assert found.pop("loss").isnan()
    assert all(not gradient.any() for gradient in found.values())


def test_the_graph_can_be_kept() -> None:
    model = make()
    expected = gradients_of(model, cross_entropy)
    with gf.tile(model, size=SIZE):
        model.zero_grad()
        loss = cross_entropy(model(TOKENS_IN))
    for _ in range(2):
        loss.backward(retain_graph=True)
    (3 * loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 5 * expected[name], rtol=1e-12, atol=1e-15)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("loss", [cross_entropy, capped, mse])
def test_gradients_can_be_differentiated(loss: Loss) -> None:
    model = make()

    def penalty() -> list[Tensor]:
        value = loss(model(TOKENS_IN))
        first = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return list(
            torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()))
        )

    expected = penalty()
    with gf.tile(model, size=SIZE, modules=[]):
        for found, wanted in zip(penalty(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def test_a_loss_that_nobody_may_differentiate_costs_no_gradients(visits: list[int]) -> None:
    model = make()
    with gf.tile(model, size=SIZE), torch.no_grad():
        cross_entropy(model(TOKENS_IN))
    assert len(visits) == TILES
    visits.clear()
    expected = gradients_of(model, cross_entropy)
    with gf.tile(model.eval(), size=SIZE):  # no backward pass is likely
        found = gradients_of(model, cross_entropy)
    assert len(visits) == 2 * TILES
    assert error(found, expected) < 1e-12


def test_gradients_that_nobody_asked_for_go_with_the_loss() -> None:
    model = make()
    gc.disable()
    try:
        with gf.tile(model, size=SIZE) as tiled:
            loss = cross_entropy(model(TOKENS_IN))
            head = next(iter(tiled.heads.values()))
            assert head._early() is not None
            del loss
            assert head._early() is None
    finally:
        gc.enable()


def test_they_can_be_left_to_the_backward_pass(visits: list[int]) -> None:
    model = make()
    expected = gradients_of(model, cross_entropy)
    with gf.tile(model, size=SIZE, gradients_early=False):
        found = gradients_of(model, cross_entropy)
    assert len(visits) == 2 * TILES
    assert error(found, expected) < 1e-12


@pytest.mark.parametrize("frozen", ["heads", "embed body"])
def test_where_only_some_is_trained(frozen: str) -> None:
    model = make()
    for name in frozen.split():
        getattr(model, name).requires_grad_(False)
    expected = gradients_of(model, cross_entropy)
    with gf.tile(model, size=SIZE):
        assert error(gradients_of(model, cross_entropy), expected) < 1e-12


def test_a_hook_is_called_once_with_the_gradient() -> None:
    model = make()
    expected = gradients_of(model, cross_entropy)
    seen: list[Tensor] = []
    weight = model.heads[0].weight
    assert isinstance(weight, Tensor)
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))  # type: ignore[no-untyped-call]
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(torch.zeros(())))
    with gf.tile(model, size=SIZE):
        gradients_of(model, cross_entropy)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], expected["heads.0.weight"], rtol=1e-12, atol=1e-16)


def test_micro_batches_add_up() -> None:
    model = make()
    halves = [slice(0, 14), slice(14, None)]

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        for half in halves:
            F.cross_entropy(model(TOKENS_IN[half]), LABELS[half], reduction="sum").backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = run()
    with gf.tile(model, size=SIZE):
        assert error(run(), expected) < 1e-12


def test_a_loss_scaler(visits: list[int]) -> None:
    """In float16 small gradients are lost before the scale comes: they wait for it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for dtype, times in ((torch.float32, 1), (torch.float16, 2)):
        model = make(dtype=dtype)
        plain = gradients_of(model, lambda logits: scaler.scale(cross_entropy(logits.float())))
        visits.clear()
        with gf.tile(model, size=SIZE):
            found = gradients_of(model, lambda logits: scaler.scale(cross_entropy(logits.float())))
        assert len(visits) == times * TILES
        exact = gradients_of(model.double(), lambda logits: 2.0**14 * cross_entropy(logits))
        assert error(found, exact) <= max(1.02 * error(plain, exact), 2e-6)


def test_a_forward_that_is_run_again_computes_no_gradients(visits: list[int]) -> None:
    model = make()
    expected = gradients_of(model, cross_entropy)

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens))

    with gf.tile(model, size=SIZE):
        model.zero_grad()
        value = checkpoint(loss, TOKENS_IN, use_reentrant=False)
        assert isinstance(value, Tensor)
        value.backward()
    assert len(visits) <= 3 * TILES
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert error({"loss": value, **found}, expected) < 1e-12


def test_in_a_scope_they_are_rebuilt_bit_by_bit() -> None:
    model = make()
    with gf.tile(model, size=SIZE):
        expected = gradients_of(model, cross_entropy)
        model.zero_grad()
        with gf.CheckpointScope("loss"):
            loss = cross_entropy(model(TOKENS_IN))
        loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name])


def test_they_take_no_more_memory_than_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(64, 5000, bias=False), torch.randn(512, 64)
    peaks = []
    for early in (True, False):
        head.zero_grad()
        with gf.tile(head, size=64, gradients_early=early), gf.meter(head, hidden) as live:
            F.cross_entropy(head(hidden.requires_grad_()), torch.arange(512)).backward()
        peaks.append(live.peak_bytes)
    assert peaks[0] <= 1.01 * peaks[1]
