"""`weight="auto"`: windows of means whose denominators are read from their graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradfit as gf

ROWS, CLASSES = 16, 5
CUTS = ((0, 3), (3, 8), (8, 9), (9, 16))


def task() -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, CLASSES, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (ROWS,)).masked_fill(torch.rand(ROWS) < 0.5, -100)
    return model, torch.randn(ROWS, 4, dtype=torch.float64), targets


_WEIGHTS = torch.tensor([0.1, 0.7, 1.3, 0.9, 0.35]).double()
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "padding": lambda scores, targets: F.cross_entropy(scores, targets),
    "class weights": lambda scores, targets: F.cross_entropy(
        scores, targets, weight=torch.arange(1.0, 6).double()
    ),
    "label smoothing": lambda scores, targets: F.cross_entropy(
        scores, targets, label_smoothing=0.1
    ),
    "masked by hand": lambda scores, targets: (
        (scores.sum(1) * (targets >= 0)).sum() / (targets >= 0).sum()
    ),
    "class weights and label smoothing": lambda scores, targets: F.cross_entropy(
        scores,
        targets,
        weight=_WEIGHTS,
        label_smoothing=0.1,
    ),
    "mean over the mask's mean": lambda scores, targets: (
        (scores.sum(1) * (targets >= 0)).mean() / (targets >= 0).double().mean()
    ),
    "mean squares over the mask's mean": lambda scores, targets: (
        F.mse_loss(scores * (targets >= 0)[:, None], torch.zeros_like(scores))
        / (targets >= 0).double().mean()
    ),
    "rows' means, added and divided": lambda scores, _: scores.square().mean(1).sum() / len(scores),
    "rows added, then their mean, divided": lambda scores, _: (
        scores.square().sum(0).mean() / len(scores)
    ),
    "flattened": lambda scores, _: scores.square().mean(1).view(-1).sum() / len(scores),
    "sum over rows, divided by their number and by two": lambda scores, _: (
        scores.square().sum() / len(scores) / 2
    ),
    "half of a sum over its rows": lambda scores, _: 0.5 * scores.square().sum() / len(scores),
    "sum over its elements": lambda scores, _: scores.square().sum() / scores.numel(),
    "flattened before it is added up": lambda scores, _: scores.reshape(-1).sum() / len(scores),
    "divergence of distributions": lambda scores, _: F.kl_div(
        scores.log_softmax(-1), torch.full_like(scores, 0.2), reduction="batchmean"
    ),
    "probabilities": lambda scores, _: F.cross_entropy(scores, torch.full_like(scores, 0.2)),
    "counted labels": lambda scores, targets: (
        F.cross_entropy(scores, targets, reduction="sum") / int((targets >= 0).sum())
    ),
    "weights of labels": lambda scores, targets: (
        F.cross_entropy(scores, targets, weight=_WEIGHTS, reduction="none").sum()
        / _WEIGHTS[targets[targets >= 0]].sum()
    ),
    "picked": lambda scores, targets: scores[targets >= 0].sum() / (targets >= 0).sum(),
    "chosen": lambda scores, targets: (
        torch.where((targets >= 0)[:, None], scores, 0.0).sum() / ((targets >= 0).sum() + 1e-8)
    ),
    "masked out": lambda scores, targets: (
        scores.masked_fill((targets < 0)[:, None], 0.0).sum() / int((targets >= 0).sum())
    ),
    "masked elements": lambda scores, targets: (
        (scores * (targets >= 0)[:, None]).sum() / ((targets >= 0).sum() * CLASSES)
    ),
    "masked before it is squared": lambda scores, targets: (
        (scores * (targets >= 0)[:, None]).square().sum() / (targets >= 0).sum()
    ),
    "a product with the mask": lambda scores, targets: (
        scores.sum(1).dot((targets >= 0).double()) / (targets >= 0).sum()
    ),
    "weighted by the mask": lambda scores, targets: (
        F.binary_cross_entropy_with_logits(
            scores, scores.detach() * 0, (targets >= 0)[:, None].double(), reduction="sum"
        )
        / (targets >= 0).sum()
    ),
    "mean over the mask's mean, a number": lambda scores, targets: (
        (scores.sum(1) * (targets >= 0)).mean() / (targets >= 0).double().mean().item()
    ),
    "divided by a tensor": lambda scores, _: scores.square().mean() / torch.tensor(3.0),
    "columns' means": lambda scores, _: scores.square().mean(0).sum(),
    "for each step": lambda scores, targets: F.cross_entropy(scores, targets) / 4,
    "rows": lambda scores, targets: scores.square().mean() + 0.1 * scores.abs().mean(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_window_is_the_full_batch(kind: str) -> None:
    model, x, targets = task()
    loss_of = LOSSES[kind]
    expected = torch.autograd.grad(loss_of(model(x), targets), tuple(model.parameters()))
    acc = gf.GradientAccumulator(steps=len(CUTS), parameters=model.parameters())
    for start, end in CUTS:
        acc.backward(loss_of(model(x[start:end]), targets[start:end]), weight="auto")
        acc.step()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


def test_a_micro_batch_of_padding_alone_contributes_nothing() -> None:
    model, x, targets = task()
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    acc.backward(F.cross_entropy(model(x[:3]), torch.full((3,), -100)), weight="auto")
    acc.step()
    acc.backward(F.cross_entropy(model(x), targets), weight="auto")
    acc.step()
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), targets), model.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(model.weight.grad, expected)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a sum": (lambda scores: scores.sum(), "is a sum"),
    "a sum of rows' means": (lambda scores: scores.mean(1).sum(), "is a sum"),
    "a mean of sums over rows": (lambda scores: scores.sum(0).mean(), "is a sum"),
    "unknown": (lambda scores: scores.max(), "MaxBackward1"),
    "an unknown term": (lambda scores: scores.mean() + scores.norm(), "LinalgVectorNormBackward0"),
    "two denominators": (
        lambda scores: scores.mean() + scores[:2].mean(),
        "mean over 80 . mean over 10.*terms=",
    ),
    "a sum over a constant": (
        lambda scores: scores.sum() / 7,
        r"divided by 7, .* Pass .* backward\(loss_sum, weight=n, reduction='sum'\)",
    ),
    "a sum over a tensor": (lambda scores: scores.sum() / torch.tensor(7.0), "divided by 7"),
    "a sum over a root": (lambda scores: scores.sum() / len(scores) ** 0.5, "divided by 4"),
    "a sum over more than its rows": (
        lambda scores: scores.sum() / (len(scores) + 1),
        "divided by 17",
    ),
    "a masked sum over more than the mask": (
        lambda scores: (scores[:, 0] * (scores[:, 0] > 0)).sum() / ((scores[:, 0] > 0).sum() + 1),
        "divided by",
    ),
    "a sum over two constants": (lambda scores: scores.sum() / 2 / 7, "divided by 7 and by 2"),
    "weights of classes alone": (
        lambda scores: (scores * _WEIGHTS).sum() / _WEIGHTS.sum(),
        "divided by 3.35",
    ),
    "rows' means over a constant": (lambda scores: scores.mean(1).sum() / 7, "divided by 7"),
    "a mean that is made a sum": (
        lambda scores: scores.mean() * len(scores) / 64,
        r"multiplied by 16, .* Leave `\* 16 / 64` out",
    ),
    "a penalty that is a sum": (
        lambda scores: scores.mean() + scores.sum(),
        "several denominators",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_before_anything_is_added(kind: str) -> None:
    model, x, _ = task()
    loss_of, message = REFUSED[kind]
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    with pytest.raises(gf.MisuseError, match=message):
        acc.backward(loss_of(model(x)), weight="auto")
    assert acc.current_step == 0
    assert all(parameter.grad is None for parameter in model.parameters())


CHANGING: dict[str, Callable[[Tensor], Tensor]] = {
    "share of the rows": lambda scores: scores.mean() * (len(scores) / ROWS),
    "root of the rows": lambda scores: scores.mean() / len(scores) ** 0.5,
    "deviation": lambda scores: scores.mean() / scores.detach().std(),
    "a term more": lambda scores: (
        scores.mean() + scores.abs().mean() if len(scores) > 4 else scores.mean()
    ),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_factor_that_changes_within_a_window_is_refused(kind: str) -> None:
    model, x, _ = task()
    loss_of = CHANGING[kind]
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    acc.backward(loss_of(model(x[:4])), weight="auto")
    before = model.weight.grad.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(gf.MisuseError, match=r"changes within a window .* pass weight="):
        acc.backward(loss_of(model(x[4:])), weight="auto")
    assert torch.equal(model.weight.grad, before)  # type: ignore[arg-type]
    acc.reset()
    acc.backward(loss_of(model(x[4:])), weight="auto")  # another window


def test_a_sum_over_rows_that_is_divided_by_no_items_is_not_lost() -> None:
    """Infinite, and beside a cross-entropy over nothing NaN, as a part that has no items is."""
    model, inputs, targets = task()
    accumulator = gf.GradientAccumulator(parameters=model.parameters(), steps=2)

    def loss_of(labels: Tensor) -> Tensor:
        scores = model(inputs)
        return scores.square().sum() / (labels >= 0).sum() + F.cross_entropy(scores, labels)

    accumulator.backward(loss_of(targets), weight="auto")
    with pytest.raises(gf.MisuseError, match=r"a sum that was divided by 0.*reduction='sum'"):
        accumulator.backward(loss_of(torch.full_like(targets, -100)), weight="auto")


def test_a_factor_may_change_between_windows() -> None:
    model, x, _ = task()
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    for factor in (0.5, 0.25):
        expected = torch.autograd.grad(factor * model(x).mean(), tuple(model.parameters()))
        for rows in (x[:3], x[3:]):
            acc.backward(factor * model(rows).mean(), weight="auto")
            acc.step()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
            parameter.grad = None


CLAMPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tensor": lambda scores, mask: (scores.sum(1) * mask).sum() / mask.sum().clamp(min=1),
    "number": lambda scores, mask: (scores.sum(1) * mask).sum() / max(1, int(mask.sum())),
    "picked": lambda scores, mask: scores[mask].sum() / max(1, int(mask.sum())),
    "labels": lambda scores, mask: (
        F.cross_entropy(scores, torch.where(mask, 1, -100), reduction="sum")
        / mask.sum().clamp(min=1)
    ),
}


@pytest.mark.parametrize("kind", CLAMPED)
def test_a_part_without_items_weighs_nothing_where_its_count_is_clamped(kind: str) -> None:
    model, x, _ = task()
    loss_of, mask = CLAMPED[kind], torch.arange(ROWS) % 3 == 0
    mask[:3] = False
    expected = torch.autograd.grad(loss_of(model(x), mask), tuple(model.parameters()))
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    for part in (slice(3), slice(3, None)):
        acc.backward(loss_of(model(x[part]), mask[part]), weight="auto")
        acc.step()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", CLAMPED)
def test_of_one_row_that_is_masked_out_one_may_be_either(kind: str) -> None:
    model, x, _ = task()
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    with pytest.raises(gf.MisuseError, match=r"divided by 1, .* weight=n"):
        acc.backward(CLAMPED[kind](model(x[:1]), torch.tensor([False])), weight="auto")


def test_other_words_and_sums_are_refused() -> None:
    model, x, _ = task()
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    with pytest.raises(gf.MisuseError, match="'auto'"):
        acc.backward(model(x).mean(), weight="rows")
    with pytest.raises(gf.MisuseError, match="reduction='sum'"):
        acc.backward(model(x).sum(), weight="auto", reduction="sum")


def _mean_of_rows(scores: Iterable[Tensor], targets: Tensor) -> Tensor:
    rows = zip(scores, targets, strict=True)
    return torch.stack([F.cross_entropy(row.flatten(), target) for row, target in rows]).mean()


LOOPS: dict[str, Callable[[torch.nn.Module, Tensor, Tensor], Tensor]] = {
    "rows of one result": lambda model, x, y: _mean_of_rows(model(x), y),
    "rows run one by one": lambda model, x, y: _mean_of_rows(map(model, x), y),
    "rows picked": lambda model, x, y: _mean_of_rows((model(x)[[i]] for i in range(len(y))), y),
    "two halves": lambda model, x, y: torch.stack([*map(torch.mean, model(x).chunk(2))]).sum(),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_means_of_other_rows_each_are_refused_before_anything_is_added(kind: str) -> None:
    model, x, targets = task()
    targets = targets.clamp(min=0)
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    with pytest.raises(gf.MisuseError, match=r"in a loop over rows\. Pass weight="):
        acc.backward(LOOPS[kind](model, x[:4], targets[:4]), weight="auto")
    assert model.weight.grad is None
    assert acc.current_step == 0


def test_two_ends_of_a_span_are_over_the_same_rows() -> None:
    """As the question answering heads of transformers have it: one projection, two tasks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, dtype=torch.float64)
    x, starts, ends = torch.randn(ROWS, 6, 4).double(), *torch.randint(0, 6, (2, ROWS))

    def loss_of(rows: slice) -> Tensor:
        start, end = (part.squeeze(-1) for part in model(x[rows]).split(1, dim=-1))
        return (F.cross_entropy(start, starts[rows]) + F.cross_entropy(end, ends[rows])) / 2

    (expected,) = torch.autograd.grad(loss_of(slice(None)), model.weight)
    acc = gf.GradientAccumulator(steps=len(CUTS), parameters=model.parameters())
    for start, end in CUTS:
        acc.backward(loss_of(slice(start, end)), weight="auto")
        acc.step()
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-14)
