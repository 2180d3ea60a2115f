"""What a loss was divided by, read from its graph, against what the loss says of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit.batches.additivity_record import Additivity
from gradfit.batches.denominator import Denominator, read_denominator

ROWS, CLASSES = 6, 5
TARGETS = torch.tensor([0, 1, -100, 2, 3, 4])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


def scores() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, CLASSES, requires_grad=True)


def divisors(loss: Tensor) -> list[float]:
    read = read_denominator(loss)
    assert read is not None
    assert not read.unknown
    return [float(term.divisor) for term in read.terms]


def like(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5).detach()


# Each loss as a mean, the same loss as a sum over the same elements, and how many there are.
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "cross_entropy with padding": (
        lambda x: F.cross_entropy(x, TARGETS),
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum"),
    ),
    "class weights": (
        lambda x: F.cross_entropy(x, TARGETS, weight=torch.arange(1.0, 6)),
        lambda x: F.cross_entropy(x, TARGETS, weight=torch.arange(1.0, 6), reduction="sum"),
    ),
    "class probabilities": (
        lambda x: F.cross_entropy(x, like(x)),
        lambda x: F.cross_entropy(x, like(x), reduction="sum"),
    ),
    "2d": (
        lambda x: F.cross_entropy(x.T[None], TARGETS[None]),
        lambda x: F.cross_entropy(x.T[None], TARGETS[None], reduction="sum"),
    ),
    "binary": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), like(x)),
        lambda x: F.binary_cross_entropy(x.sigmoid(), like(x), reduction="sum"),
    ),
    "binary with logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, like(x)),
        lambda x: F.binary_cross_entropy_with_logits(x, like(x), reduction="sum"),
    ),
    "mse": (lambda x: F.mse_loss(x, like(x)), lambda x: F.mse_loss(x, like(x), reduction="sum")),
    "mse, the target trained": (
        lambda x: F.mse_loss(like(x), x),
        lambda x: F.mse_loss(like(x), x, reduction="sum"),
    ),
    "l1": (lambda x: F.l1_loss(x, like(x)), lambda x: F.l1_loss(x, like(x), reduction="sum")),
    "smooth l1": (
        lambda x: F.smooth_l1_loss(x, like(x)),
        lambda x: F.smooth_l1_loss(x, like(x), reduction="sum"),
    ),
    "huber": (
        lambda x: F.huber_loss(x, like(x)),
        lambda x: F.huber_loss(x, like(x), reduction="sum"),
    ),
    "kl_div, batchmean": (
        lambda x: F.kl_div(x.log_softmax(1), like(x), reduction="batchmean"),
        lambda x: F.kl_div(x.log_softmax(1), like(x), reduction="sum"),
    ),
    "soft margin": (
        lambda x: F.soft_margin_loss(x, like(x)),
        lambda x: F.soft_margin_loss(x, like(x), reduction="sum"),
    ),
    "multi margin": (
        lambda x: F.multi_margin_loss(x, TARGETS.clamp(0)),
        lambda x: F.multi_margin_loss(x, TARGETS.clamp(0), reduction="sum"),
    ),
    "multilabel margin": (
        lambda x: F.multilabel_margin_loss(x, TARGETS.clamp(0)[:, None].expand(-1, CLASSES)),
        lambda x: F.multilabel_margin_loss(
            x, TARGETS.clamp(0)[:, None].expand(-1, CLASSES), reduction="sum"
        ),
    ),
    "cosine": (
        lambda x: F.cosine_embedding_loss(x, like(x), torch.ones(ROWS)),
        lambda x: F.cosine_embedding_loss(x, like(x), torch.ones(ROWS), reduction="sum"),
    ),
    "triplet": (
        lambda x: F.triplet_margin_loss(x, x + 1, x * 2),
        lambda x: F.triplet_margin_loss(x, x + 1, x * 2, reduction="sum"),
    ),
    "gaussian": (
        lambda x: F.gaussian_nll_loss(x, like(x), like(x)),
        lambda x: F.gaussian_nll_loss(x, like(x), like(x), reduction="sum"),
    ),
    "poisson": (
        lambda x: F.poisson_nll_loss(x, like(x)),
        lambda x: F.poisson_nll_loss(x, like(x), reduction="sum"),
    ),
    "ctc": (
        lambda x: F.ctc_loss(x.log_softmax(1)[:, None], torch.tensor([[1, 2]]), (ROWS,), (1,)),
        lambda x: F.ctc_loss(
            x.log_softmax(1)[:, None], torch.tensor([[1, 2]]), (ROWS,), (1,), reduction="sum"
        ),
    ),
    "mean, then mean": (lambda x: x.mean(1).mean(), lambda x: x.sum()),
    "mean over the rows first": (lambda x: x.mean(0).mean(), lambda x: x.sum()),
    "mean, then sum": (lambda x: x.mean(0).sum(), lambda x: x.sum()),
    "masked by hand": (
        lambda x: (x.sum(1) * MASK).sum() / MASK.sum(),
        lambda x: (x.sum(1) * MASK).sum(),
    ),
    "indexed": (lambda x: x[MASK.bool()].mean(), lambda x: x[MASK.bool()].sum()),
    "multiplied by the inverse": (lambda x: x.sum() * (1 / MASK.sum()), lambda x: x.sum()),
    "nanmean": (lambda x: x.nanmean(), lambda x: x.nansum()),
    "a coefficient": (lambda x: 0.5 * x.mean(), lambda x: x.sum()),
    "divided again": (lambda x: x.mean() / 4, lambda x: x.sum()),
    "negated, from a number": (lambda x: 1 - x.mean(), lambda x: 1 - x.sum()),
    "cast and viewed": (lambda x: x.mean().double().view(1)[0], lambda x: x.sum()),
    "the mean of a mean": (lambda x: x.mean().mean(), lambda x: x.sum()),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_sum_divided_by_what_was_read_is_the_mean(kind: str) -> None:
    mean, total = PAIRS[kind]
    x = scores()
    (divisor,) = divisors(mean(x))
    (expected,) = torch.autograd.grad(total(x), x)
    (found,) = torch.autograd.grad(mean(x), x)
    torch.testing.assert_close(found * divisor, expected)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_sum_is_divided_by_nothing(kind: str) -> None:
    read = read_denominator(PAIRS[kind][1](scores()))
    assert read is not None
    assert read.is_sum
    assert [float(term.divisor) for term in read.terms] == [1.0]


def test_label_smoothing_is_two_terms_over_the_same_items() -> None:
    read = read_denominator(F.cross_entropy(scores(), TARGETS, label_smoothing=0.1))
    assert read is not None
    assert [float(term.count or 0) for term in read.terms] == [5, 5]


def test_two_denominators_are_two_terms() -> None:
    x = scores()
    read = read_denominator(F.cross_entropy(x, TARGETS) + 0.1 * x.square().mean())
    assert read is not None
    assert str(read) == "nll_loss over 5 + mean over 30"


def test_losses_in_a_stack_are_terms() -> None:
    x = scores()
    assert divisors(torch.stack([x.mean(), x[0].mean()]).sum()) == [30, 5]
    assert divisors(torch.stack([x.mean(), x[0].mean()]).mean()) == [60, 10]
    assert divisors(sum([x.mean(), x[0].mean()])) == [30, 5]  # type: ignore[arg-type]


def test_a_term_multiplied_by_zero_is_none() -> None:
    x = scores()
    assert divisors(x.mean() + 0.0 * x.sum()) == [30]


def test_a_mean_over_no_items_is_divided_by_zero() -> None:
    assert divisors(F.cross_entropy(scores(), torch.full((ROWS,), -100))) == [0]
    assert divisors(scores().sum() / torch.tensor(0.0)) == [0]
    assert divisors(scores().mean() / torch.tensor(0.0)) == [0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a custom function": lambda x: Doubled.apply(x.mean()),  # type: ignore[no-untyped-call]
    "a maximum": lambda x: x.max(),
    "a norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "divided by what is trained": lambda x: x.sum() / x.square().sum(),
    "a product of losses": lambda x: x.mean() * x.square().mean(),
    "a variance": lambda x: x.var(),
    "a leaf": lambda x: torch.ones((), requires_grad=True),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_has_no_rule_is_unknown(kind: str) -> None:
    assert read_denominator(UNKNOWN[kind](scores())) is None


def test_an_unknown_term_beside_one_that_is_read_is_named() -> None:
    x = scores()
    read = read_denominator(x.mean() + x.norm())
    assert read == Denominator(read.terms if read else (), ("LinalgVectorNormBackward0",))
    assert not read.is_sum


def test_under_autocast() -> None:
    layer = torch.nn.Linear(CLASSES, CLASSES)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert divisors(F.cross_entropy(layer(scores()), TARGETS)) == [5]


def test_no_more_than_the_scalars_behind_the_reduction_are_visited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The walk ends at the reduction, however deep the model is below it."""
    from gradfit.batches import denominator

    visited: list[str] = []
    for name, rule in list(denominator._RULES.items()):
        monkeypatch.setitem(
            denominator._RULES,
            name,
            lambda path, name=name, rule=rule: (visited.append(name), rule(path))[1],
        )
    x = scores()
    for _ in range(100):
        x = x * 1.01
    read_denominator(0.5 * F.cross_entropy(x, TARGETS))
    assert visited == ["MulBackward0", "NllLossBackward0"]


