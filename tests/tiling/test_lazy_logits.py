"""Lazy logits against plain ones: the same numbers, the same gradients, and never there as a
whole.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradfit as gf
from gradfit.batches.denominator import read_denominator
from gradfit.tiling import lazy_functions  # noqa: F401
from gradfit.tiling.cut import Cut
from gradfit.tiling.lazy import Head, LazyLogits

WORDS, FEATURES = 50, 8
LABELS = torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))
LABELS[0, 3] = -100
Loss = Callable[[Any], Tensor]


class Parts:
    """Hidden states, weights and bias, and both kinds of logits of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> None:
        make = torch.Generator().manual_seed(0)
        self.x = (
            torch.randn(2, 7, FEATURES, dtype=torch.float64, generator=make)
            .to(dtype)
            .requires_grad_()
        )
        self.weight = (
            scale * torch.randn(WORDS, FEATURES, dtype=torch.float64, generator=make)
        ).to(dtype)
        self.bias = torch.randn(WORDS, dtype=torch.float64, generator=make).to(dtype)
        self.weight.requires_grad_()
        self.bias.requires_grad_()
        self.head = Head("head", Cut(3))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weight, self.bias]

    def plain(self) -> Tensor:
        return F.linear(self.x.sin(), self.weight, self.bias)

    def lazy(self) -> Any:
        return LazyLogits.project(self.x.sin(), self.weight, self.bias, self.head)

    def gradients(self, loss: Loss, logits: Any) -> list[Tensor]:
        value = loss(logits)
        return [value.detach(), *torch.autograd.grad(value, self.leaves, allow_unused=True)]


def error(one: list[Tensor], other: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(one, other, strict=True)
    )


def flat(logits: Any) -> Any:
    return logits.view(-1, WORDS)


LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda x: F.cross_entropy(flat(x), LABELS.view(-1)),
    "shifted": lambda x: F.cross_entropy(
        flat(x[..., :-1, :].contiguous()), LABELS[..., 1:].reshape(-1)
    ),
    "sum / items": lambda x: F.cross_entropy(flat(x), LABELS.view(-1), reduction="sum") / 5,
    "by token": lambda x: (
        F.cross_entropy(flat(x), LABELS.view(-1), reduction="none").square().mean()
    ),
    "words second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS),
    "moved": lambda x: F.cross_entropy(x.movedim(-1, 1), LABELS),
    "one row": lambda x: F.cross_entropy(x[1, 2], LABELS[1, 2]),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(flat(x), LABELS.view(-1)),
    "class weights": lambda x: F.cross_entropy(
        flat(x), LABELS.view(-1), torch.linspace(0.1, 2, WORDS).to(x.dtype)
    ),
    "both": lambda x: F.cross_entropy(
        flat(x), LABELS.view(-1), torch.linspace(0.1, 2, WORDS).to(x.dtype), label_smoothing=0.2
    ),
    "probabilities": lambda x: F.cross_entropy(
        flat(x), torch.full((14, WORDS), 1 / WORDS, dtype=x.dtype)
    ),
    "another ignored": lambda x: F.cross_entropy(
        flat(x), LABELS.view(-1).clamp(min=0), ignore_index=0
    ),
    "soft cap": lambda x: F.cross_entropy(flat(torch.tanh(x / 3.0) * 3.0), LABELS.view(-1)),
    "scale": lambda x: F.cross_entropy(flat(0.7 * x / 1.5 - 1), LABELS.view(-1)),
    "another bias": lambda x: F.cross_entropy(
        flat(x + torch.ones(1, WORDS, dtype=x.dtype)), LABELS.view(-1)
    ),
    "z-loss": lambda x: (
        F.cross_entropy(flat(x), LABELS.view(-1)) + 0.1 * torch.logsumexp(x, -1).square().mean()
    ),
    "gathered": lambda x: -x.log_softmax(-1).gather(-1, LABELS.clamp(min=0)[..., None]).mean(),
    "nll": lambda x: F.nll_loss(F.log_softmax(flat(x), dim=-1), LABELS.view(-1)),
    "label smoother": lambda x: (
        (-F.log_softmax(x, dim=-1)).sum(dim=-1, keepdim=True, dtype=torch.float32).mean()
    ),
    "distilled": lambda x: F.kl_div(
        F.log_softmax(x / 2, -1), F.softmax(x.detach() * 1.1, -1), reduction="batchmean"
    ),
    "distilled by token": lambda x: (
        F.kl_div(
            x.log_softmax(-1), x.detach().log_softmax(-1) * 1.01, reduction="none", log_target=True
        )
        .sum(-1)
        .mean()
    ),
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
    "largest": lambda x: x.max(-1).values.sum() + x.topk(3).values.sum() + x.amax(-1).mean(),
    "everything": lambda x: x.square().sum(),
    "masked rows": lambda x: F.cross_entropy(x[LABELS != -100], LABELS[LABELS != -100]),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([4, 1])).logsumexp(-1).sum(),
    "flattened": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten()),
    "reshaped": lambda x: F.cross_entropy(x.reshape(14, -1), LABELS.flatten()),
    "narrowed": lambda x: (
        x.narrow(1, 2, 3).unsqueeze(1).squeeze(1).select(0, 1).logsumexp(-1).mean()
    ),
    "cloned": lambda x: F.cross_entropy(flat(x.clone()), LABELS.view(-1)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_losses_are_the_plain_ones_and_nothing_is_made_whole(name: str, size: int) -> None:
    parts = Parts()
    parts.head.cut = Cut(size)
    expected = parts.gradients(LOSSES[name], parts.plain())
    found = parts.gradients(LOSSES[name], parts.lazy())
    assert (
        error(found, expected) < 1e-7
        if name == "label smoother"
        else error(found, expected) < 1e-13
    )
    assert parts.head.reduced
    assert not parts.head.materialised
    again = parts.gradients(LOSSES[name], parts.lazy())
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize(
    "name", ["cross-entropy", "soft cap", "class weights", "distilled", "gathered"]
)
@pytest.mark.parametrize("scale", [1.0, 30.0])  # at 30 most predictions are certain
def test_narrow_types_are_as_close_to_float64_as_plain_ones(name: str, scale: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts, exact = Parts(dtype, scale), Parts(dtype, scale)
        exact.x, exact.weight, exact.bias = (
            each.detach().double().requires_grad_() for each in parts.leaves
        )
        expected = exact.gradients(LOSSES[name], exact.plain())
        plain = parts.gradients(LOSSES[name], parts.plain())
        lazy = parts.gradients(LOSSES[name], parts.lazy())
        for tiled, untiled, right in zip(lazy, plain, expected, strict=True):
            if not float(right.norm()):
                continue
            ours, theirs = error([tiled], [right]), error([untiled], [right])
            assert ours <= max(1.05 * theirs, 2e-6 if dtype is torch.float32 else 4e-3)


def test_narrow_weights_get_a_sum_in_float32() -> None:
    """Of 512 tiles of one row: added up in bfloat16, small terms would be lost."""
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.long)
    logits = LazyLogits.project(hidden, weight, None, Head("", Cut(1)))
    F.cross_entropy(logits.float(), labels, reduction="sum").backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]


def test_all_labels_ignored_is_as_torch_has_it() -> None:
    parts = Parts()
    ignored = torch.full((14,), -100)
    for reduction in ("mean", "sum"):
        found = parts.gradients(
            lambda x, r=reduction: F.cross_entropy(flat(x), ignored, reduction=r), parts.lazy()
        )
        expected = parts.gradients(
            lambda x, r=reduction: F.cross_entropy(flat(x), ignored, reduction=r), parts.plain()
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def test_certain_predictions_have_their_gradient() -> None:
    """Where p is 0.999, the label's gradient is the difference of two numbers close to 1."""
    hidden = torch.eye(2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[8.0, 0.0], [0.0, 8.0]], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([0, 1])
    lazy = LazyLogits.project(hidden, weight, None, Head("", Cut(1)))
    found = torch.autograd.grad(F.cross_entropy(lazy.float(), labels), [hidden, weight])
    plain = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, weight).float(), labels), [hidden, weight]
    )
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_the_whole_is_never_in_memory() -> None:
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(4000, 16, requires_grad=True)
    labels = torch.randint(0, 4000, (512,))
    whole = 512 * 4000 * 4
    with gf.meter(hidden, weight) as live:
        logits: Any = LazyLogits.project(hidden, weight, None, Head("", Cut(32)))
        F.cross_entropy(logits, labels).backward()
    assert live.peak_bytes < 0.35 * whole


