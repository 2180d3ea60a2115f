"""Losses as people write them, on a model in tiles: the plain numbers and gradients, and whether
the logits were ever there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfit as gf
from gradfit.tiling.lazy import LazyLogits

WORDS, WIDTH, ROWS, LENGTH = 50, 8, 2, 7
_make = torch.Generator().manual_seed(1)
LABELS = torch.randint(0, WORDS, (ROWS, LENGTH), generator=_make)
LABELS[0, 3] = -100
COUNTS = LABELS != -100
TOKENS = LABELS.clamp(min=0)
ADVANTAGE = torch.randn(ROWS, LENGTH, generator=_make, dtype=torch.float64)
BEFORE = -4 * torch.rand(ROWS, LENGTH, generator=_make, dtype=torch.float64)
TEACHER = torch.randn(ROWS, LENGTH, WORDS, generator=_make, dtype=torch.float64)
SEVERAL = (torch.rand(ROWS, LENGTH, WORDS, generator=_make) > 0.9).double()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embed(tokens).tanh())


def mean(x: Any) -> Tensor:
    return F.cross_entropy(x.view(-1, WORDS), LABELS.view(-1))


def of_labels(x: Any) -> Tensor:
    """As TRL does it for wide types: row by row."""
    chosen = torch.gather(x, -1, TOKENS.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, -1) for row in x])


def of_labels_in_narrow_types(x: Any) -> Tensor:
    rows = [
        F.log_softmax(row, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        for row, tokens in zip(x, TOKENS, strict=True)
    ]
    return torch.stack(rows)


def clipped_policy(x: Any) -> Tensor:
    ratio = torch.exp(of_labels(x / 0.9) - BEFORE)
    losses = -torch.min(ratio * ADVANTAGE, torch.clamp(ratio, 0.8, 1.2) * ADVANTAGE)
    return (losses * COUNTS).sum() / COUNTS.sum()


def preference(x: Any) -> Tensor:
    chosen, rejected = (of_labels(x) * COUNTS).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected + 0.3))


def focal(x: Any) -> Tensor:
    losses = F.cross_entropy(x.view(-1, WORDS), LABELS.view(-1), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def focal_of_softmax(x: Any) -> Tensor:
    weighted = (1 - F.softmax(x, -1)) ** 2 * F.log_softmax(x, -1)
    return -weighted.gather(-1, TOKENS[..., None]).mean()


def smoothed_by_hand(x: Any) -> Tensor:
    log = F.log_softmax(x.view(-1, WORDS), -1)
    with torch.no_grad():
        target = torch.full_like(log, 0.1 / (WORDS - 1)).scatter_(1, TOKENS.view(-1, 1), 0.9)
    return torch.mean(torch.sum(-target * log, -1))


def smoothed_by_means(x: Any) -> Tensor:
    log = F.log_softmax(x, -1)
    return -0.9 * log.gather(-1, TOKENS.unsqueeze(-1)).mean() - 0.1 * log.mean(-1).mean()


def entropy_in_chunks(x: Any) -> Tensor:
    found = []
    for chunk in x.reshape(-1, WORDS).split(4, dim=0):
        log = F.log_softmax(chunk, -1)
        found.append(-(torch.exp(log) * log).sum(-1))
    return torch.cat(found).mean()


def accuracy_beside(x: Any) -> Tensor:
    right = (x.argmax(-1) == LABELS).double().mean()
    is_sound = bool(torch.isfinite(x).all()) and not bool(torch.isnan(x).any())
    return mean(x) * (1 + right + is_sound + float(x.detach().max()))


def of_categorical(x: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=x)
    return -policy.log_prob(TOKENS).mean() - 0.01 * policy.entropy().mean()


def of_many_labels(x: Any) -> Tensor:
    p = torch.sigmoid(x)
    log, log_of_none = torch.log(p.clamp(min=1e-8)), torch.log((1 - p).clamp(min=1e-8))
    return -(SEVERAL * log + (1 - SEVERAL) * log_of_none).sum()


def picked(x: Any, rows: Any, words: Any) -> Tensor:
    found: Tensor = x.log_softmax(-1)[rows, words]
    return -found.mean()


IN_TILES: dict[str, Callable[[Any], Tensor]] = {
    "rows that count": lambda x: F.cross_entropy(
        x.view(-1, WORDS)[COUNTS.view(-1)], LABELS.view(-1)[COUNTS.view(-1)]
    ),
    "places that count": lambda x: F.cross_entropy(
        x[COUNTS.nonzero(as_tuple=True)], LABELS[COUNTS]
    ),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, WORDS), LABELS[:, 1:].flatten()),
    "rolled": lambda x: F.cross_entropy(x.roll(1, 1).view(-1, WORDS), LABELS.view(-1)),
    "masked mean": lambda x: (
        (nn.CrossEntropyLoss(reduction="none")(x.transpose(1, 2), TOKENS) * COUNTS).sum()
        / COUNTS.sum()
    ),
    "policy": clipped_policy,
    "preference": preference,
    "labels in narrow types": lambda x: -(of_labels_in_narrow_types(x) * COUNTS).sum(),
    "focal": focal,
    "focal of softmax": focal_of_softmax,
    "smoothed by hand": smoothed_by_hand,
    "smoothed by means": smoothed_by_means,
    "entropy in chunks": entropy_in_chunks,
    "accuracy beside": accuracy_beside,
    "categorical": of_categorical,
    "many labels": lambda x: F.binary_cross_entropy_with_logits(x, SEVERAL),
    "many labels, weighed": lambda x: F.binary_cross_entropy_with_logits(
        x, SEVERAL, pos_weight=torch.full((WORDS,), 3.0, dtype=x.dtype)
    ),
    "many labels by row": lambda x: (
        F.binary_cross_entropy_with_logits(x, SEVERAL, reduction="none").sum(-1).mean()
    ),
    "many labels by hand": of_many_labels,
    "probabilities of many": lambda x: F.binary_cross_entropy(torch.sigmoid(x), SEVERAL),
    "regression": lambda x: F.mse_loss(x, TEACHER) + F.smooth_l1_loss(x, TEACHER, beta=0.5),
    "regression by hand": lambda x: ((x - TEACHER) ** 2).mean() + F.l1_loss(x, TEACHER),
    "distilled": lambda x: (
        F.kl_div(F.log_softmax(x / 2, -1), F.softmax(TEACHER / 2, -1), reduction="batchmean") * 4
    ),
    "distilled the other way": lambda x: F.kl_div(
        TEACHER.log_softmax(-1), F.softmax(x, -1), reduction="batchmean"
    ),
    "a temperature for each token": lambda x: mean(x / (1 + COUNTS.double())[..., None]),
    "a temperature for each row": lambda x: mean(x / torch.tensor([1.0, 2.0])[:, None, None]),
    "a scale for each place": lambda x: mean(x * torch.arange(1, LENGTH + 1)[None, :, None]),
    "some words only": lambda x: F.cross_entropy(
        torch.where(TEACHER > 0, x, torch.tensor(-1e4, dtype=x.dtype)).view(-1, WORDS),
        TOKENS.view(-1),
    ),
    "the first words": lambda x: F.cross_entropy(
        x[..., :40].reshape(-1, 40), TOKENS.flatten() % 40
    ),
    "every other word": lambda x: x[:, 1:, 3::2].logsumexp(-1).sum(),
    "a word of each row": lambda x: picked(
        x.view(-1, WORDS), torch.arange(ROWS * LENGTH), TOKENS.view(-1)
    ),
    "words of places": lambda x: (
        -x.log_softmax(-1)[torch.arange(ROWS)[:, None], torch.arange(LENGTH), TOKENS].mean()
    ),
    "words where it counts": lambda x: -x.log_softmax(-1)[COUNTS, LABELS[COUNTS]].mean(),
    "two words": lambda x: F.softmax(x[:, -1, [3, 4]], -1)[:, 0].log().sum(),
    "one place of each row": lambda x: (
        x[torch.arange(ROWS), torch.tensor([2, 3])].logsumexp(-1).sum()
    ),
    "pieces": lambda x: (
        x.chunk(2, 1)[1].logsumexp(-1).sum()
        + torch.split(x, [3, 4], dim=1)[0].logsumexp(-1).sum()
        + x.unbind(0)[1].logsumexp(-1).sum()
        + x.tensor_split(3, 1)[2].logsumexp(-1).sum()
    ),
    "rows backwards": lambda x: x.flip(1)[:, 0].logsumexp(-1).sum(),
    "words second": lambda x: (
        -x.transpose(1, 2).log_softmax(1).gather(1, TOKENS[:, None]).mean()
        + x.mT.logsumexp(1, keepdim=True).sum()
        + (x.transpose(1, 2) / 2).topk(3, 1).values.sum()
    ),
    "logarithm of softmax": lambda x: (
        -torch.log(x.softmax(-1)).gather(-1, TOKENS[..., None]).mean()
    ),
    "expected embedding": lambda x: (
        (x.softmax(-1) @ torch.linspace(0, 1, WORDS * WIDTH, dtype=x.dtype).view(WORDS, WIDTH))
        .square()
        .mean()
    ),
    "expected number": lambda x: (
        x.softmax(-1) @ torch.linspace(0, 1, WORDS, dtype=x.dtype)
    ).mean(),
    "one hot": lambda x: -(F.one_hot(TOKENS, WORDS) * x.log_softmax(-1)).sum(-1).mean(),
    "unlikelihood": lambda x: (
        -torch.log(torch.clamp(1 - x.softmax(-1).gather(-1, TOKENS[..., None]), min=1e-5)).mean()
    ),
    "activations": lambda x: (
        (F.relu(x) + F.gelu(x) + 1 / (x.exp() + 1) + 2 ** (x / 9)).sum(-1).mean()
    ),
    "all numbers": lambda x: x.sum() + x.square().mean(),
    "checkpointed": lambda x: checkpoint(mean, x, use_reentrant=False),
    "alike": lambda x: (torch.zeros_like(x) + x).logsumexp(-1).sum() + x.new_zeros(3).sum(),
}
WHOLE: dict[str, Callable[[Any], Tensor]] = {
    "written to": lambda x: mean(x.div_(0.7)),
    "a result written to": lambda x: mean(torch.tanh((x * 1).div_(30)) * 30),
    "a result written to, and used": lambda x: after_writing(x * 1),
    "a copy written to": lambda x: mean(x.to(x.dtype, copy=True).mul_(2)) + mean(x),
    "a word banned": lambda x: (x[..., 3].fill_(-5.0), mean(x))[1],
    "the first words banned": lambda x: (x[..., :3].zero_(), mean(x))[1],
    "over tokens": lambda x: x.mean(1).square().sum(),
    "sorted": lambda x: x.sort(-1).values[..., :3].sum(),
    "one more layer": lambda x: F.linear(x, torch.ones(3, WORDS, dtype=x.dtype)).square().mean(),
    "joined": lambda x: torch.cat([x, x]).logsumexp(-1).sum(),
    "checkpointed as before": lambda x: checkpoint(mean, x, use_reentrant=True),
    "as it was called once": lambda x: F.cross_entropy(
        x.view(-1, WORDS), LABELS.view(-1), size_average=False
    ),
    "of torch.func": lambda x: torch.vmap(F.cross_entropy)(x, TOKENS).sum(),
    "largest of all": lambda x: x.max(),
}


def after_writing(x: Any) -> Tensor:
    x.div_(30)
    return mean(torch.tanh(x) * 30) + x.logsumexp(-1).sum()


def run(loss: Callable[[Any], Tensor], *, tiled: bool) -> tuple[list[Tensor], str]:
    """The loss and gradients; who needed the logits whole."""
    torch.manual_seed(0)
    model = Model().double()
    handle = gf.tile(model, size=3) if tiled else None
    logits = model(TOKENS)
    assert (type(logits) is LazyLogits) == tiled
    value = loss(logits)
    value.backward()
    whole = "" if handle is None else handle.heads["head"].materialised
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return [value.detach(), *gradients], whole


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


@pytest.mark.parametrize("name", IN_TILES)
def test_it_is_computed_in_tiles(name: str) -> None:
    expected, _ = run(IN_TILES[name], tiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gf.LogitsMaterialised)
        found, whole = run(IN_TILES[name], tiled=True)
    assert not whole
    assert error(found, expected) < 1e-12


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.checkpoint")
@pytest.mark.parametrize("name", WHOLE)
def test_it_is_right_with_all_numbers_and_that_is_said(name: str) -> None:
    expected, _ = run(WHOLE[name], tiled=False)
    with pytest.warns(gf.LogitsMaterialised, match="head were made whole, 5600 bytes, for "):
        found, _ = run(WHOLE[name], tiled=True)
    assert error(found, expected) < 1e-12


def test_writing_says_what_would_not() -> None:
    with pytest.warns(gf.LogitsMaterialised, match="writes to them. div, which makes new ones"):
        run(WHOLE["written to"], tiled=True)


@pytest.mark.filterwarnings("ignore::gradfit.LogitsMaterialised")
def test_labels_that_torch_refuses_are_refused() -> None:
    def narrow(x: Any) -> Tensor:
        return F.cross_entropy(x.view(-1, WORDS), TOKENS.view(-1).to(torch.int16))

    for tiled in (False, True):
        with pytest.raises(RuntimeError, match=r"expected (target dtype|scalar type Long)"):
            run(narrow, tiled=tiled)
