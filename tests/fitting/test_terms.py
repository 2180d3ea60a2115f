"""Losses whose terms are over different items, and losses with clamped divisors: cut, each is the
whole batch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Any]
ROWS, LENGTH = 12, 5


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.0))
        self.first, self.second, self.score = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return self.first(h), self.second(h), self.score(h).squeeze(-1)


def batch_of(seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, 4, (ROWS, LENGTH), generator=g) for _ in range(2))
    first[torch.rand(ROWS, LENGTH, generator=g) < 0.5] = -100
    second[torch.rand(ROWS, LENGTH, generator=g) < 0.2] = -100
    first[:, 0], second[:, 0] = 1, 2
    mask = (torch.rand(ROWS, LENGTH, generator=g) < 0.4).double()
    mask[:5, 0] = 1.0
    mask[6:8] = 0.0  # two rows without items
    x = torch.randn(ROWS, LENGTH, 6, generator=g, dtype=torch.float64)
    return {
        "x": x,
        "first": first,
        "second": second,
        "mask": mask,
        "y": torch.randn(ROWS, generator=g).double(),
    }


def two_labels(model: nn.Module, b: Batch) -> Tensor:
    first, second, _ = model(b["x"])
    return F.cross_entropy(first.flatten(0, 1), b["first"].flatten()) + 0.3 * F.cross_entropy(
        second.flatten(0, 1), b["second"].flatten()
    )


def tokens_and_rows(model: nn.Module, b: Batch) -> Tensor:
    first, _, score = model(b["x"])
    return F.cross_entropy(first.flatten(0, 1), b["first"].flatten()) + F.mse_loss(
        score.mean(1), b["y"]
    )


def tokens_and_a_sum(model: nn.Module, b: Batch) -> Tensor:
    first, _, score = model(b["x"])
    return F.cross_entropy(first.flatten(0, 1), b["first"].flatten()) + 0.01 * score.square().sum()


def with_a_penalty(model: nn.Module, b: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    first, second, score = model(b["x"])
    ce = F.cross_entropy(first.flatten(0, 1), b["first"].flatten())
    masked = (score.square() * b["mask"]).sum() / b["mask"].sum()
    z = (second.logsumexp(-1) ** 2).mean()
    return ce + masked + 1e-2 * z, {"ce": ce.detach()}


def two_labels_and_decay(model: nn.Module, b: Batch) -> Tensor:
    return two_labels(model, b) + 1e-2 * sum(
        (p.square().sum() for p in model.parameters()), torch.zeros(())
    )


def clamped(model: nn.Module, b: Batch) -> Tensor:
    return (model(b["x"])[2].square() * b["mask"]).sum() / b["mask"].sum().clamp(min=1)


def clamped_number(model: nn.Module, b: Batch) -> Tensor:
    return (model(b["x"])[2].square() * b["mask"]).sum() / max(1, int(b["mask"].sum()))


def clamped_fractions(model: nn.Module, b: Batch) -> Tensor:
    weights = 0.2 * b["mask"]
    return (model(b["x"])[2].square() * weights).sum() / weights.sum().clamp_min(1.0)


def clamped_beside_another(model: nn.Module, b: Batch) -> Tensor:
    return clamped(model, b) + two_labels(model, b)


def plus_epsilon(model: nn.Module, b: Batch) -> Tensor:
    return (model(b["x"])[2].square() * b["mask"]).sum() / (b["mask"].sum() + 1e-8)


def by_reciprocal(model: nn.Module, b: Batch) -> Tensor:
    return (model(b["x"])[2].square() * b["mask"]).sum() * (1.0 / b["mask"].sum().clamp(min=1))


def by_where(model: nn.Module, b: Batch) -> Tensor:
    total, count = (model(b["x"])[2].square() * b["mask"]).sum(), b["mask"].sum()
    return torch.where(count > 0, total / count.clamp(min=1), total * 0)


def by_if(model: nn.Module, b: Batch) -> Tensor:
    total, count = (model(b["x"])[2].square() * b["mask"]).sum(), b["mask"].sum()
    return total / count if count > 0 else total * 0


def by_einsum(model: nn.Module, b: Batch) -> Tensor:
    return torch.einsum("rl,rl->", model(b["x"])[2].square(), b["mask"]) / b["mask"].sum()


EXACT: list[LossFunction] = [
    two_labels, tokens_and_rows, tokens_and_a_sum, with_a_penalty, two_labels_and_decay, clamped,
    clamped_number, clamped_fractions, clamped_beside_another, plus_epsilon, by_reciprocal,
    by_where, by_if, by_einsum,
]  # fmt: skip


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Heads().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def whole_batch(loss_fn: LossFunction, batch: Batch) -> tuple[float, list[Tensor]]:
    model, optimizer = made()
    result = loss_fn(model, batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    optimizer.step()
    return float(loss.detach()), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("loss_fn", EXACT, ids=lambda f: f.__name__)
def test_a_cut_batch_is_the_whole_one(loss_fn: LossFunction, size: int) -> None:
    model, optimizer = made()
    sample, batch = batch_of(), batch_of(seed=1)
    step = gf.fit(model, optimizer, loss_fn, sample, memory="1 GiB", micro_batch=size)
    for parameter, start in zip(model.parameters(), made()[0].parameters(), strict=True):
        assert torch.equal(parameter, start)
    result = step(batch)
    loss, expected = whole_batch(loss_fn, batch)
    assert result.micro_batches == -(-ROWS // size)
    close = 1e-7 if loss_fn is plus_epsilon else 1e-10  # each part has an epsilon of its own
    assert result.loss == pytest.approx(loss, rel=close)
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, other, rtol=10 * close, atol=close / 100)


def full(batch: Batch) -> Batch:
    """The same without padding."""
    labels = {name: batch[name].clamp(min=0) for name in ("first", "second")}
    return {**batch, **labels, "mask": torch.ones_like(batch["mask"])}


@pytest.mark.parametrize("loss_fn", EXACT, ids=lambda f: f.__name__)
def test_padding_that_the_sample_did_not_have(loss_fn: LossFunction) -> None:
    model, optimizer = made()
    step = gf.fit(model, optimizer, loss_fn, full(batch_of()), memory="1 GiB", micro_batch=2)
    for seed in (1, 2):
        batch = batch_of(seed)
        start = copy.deepcopy(model)
        loss = loss_fn(start, batch)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        torch.optim.SGD(start.parameters(), lr=0.5).step()
        step(batch)
        for parameter, other in zip(model.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-9)


def test_a_term_that_scales_another_is_not_cut() -> None:
    """By values its parts add up by rows; their gradients do not."""

    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        first, _, score = model(b["x"])
        one, other = (
            F.cross_entropy(first.flatten(0, 1), b["first"].flatten()),
            score.square().mean(),
        )
        return one + other * (one.detach() / other.detach())

    with pytest.raises(gf.MisuseError, match="does not add up"):
        gf.fit(*made(), loss_fn, full(batch_of()), memory="1 GiB", micro_batch=3)


def test_an_audit_weighs_the_terms_too() -> None:
    model, _ = made()
    plan = gf.plan(
        gf.profile(model, two_labels, batch_of()), memory="1 GiB", batch_size=ROWS, micro_batch=3
    )
    report = gf.audit(model, two_labels, batch_of(seed=1), plan)
    assert report.exact, report


def test_dropout_draws_the_same_whether_parts_are_counted_or_not() -> None:
    """The forward that counts leaves no trace: the loss is that of the passes which follow."""

    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        return two_labels(model, b)

    model, optimizer = made()
    model.body[2].p = 0.5
    step = gf.fit(model, optimizer, loss_fn, batch_of(), memory="1 GiB", micro_batch=4)
    torch.manual_seed(5)
    expected = _by_hand(copy.deepcopy(model), batch_of(seed=2), 4)
    torch.manual_seed(5)
    assert step(batch_of(seed=2)).loss == pytest.approx(expected, rel=1e-10)


def _by_hand(model: nn.Module, batch: Batch, size: int) -> float:
    sums = [0.0, 0.0]
    for start in range(0, ROWS, size):
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        first, second, _ = model(part["x"])
        for place, (logits, name) in enumerate(((first, "first"), (second, "second"))):
            loss = F.cross_entropy(logits.flatten(0, 1), part[name].flatten(), reduction="sum")
            sums[place] += float(loss.detach())
    counts = [int((batch[name] != -100).sum()) for name in ("first", "second")]
    return sums[0] / counts[0] + 0.3 * sums[1] / counts[1]


def test_a_divisor_that_is_drawn_is_refused() -> None:
    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        state["calls"] += 1
        drawn = (b["mask"].sum() + 0.01 * state["calls"]) if state["late"] else b["mask"].sum()
        return two_labels(model, b) + (model(b["x"])[2].square() * b["mask"]).sum() / drawn

    state = {"calls": 0, "late": False}
    model, optimizer = made()
    step = gf.fit(model, optimizer, loss_fn, batch_of(), memory="1 GiB", micro_batch=4)
    before = copy.deepcopy(model.state_dict())
    state["late"] = True
    with pytest.raises(gf.MisuseError, match=r"when it was counted.*gf\.Loss"):
        step(batch_of(seed=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_terms_that_torch_has_added_up_are_refused_by_their_name_where_a_part_has_no_items() -> (
    None
):
    def smoothed(model: nn.Module, b: Batch) -> Tensor:
        logits, labels = model(b["x"])[0].flatten(0, 1), b["first"].flatten()
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    model, sample = Heads().double(), batch_of()
    step = gf.fit(
        model, torch.optim.SGD(model.parameters()), smoothed, sample, memory=None, micro_batch=1
    )
    sample["first"][3] = -100
    with pytest.raises(gf.MisuseError, match=r"label_smoothing=.*Return gf\.Loss"):
        step(sample)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_loss_that_differentiates_inside_itself_is_counted_as_any_other(rows: int) -> None:
    """Of one row, whether it says a count is asked; of several, parts without items are counted."""

    def sloped(model: nn.Module, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_()
        score = model(x).squeeze(-1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = ((slope - 1).square().sum(-1) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
        return penalty + score.square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    b = {"x": torch.randn(rows, 4).double(), "mask": torch.ones(rows).double()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gf.fit(model, optimizer, sloped, b, memory=None, micro_batch=1)
    b["mask"][1:3] = 0
    plain = copy.deepcopy(model)
    sloped(plain, b).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert step(b).micro_batches == rows
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, other, rtol=1e-12, atol=1e-14)


def test_one_sum_under_two_divisors_is_refused_or_left_whole() -> None:
    def loss_fn(model: nn.Module, b: Batch) -> Tensor:
        total = (model(b["x"])[2].square() * b["mask"]).sum()
        return total / b["mask"].sum() + 0.1 * total

    model, optimizer = made()
    step = gf.fit(model, optimizer, loss_fn, batch_of(), memory="1 GiB")
    with pytest.raises(gf.MisuseError):
        gf.fit(*made(), loss_fn, batch_of(), memory="1 GiB", micro_batch=3)(batch_of())
    result = step(batch_of(seed=1))
    assert result.loss == pytest.approx(whole_batch(loss_fn, batch_of(seed=1))[0], rel=1e-10)