def test_what_a_loss_was_divided_by_is_read() -> None:
    parts = Parts()
    counted = int((LABELS != -100).sum())
    for reduction, count in (("mean", counted), ("sum", None)):
        plain = read_denominator(
            F.cross_entropy(flat(parts.plain()), LABELS.view(-1), reduction=reduction)
        )
        found = read_denominator(
            F.cross_entropy(flat(parts.lazy()), LABELS.view(-1), reduction=reduction)
        )
        assert found is not None
        assert plain is not None
        assert not found.unknown
        assert [term.count for term in found.terms] == [count]
        assert found.terms[0].divisor == plain.terms[0].divisor
    weights = torch.linspace(0.1, 2, WORDS, dtype=torch.float64)
    plain, found = (
        read_denominator(F.cross_entropy(flat(logits), LABELS.view(-1), weights))
        for logits in (parts.plain(), parts.lazy())
    )
    assert found is not None
    assert plain is not None
    assert float(found.terms[0].divisor) == pytest.approx(float(plain.terms[0].divisor))


# ------------------------------------------------------------------------------- what else users do


def test_questions_are_answered_in_tiles() -> None:
    parts = Parts()
    lazy, plain = parts.lazy(), parts.plain()
    assert torch.equal(lazy.argmax(-1), plain.argmax(-1))
    assert torch.equal(lazy.topk(4).indices, plain.topk(4).indices)
    with torch.no_grad():
        assert torch.equal(lazy[:, -1].argmax(dim=-1), plain[:, -1].argmax(dim=-1))
        torch.testing.assert_close(lazy.log_softmax(-1).amax(-1), plain.log_softmax(-1).amax(-1))
    assert not parts.head.materialised
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.requires_grad) == (
        plain.shape, plain.dtype, plain.device, True,
    )  # fmt: skip
    assert lazy.size(-1) == WORDS
    assert (lazy.dim(), len(lazy), lazy.numel()) == (3, 2, plain.numel())
    assert "lazy logits of shape (2, 7, 50)" in repr(lazy)
    assert not parts.head.materialised