def test_a_term_for_each_of_many_parameters_is_read_and_named_once() -> None:
    parameters = [torch.ones(3, requires_grad=True) for _ in range(200)]
    loss = F.cross_entropy(scores(), TARGETS) + 0.01 * sum(p.square().sum() for p in parameters)
    read = read_denominator(loss)
    assert read is not None
    assert len(read.terms) == 201
    assert str(read) == "nll_loss over 5 + 200 × sum"


def test_a_sum_over_rows_in_python_has_a_term_for_each_row() -> None:
    loss = sum(row.mean() for row in scores().repeat(10, 1)) / 60
    assert isinstance(loss, Tensor)
    assert divisors(loss) == [300] * 60


def test_terms_that_differ_are_named_up_to_a_few() -> None:
    loss = sum(torch.ones(n, requires_grad=True).mean() for n in range(2, 12))
    assert isinstance(loss, Tensor)
    names = "mean over 2 + mean over 3 + mean over 4 + mean over 5 + mean over 6 + mean over 7"
    assert str(read_denominator(loss)) == f"{names} + 4 more"


def test_unknown_terms_are_named_however_many_others_there_are() -> None:
    known = sum(torch.ones(n, requires_grad=True).mean() for n in range(2, 12))
    norms = sum(torch.ones(3, requires_grad=True).norm() for _ in range(40))
    read = str(read_denominator(known + norms))
    assert read.endswith(" + 40 × LinalgVectorNormBackward0")
    assert Additivity("divisor", read=read).unread == ("LinalgVectorNormBackward0",)