def test_whoever_asks_for_the_numbers_gets_them_and_it_is_said_once() -> None:
    parts = Parts()
    loss: Loss = lambda x: x.cumsum(-1).mean() + x.std() + F.cross_entropy(flat(x), LABELS.view(-1))  # noqa: E731
    with pytest.warns(
        gf.LogitsMaterialised, match=r"head were made whole, 5600 bytes, for cumsum at .*test_lazy"
    ) as said:
        found = parts.gradients(loss, parts.lazy())
    assert len(said) == 1
    expected = parts.gradients(loss, parts.plain())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Doubled(torch.autograd.Function):
    """A function that does not ask `__torch_function__` about its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: Doubled.apply(x).mean(),
        lambda x: Doubled.apply(x / 2).mean(),
        lambda x: F.cross_entropy(Doubled.apply(flat(x)), LABELS.view(-1)),
    ],
)
def test_functions_of_others_get_numbers_with_a_graph(loss: Loss) -> None:
    parts = Parts()
    assert error(parts.gradients(loss, parts.lazy()), parts.gradients(loss, parts.plain())) < 1e-13


def written(x: Any) -> Tensor:
    before = x * 2
    view = x[:, 1:]
    view.mul_(3)
    x[0, 0, :5] = 0
    x += 1
    return (
        F.cross_entropy(flat(x), LABELS.view(-1))
        + before.logsumexp(-1).mean()
        + view.sum()
        + (before + 1).std()
    )


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
def test_writing_in_place_reaches_views_and_not_copies() -> None:
    parts = Parts()
    assert (
        error(parts.gradients(written, parts.lazy()), parts.gradients(written, parts.plain()))
        < 1e-13
    )


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
def test_hooks_and_retained_gradients_see_all_numbers() -> None:
    parts, seen = Parts(), []
    for logits in (parts.plain(), parts.lazy()):
        logits.register_hook(lambda gradient: 2 * gradient)
        loss = F.cross_entropy(flat(logits), LABELS.view(-1))
        seen.append(torch.autograd.grad(loss, parts.leaves))
    assert error(list(seen[1]), list(seen[0])) < 1e-13
    lazy = parts.lazy()
    lazy.retain_grad()
    F.cross_entropy(flat(lazy), LABELS.view(-1)).backward()
    plain = parts.plain()
    plain.retain_grad()
    F.cross_entropy(flat(plain), LABELS.view(-1)).backward()
    torch.testing.assert_close(lazy.grad, plain.grad)


def test_gradients_of_gradients() -> None:
    parts = Parts()
    for name in ("cross-entropy", "soft cap", "z-loss"):
        found = []
        for logits in (parts.plain(), parts.lazy()):
            first = torch.autograd.grad(LOSSES[name](logits), parts.leaves, create_graph=True)
            found.append(
                torch.autograd.grad(sum(each.square().sum() for each in first), parts.leaves)
            )
        assert error(list(found[1]), list(found[0])) < 1e-12


def test_two_backwards_and_two_losses() -> None:
    parts = Parts()
    lazy, plain = parts.lazy(), parts.plain()
    for logits in (lazy, plain):
        loss = F.cross_entropy(flat(logits), LABELS.view(-1))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        torch.logsumexp(logits[:, 1:], -1).mean().backward()
        logits_grad = [each.grad.clone() for each in parts.leaves if each.grad is not None]
        for each in parts.leaves:
            each.grad = None
        if logits is lazy:
            found = logits_grad
    assert error(found, logits_grad) < 1e-13


def test_autocast_is_that_of_the_call() -> None:
    parts = Parts(torch.float32)

    def run(make: Callable[[], Any], *, inside: bool) -> list[Tensor]:
        with torch.autocast(LABELS.device.type, dtype=torch.bfloat16):
            logits = make()
            assert logits.dtype is torch.bfloat16
            loss = F.cross_entropy(flat(logits), LABELS.view(-1)) if inside else None
        if loss is None:
            loss = F.cross_entropy(flat(logits).float(), LABELS.view(-1))
        return [loss.detach(), *torch.autograd.grad(loss, parts.leaves)]

    for inside in (True, False):
        found, expected = run(parts.lazy, inside=inside), run(parts.plain, inside=inside)
        assert found[0].dtype is expected[0].dtype is torch.float32
        assert error(found, expected) < 5e-3


def test_the_gradient_mode_is_that_of_the_call() -> None:
    parts = Parts()
    with torch.no_grad():
        lazy = parts.lazy()
    assert not lazy.requires_grad
    assert not F.cross_entropy(flat(lazy), LABELS.view(-1)).requires_grad
    lazy = parts.lazy()
    with torch.no_grad():
        view = lazy[:, 1:]
    assert not view.requires_grad
    assert not view.logsumexp(-1).requires_grad
    assert not lazy.detach().logsumexp(-1).requires_grad
    with torch.no_grad(), pytest.warns(gf.LogitsMaterialised):
        lazy.std()
    assert (
        error(parts.gradients(torch.std, lazy), parts.gradients(torch.std, parts.plain())) < 1e-13
    )


def test_weights_that_changed_since_are_noticed() -> None:
    parts = Parts()
    lazy = parts.lazy()
    with torch.no_grad():
        parts.weight.add_(1)
    with pytest.raises(
        gf.ActivationOverwritten, match=r"weights of the projection.*before optimizer.step\(\)"
    ):
        lazy.argmax(-1)
    hidden = torch.ones(3, FEATURES, dtype=torch.float64)
    lazy = LazyLogits.project(hidden, parts.weight, None, parts.head)
    hidden.add_(1)
    with pytest.raises(gf.ActivationOverwritten, match="hidden states"):
        F.cross_entropy(lazy, torch.zeros(3, dtype=torch.long))


ROWS = torch.tensor([1, 0])
INDICES: dict[str, tuple[Any, bool]] = {  # with whether it takes rows and all their words
    "a number": (1, True),
    "a slice": (slice(None, 1), True),
    "nothing": ((), True),
    "a shift": ((..., slice(None, -1), slice(None)), True),
    "dots at the end": ((0, ...), True),
    "dots before rows": ((..., 0, slice(None)), True),
    "all of three": ((slice(None), slice(1, 3), slice(None)), True),
    "a new dimension": ((None, 1), True),
    "rows by a tensor": (ROWS, True),
    "a mask": (LABELS != -100, True),
    "one tensor and a slice": ((ROWS, slice(1, 4)), True),
    "two tensors": ((ROWS, ROWS), True),
    "a tensor and a number": ((0, ROWS), True),
    "a tensor and a new dimension": ((None, ROWS), True),
    "a list": ([1, 0], True),
    "words": ((..., 3), False),
    "a slice of words": ((..., slice(2, 5)), True),
    "a number of each": ((0, 1, 2), False),
    "a mask of everything": (torch.ones(2, 7, WORDS, dtype=torch.bool), False),
}


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_lazy_if_it_takes_rows(name: str) -> None:
    index, stays_lazy = INDICES[name]
    parts = Parts()
    found, expected = parts.lazy()[index], parts.plain()[index]
    assert (type(found) is not Tensor) == stays_lazy
    torch.testing.assert_close(found + 0, expected)


BEYOND: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(5),
    "sum": lambda x: x.sum(dim=-4),
    "transpose": lambda x: x.transpose(3, 1),
    "permute": lambda x: x.permute(0, 1, 5),
    "movedim": lambda x: x.movedim(0, -4),
    "flatten": lambda x: x.flatten(0, 4),
    "select": lambda x: x.select(3, 0),
    "unsqueeze": lambda x: x.unsqueeze(4),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_dimension_that_there_is_not_is_refused_as_by_torch(name: str) -> None:
    parts = Parts()
    with pytest.raises(IndexError) as expected:
        BEYOND[name](parts.plain())
    with pytest.raises(IndexError) as raised:
        BEYOND[name](parts.lazy())
    assert str(raised.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
def test_copies_and_files_hold_numbers(tmp_path: Any) -> None:
    parts = Parts()
    with torch.no_grad():
        lazy, plain = parts.lazy(), parts.plain()
    for other in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy)), copy.copy(lazy).numpy()):
        assert torch.equal(torch.as_tensor(other), plain)
    torch.save({"logits": lazy}, tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt")["logits"], plain)
    assert type(lazy.to("meta")) is Tensor
    assert lazy.tolist() == plain.tolist()
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(parts.lazy())  # as torch says of any result


def test_a_label_that_is_no_word_is_refused() -> None:
    parts = Parts()
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        F.cross_entropy(flat(parts.lazy()), torch.full((14,), WORDS))
    with pytest.raises(ValueError, match="batch_size"), pytest.warns(gf.LogitsMaterialised):
        F.cross_entropy(flat(parts.lazy()), torch.zeros(13, dtype=torch.long))


# ---------------------------------------------------------------------------------- random programs

CHAIN: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float().double(),
    "half": lambda x: x * 0.5,
    "cap": lambda x: torch.tanh(x / 4) * 4,
    "shift": lambda x: x[..., 1:, :] if x.dim() > 1 and x.shape[-2] > 1 else x,
    "first": lambda x: x[:1],
    "all": lambda x: x[:, :] if x.dim() > 1 else x,
    "ellipsis": lambda x: x[...],
    "flat": lambda x: x.reshape(-1, x.shape[-1]),
    "swap": lambda x: x.transpose(0, 1) if x.dim() == 3 else x,
    "extra": lambda x: x.unsqueeze(0),
    "none": lambda x: x[None],
    "step": lambda x: x[..., ::2, :] if x.dim() > 1 else x,
    "words": lambda x: x[..., :20],
    "log": lambda x: x.log_softmax(-1),
    "same": lambda x: x + x,
    "clamp": lambda x: x.clamp(-2, 2),
    "clone": lambda x: x.clone(),
    "one": lambda x: x[0] if x.dim() > 2 else x,
    "cumsum": lambda x: x.cumsum(-1),
    "mask": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < 2, -5.0),
    "fill": lambda x: x.index_fill(-1, torch.tensor([0]), 0.0),
}
ENDS: dict[str, Callable[[Any], Tensor]] = {
    "lse": lambda x: x.logsumexp(-1).sum(),
    "cross-entropy": lambda x: F.cross_entropy(
        x.reshape(-1, x.shape[-1]), torch.zeros(x[..., 0].numel(), dtype=torch.int64)
    ),
    "max": lambda x: x.max(dim=-1).values.sum(),
    "mean": lambda x: x.mean(),
    "pick": lambda x: (
        x.softmax(-1).gather(-1, torch.ones(*x.shape[:-1], 2, dtype=torch.long)).sum()
    ),
}


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(CHAIN)), max_size=6),
    st.sampled_from(sorted(ENDS)),
    st.integers(1, 9),
)
def test_random_programs(chain: list[str], end: str, size: int) -> None:
    parts = Parts()
    parts.head.cut = Cut(size)
    found = []
    for logits in (parts.plain(), parts.lazy()):
        result: Any = logits
        for name in chain:
            result = CHAIN[name](result)
        found.append((result.shape, result.dtype, parts.gradients(ENDS[end], result)))
    assert found[0][:2] == found[1][:2]
    close = {"rtol": 1e-5, "atol": 1e-6} if "float" in chain else {"rtol": 1e-11, "atol": 1e-12}
    for a, b in zip(found[1][2], found[0][2], strict=True):
        torch.testing.assert_close(a, b, **close)
