"""Writes docs/exactness.md: kinds of losses and batches, cut by `gf.fit`, against the gradient of
the full batch.

Run it with `python docs/exactness.py`; `tests/fitting/test_exactness_table.py` runs every kind and
compares the page. There are two outcomes: the gradient is that of the full batch, or `fit` refuses
to cut and says what to call instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfit as gf

PAGE = Path(__file__).with_name("exactness.md")
ROWS, MICRO_BATCH, WIDTH, CLASSES, TOKENS = 16, 3, 6, 5, 7
EXACT = 1e-12  # far above the rounding of a sum of float64, far below any mistake

Batch = dict[str, Any]
LossFunction = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Kind:
    """One way to train: a loss and a batch, and what `fit` is to do with it."""

    name: str
    loss_fn: LossFunction
    refused: str = ""
    """Where it cannot be cut: words of the call that the message names."""
    model: Callable[[], nn.Module] | None = None
    batch: Callable[[], Batch] | None = None
    split: Callable[[Batch, int], Iterable[Batch]] | None = None
    misuse: bool = False
    """The call itself cannot be right: it is refused whether or not the batch would be cut."""


@dataclass(frozen=True)
class Outcome:
    """What `fit` did: the error of the gradient in micro-batches, or the message; and the error in
    one piece.
    """

    error: float | None
    refused: str
    whole_error: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.error is not None and self.error <= EXACT


class Caught(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    gradients: list[Tensor]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in held]


def run(kind: Kind) -> Outcome:
    """Fit the kind in micro-batches of 3, and again as `fit` itself would have it."""
    batch = (kind.batch or tokens)()
    try:
        error = _error_of(kind, batch, MICRO_BATCH)
    except gf.MisuseError as problem:
        return Outcome(None, str(problem), None if kind.misuse else _error_of(kind, batch, None))
    return Outcome(error, "")


def _error_of(kind: Kind, batch: Batch, micro_batch: int | None) -> float:
    torch.manual_seed(0)
    model = (kind.model or network)().double()
    expected = _full_gradients(model, kind.loss_fn, batch)
    optimizer = Caught(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = gf.fit(
            model,
            optimizer,
            kind.loss_fn,
            batch,
            memory="64 MiB",
            micro_batch=micro_batch,
            split=kind.split,
        )
        result = step(batch)
    assert result.micro_batches == (1 if micro_batch is None else math.ceil(ROWS / micro_batch))
    difference = sum(
        float((a - b).square().sum()) for a, b in zip(optimizer.gradients, expected, strict=True)
    )
    return math.sqrt(difference / sum(float(b.square().sum()) for b in expected))


def _full_gradients(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> list[Tensor]:
    """By plain autograd, in one piece; buffers come back as they were."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    result = loss_fn(
        model, {name: getattr(value, "content", value) for name, value in batch.items()}
    )
    if isinstance(result, gf.Loss):
        loss = result.sum / result.count
    elif isinstance(result, tuple) and not isinstance(result[1], dict):
        loss = result[0] / result[1]
    else:
        loss = result[0] if isinstance(result, tuple) else result
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for buffer, content in before:
        buffer.copy_(content)
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), found, strict=True)
    ]


# -- models and batches --------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, CLASSES))


def deep_network() -> nn.Module:
    """With more parameters than a loss usually has terms."""
    hidden = [nn.Linear(12, 12) for _ in range(20)]
    return nn.Sequential(nn.Linear(WIDTH, 12), *hidden, nn.Linear(12, CLASSES))


def with_norm(*, frozen: bool) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, CLASSES)
    )
    model[1].train(not frozen)
    return model


class Recurrent(nn.Module):
    """Time first, as torch's recurrent networks have it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0])
        return out


class Experts(nn.Module):
    """Two experts and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x).softmax(-1)
        return sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), gate  # type: ignore[return-value]


class Graphs(nn.Module):
    """A layer that adds up what a node's neighbours send."""

    def __init__(self) -> None:
        super().__init__()
        self.send, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        sent = torch.zeros(len(x), 8, dtype=x.dtype).index_add(
            0, edges[1], self.send(x).relu()[edges[0]]
        )
        out: Tensor = self.head(torch.zeros(graphs, 8, dtype=x.dtype).index_add(0, graph, sent))
        return out


class Words(nn.Module):
    """The mean of a row's embeddings."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, **options), nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(words).mean(1))
        return out


class RunningMean(nn.Module):
    """Takes a mean over its rows into a buffer, and subtracts that, or only writes it down."""

    def __init__(self, *, subtracts: bool) -> None:
        super().__init__()
        self.net, self.subtracts = network(), subtracts
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x - self.mean if self.subtracts else x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.batches += 1
        return out


class Codebook(nn.Module):
    """The nearest of some codes, which are averages of what was nearest to them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        codes = self.codes[nearest]
        with torch.no_grad():
            for code in nearest.unique():
                self.codes[code] = self.codes[code].lerp(z[nearest == code].mean(0), 0.1)
        rebuilt = F.mse_loss(self.decode(z + (codes - z).detach()), x)
        return rebuilt + F.mse_loss(z, codes)


class Queue(nn.Module):
    """MoCo: keys of earlier rows are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("keys", F.normalize(torch.randn(32, CLASSES)))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.net(x))
        with torch.no_grad():
            key = F.normalize(self.net(other))
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.keys.T.clone()], 1)
        self.keys.copy_(torch.cat([key, self.keys])[:32])
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


class Normalised(torch.autograd.Function):
    """Its gradient has the norm 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def hooked(hook: Callable[[Tensor], Tensor]) -> nn.Module:
    model = network()
    model[0].weight.register_hook(hook)
    return model


def spectral() -> nn.Module:
    first = nn.utils.spectral_norm(nn.Linear(WIDTH, 12))
    return nn.Sequential(first, nn.GELU(), nn.Linear(12, CLASSES))


def tokens(length: int = TOKENS) -> Batch:
    """Rows of tokens, some of which are padding."""
    torch.manual_seed(1)
    labels = torch.randint(0, CLASSES, (ROWS, length))
    lengths = torch.randint(1, length + 1, (ROWS,))
    mask = torch.arange(length) < lengths[:, None]
    return {
        "x": torch.randn(ROWS, length, WIDTH).double(),
        "labels": labels.masked_fill(~mask, -100),
        "full": labels,
        "mask": mask.double(),
        "target": torch.randn(ROWS, length, CLASSES).double(),
        "weight": torch.rand(ROWS).double() + 0.1,
        "lengths": lengths,
    }


def rows() -> Batch:
    """One vector a row."""
    torch.manual_seed(2)
    return {
        "x": torch.randn(ROWS, WIDTH).double(),
        "y": torch.randint(0, CLASSES, (ROWS,)),
        "other": torch.randn(ROWS, WIDTH).double(),
        "advantage": torch.randn(ROWS).double(),
        "old": torch.randn(ROWS).double() * 0.1 - 1.6,
        "noise": torch.randn(ROWS, WIDTH).double(),
        "time": torch.rand(ROWS, 1).double(),
        "soft": torch.rand(ROWS, CLASSES).double().softmax(-1),
        "mask_a": torch.rand(ROWS) < 0.5,
        "mask_b": torch.rand(ROWS) < 0.7,
        "words": torch.randint(0, 20, (ROWS, 4)),
    }


def rows_with(**entries: Any) -> Callable[[], Batch]:
    return lambda: {**rows(), **entries}


def time_first() -> Batch:
    torch.manual_seed(3)
    return {
        "x": torch.randn(TOKENS + 2, ROWS, WIDTH).double(),
        "labels": torch.randint(0, CLASSES, (TOKENS + 2, ROWS)),
    }


def split_second(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, batch["x"].size(1), size):
        yield {name: value[:, start : start + size] for name, value in batch.items()}


def graphs() -> Batch:
    """Graphs of different sizes as one: nodes and edges of all, and which graph each node is of."""
    torch.manual_seed(4)
    sizes = torch.randint(2, 6, (ROWS,)).tolist()
    graph = torch.repeat_interleave(torch.arange(ROWS), torch.tensor(sizes))
    starts = [sum(sizes[:i]) for i in range(ROWS)]
    edges = torch.cat(
        [torch.randint(0, n, (2, 2 * n)) + s for n, s in zip(sizes, starts, strict=True)], 1
    )
    return {
        "x": torch.randn(len(graph), WIDTH).double(),
        "edges": edges,
        "graph": graph,
        "y": torch.randint(0, CLASSES, (ROWS,)),
    }


def split_graphs(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, len(batch["y"]), size):
        end = min(start + size, len(batch["y"]))
        nodes = (batch["graph"] >= start) & (batch["graph"] < end)
        first = int(nodes.nonzero()[0])
        inside = nodes[batch["edges"][0]]
        yield {
            "x": batch["x"][nodes],
            "edges": batch["edges"][:, inside] - first,
            "graph": batch["graph"][nodes] - start,
            "y": batch["y"][start:end],
        }


# -- losses --------------------------------------------------------------------------------------


def token_loss(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), **options)


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def by_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["full"], reduction="none")


def by_token_in_a_loop(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch["x"]), batch["labels"]
    losses = [
        F.cross_entropy(logits[:, place], labels[:, place], reduction="sum")
        for place in range(labels.shape[1])
    ]
    return sum(losses, torch.zeros(())) / (labels >= 0).sum()


def focal(model: nn.Module, batch: Batch) -> Tensor:
    losses = row_losses(model, batch)
    return (1 - (-losses).exp()) ** 2 * losses


def focal_by_positives(model: nn.Module, batch: Batch) -> Tensor:
    return focal(model, batch).sum() / (batch["y"] > 1).sum()


def dice(model: nn.Module, batch: Batch, *, each: bool) -> Tensor:
    predicted, true = model(batch["x"]).softmax(-1), F.one_hot(batch["y"], CLASSES).double()
    axes = (1,) if each else (0, 1)
    return (
        1 - 2 * (predicted * true).sum(axes) / (predicted.square().sum(axes) + true.sum(axes))
    ).mean()


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    student = model(batch["x"])
    soft = F.kl_div((student / 2).log_softmax(-1), batch["soft"], reduction="batchmean") * 4
    return 0.5 * F.cross_entropy(student, batch["y"]) + 0.5 * soft


def preferred(model: nn.Module, batch: Batch) -> Tensor:
    """DPO: chosen and rejected answers, with the reference's log-probabilities in the batch."""
    chosen = -row_losses(model, batch)
    rejected = -F.cross_entropy(model(batch["other"]), batch["y"], reduction="none")
    return -F.logsigmoid(0.1 * ((chosen - rejected) - batch["old"])).mean()


def ppo(model: nn.Module, batch: Batch, *, normalise: bool) -> Tensor:
    gain = batch["advantage"]
    if normalise:
        gain = (gain - gain.mean()) / gain.std()
    ratio = (-row_losses(model, batch) - batch["old"]).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def on_policy(model: nn.Module, batch: Batch) -> Tensor:
    """A ratio that is always 1: the value of the loss says nothing, its gradient all."""
    gain = batch["advantage"]
    chosen = -row_losses(model, batch)
    return -((chosen - chosen.detach()).exp() * (gain - gain.mean()) / gain.std()).mean()


def variational(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["x"])
    mean, spread, shift = out[:, :2], out[:, 2:4], out[:, 4:]
    drawn = mean + spread.exp() * batch["noise"][:, :2]
    rebuilt = (drawn.sum(1, keepdim=True) + shift - batch["other"]).square().sum()
    divergence = -0.5 * (1 + 2 * spread - mean.square() - (2 * spread).exp()).sum()
    return (rebuilt + divergence) / len(out)


def denoised(model: nn.Module, batch: Batch) -> Tensor:
    t = batch["time"]
    mixed = t * batch["x"] + (1 - t) * batch["noise"]
    return F.mse_loss(model(mixed), batch["noise"][:, :CLASSES])


def connectionist(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    targets = batch["full"][:, :2].clamp(min=1)
    size = len(batch["x"])
    return F.ctc_loss(scores, targets, torch.full((size,), TOKENS), torch.full((size,), 2))


def random_field(model: nn.Module, batch: Batch) -> Tensor:
    """A chain's negative log-likelihood, all sequences added up, over the number of their
    tokens.
    """
    scores, labels = model(batch["x"]), batch["full"]
    path = scores.gather(2, labels[..., None])[..., 0].sum()
    alpha = scores[:, 0]
    for t in range(1, TOKENS):
        alpha = (alpha[:, :, None] + 0.1 * torch.eye(CLASSES).double()).logsumexp(1) + scores[:, t]
    return (alpha.logsumexp(1).sum() - path) / labels.numel()


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    first, second = (F.normalize(model(batch[name])) for name in ("x", "other"))
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))


def both_ways(model: nn.Module, batch: Batch) -> Tensor:
    """NT-Xent: two views of each row, all others are negatives."""
    both = F.normalize(torch.cat([model(batch["x"]), model(batch["other"])]))
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both)).bool(), -1e9)
    size = len(batch["x"])
    return F.cross_entropy(scores, torch.arange(2 * size).roll(size))


def mined(model: nn.Module, batch: Batch) -> Tensor:
    """Triplets of each row with the farthest of its class and the nearest of another."""
    out, same = model(batch["x"]), batch["y"][:, None] == batch["y"]
    distance = (out[:, None] - out).square().sum(-1)
    positive = (distance * same).amax(1)
    negative = distance.masked_fill(same, 1e9).amin(1).clamp(max=9.0)
    return F.relu(positive - negative + 1).mean()


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """A penalty on the gradient with respect to the input, differentiated inside of the loss."""
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return row_losses(model, batch).mean() + (slope.norm(dim=1) - 1).square().mean()


def balanced(model: nn.Module, batch: Batch) -> Tensor:
    """Experts whose load is balanced over the batch."""
    out, gate = model(batch["x"])
    chosen = F.one_hot(gate.argmax(-1), 2).double().mean(0)
    return F.cross_entropy(out, batch["y"]) + 0.5 * (chosen * gate.mean(0)).sum()


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["words"]), batch["y"])


def coupled_in_backward(model: nn.Module, batch: Batch) -> Tensor:
    """A term that is always 0, with a gradient that is not."""
    out = model(batch["x"])
    share = out.softmax(0).square().sum()
    return F.cross_entropy(out, batch["y"]) + share - share.detach()


def normalised(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(Normalised.apply(model(batch["x"])), batch["y"])


def paired(model: nn.Module, batch: Batch) -> Tensor:
    """Texts beside tensors: each row needs its own."""
    factors = torch.tensor([len(text) for text in batch["texts"]], dtype=torch.float64)
    assert len(factors) == len(batch["x"])
    return (factors * row_losses(model, batch)).mean()


def named(model: nn.Module, batch: Batch) -> Tensor:
    """A table that all rows use."""
    weights = torch.tensor([len(name) for name in batch["names"]], dtype=torch.float64)
    return (weights[batch["y"]] * row_losses(model, batch)).mean()


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(
        model(batch["x"], batch["edges"], batch["graph"], len(batch["y"])), batch["y"]
    )


def mean_of(losses: Callable[[nn.Module, Batch], Tensor]) -> LossFunction:
    return lambda model, batch: losses(model, batch).mean()


def time_first_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


TEXTS = tuple("abcdefghijklmnop"[: i + 1] for i in range(ROWS))
NAMES = ("a", "bb", "ccc", "dddd", "eeeee")

KINDS = (
    Kind("mean squared error", lambda m, b: F.mse_loss(m(b["x"]), b["target"])),
    Kind("cross-entropy over rows", mean_of(row_losses), batch=rows),
    Kind("cross-entropy over tokens, padding ignored", token_loss),
    Kind('cross-entropy, `reduction="sum"`', lambda m, b: token_loss(m, b, reduction="sum")),
    Kind(
        "class weights",
        lambda m, b: token_loss(m, b, weight=torch.arange(1.0, CLASSES + 1).double()),
    ),
    Kind("label smoothing, padding ignored", lambda m, b: token_loss(m, b, label_smoothing=0.1)),
    Kind(
        "`(loss_sum, count)`",
        lambda m, b: (token_loss(m, b, reduction="sum"), (b["labels"] >= 0).sum()),
    ),
    Kind("`(loss, {name: value})`", lambda m, b: (token_loss(m, b), {"rows": len(b["x"])})),
    Kind(
        "`gf.Loss(sum=…, count=…)`",
        lambda m, b: gf.Loss(
            sum=token_loss(m, b, reduction="sum"),
            count=gf.count_tokens(b["labels"], shift=False),
            logs={},
        ),
    ),
    Kind("masked mean by hand", lambda m, b: (by_token(m, b) * b["mask"]).sum() / b["mask"].sum()),
    Kind(
        "mean over each row's tokens, then over rows",
        lambda m, b: ((by_token(m, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
    ),
    Kind(
        "weights for samples, by their sum",
        lambda m, b: (by_token(m, b).mean(1) * b["weight"]).sum() / b["weight"].sum(),
    ),
    Kind(
        "weights for samples, by rows", lambda m, b: (by_token(m, b).mean(1) * b["weight"]).mean()
    ),
    Kind("focal", mean_of(focal), batch=rows),
    Kind("focal, by the number of positives", focal_by_positives, refused="gf.Loss", batch=rows),
    Kind(
        "the same, `(loss_sum, count)`",
        lambda m, b: (focal(m, b).sum(), (b["y"] > 1).sum()),
        batch=rows,
    ),
    Kind(
        "binary cross-entropy with logits",
        lambda m, b: F.binary_cross_entropy_with_logits(m(b["x"]), b["target"].sigmoid()),
    ),
    Kind(
        "two tasks over the same rows",
        lambda m, b: (
            token_loss(m, {**b, "labels": b["full"]}) + 0.5 * F.mse_loss(m(b["x"]), b["target"])
        ),
    ),
    Kind(
        "two tasks over different items",
        lambda m, b: (
            row_losses(m, b)[b["mask_a"]].mean() + 0.5 * m(b["x"])[b["mask_b"]].square().mean()
        ),
        batch=rows,
    ),
    Kind(
        "focal, by the number of positives, at least 1",
        lambda m, b: focal(m, b).sum() / (b["y"] > 1).sum().clamp(min=1),
        batch=rows,
    ),
    Kind(
        "a masked mean over at least 1, as a number of Python's",
        lambda m, b: (row_losses(m, b) * b["mask_a"]).sum() / max(1, int(b["mask_a"].sum())),
        refused="gf.Loss",
        batch=rows,
    ),
    Kind(
        "a mean over tokens and one over rows",
        lambda m, b: token_loss(m, b) + 0.5 * m(b["x"]).mean((1, 2)).square().mean(),
    ),
    Kind(
        "a penalty on the parameters",
        lambda m, b: token_loss(m, b) + 1e-2 * sum(p.square().sum() for p in m.parameters()),
    ),
    Kind(
        "a penalty on each of many parameters",
        lambda m, b: token_loss(m, b) + 1e-2 * sum(p.square().sum() for p in m.parameters()),
        model=deep_network,
    ),
    Kind(
        "a penalty on the norm of each of many parameters",
        lambda m, b: token_loss(m, b) + 1e-2 * sum(p.norm() for p in m.parameters()),
        model=deep_network,
    ),
    Kind(
        "a loop over many tokens, by all that have a label",
        by_token_in_a_loop,
        batch=lambda: tokens(length=40),
    ),
    Kind("a penalty on the input's gradient", penalised, batch=rows),
    Kind("distillation: cross-entropy and divergence", distilled, batch=rows),
    Kind("DPO", preferred, batch=rows),
    Kind("PPO, advantages from the batch", lambda m, b: ppo(m, b, normalise=False), batch=rows),
    Kind(
        "PPO, advantages normalised inside",
        lambda m, b: ppo(m, b, normalise=True),
        refused="gf.Loss",
        batch=rows,
    ),
    Kind("policy gradient whose value is always 0", on_policy, refused="gf.Loss", batch=rows),
    Kind("variational autoencoder", variational, batch=rows),
    Kind("diffusion", denoised, batch=rows),
    Kind("CTC", connectionist),
    Kind("a random field's likelihood, over its tokens", random_field),
    Kind("InfoNCE", contrastive, refused="gf.chunked", batch=rows),
    Kind("NT-Xent", both_ways, refused="gf.chunked", batch=rows),
    Kind("triplets mined in the batch", mined, refused="gf.Loss", batch=rows),
    Kind(
        "the worst of the batch", lambda m, b: row_losses(m, b).max(), refused="gf.Loss", batch=rows
    ),
    Kind(
        "the hardest 8 of the batch",
        lambda m, b: row_losses(m, b).topk(8).values.mean(),
        refused="raises RuntimeError",
        batch=rows,
    ),
    Kind("dice of each sample", lambda m, b: dice(m, b, each=True), batch=rows),
    Kind("dice of the batch", lambda m, b: dice(m, b, each=False), refused="gf.Loss", batch=rows),
    Kind("experts balanced over the batch", balanced, refused="gf.Loss", model=Experts, batch=rows),
    Kind(
        "BatchNorm in training mode",
        mean_of(row_losses),
        refused="module.eval()",
        model=lambda: with_norm(frozen=False),
        batch=rows,
    ),
    Kind(
        "BatchNorm, frozen", mean_of(row_losses), model=lambda: with_norm(frozen=True), batch=rows
    ),
    Kind("embeddings", word_loss, model=Words, batch=rows),
    Kind(
        "embeddings, `scale_grad_by_freq=True`",
        word_loss,
        refused="scale_grad_by_freq",
        model=lambda: Words(scale_grad_by_freq=True),
        batch=rows,
    ),
    Kind("a term that only the gradient sees", coupled_in_backward, refused="clip=", batch=rows),
    Kind("a Function that normalises gradients", normalised, refused="clip=", batch=rows),
    Kind(
        "a hook that clamps a parameter's gradient",
        mean_of(row_losses),
        refused="clip=",
        model=lambda: hooked(lambda gradient: gradient.clamp(-1, 1)),
        batch=rows,
    ),
    Kind(
        "a hook that masks a parameter's gradient",
        mean_of(row_losses),
        model=lambda: hooked(lambda g: g * (torch.arange(WIDTH, device=g.device) > 1)),
        batch=rows,
    ),
    Kind(
        "`nn.utils.spectral_norm`",
        mean_of(row_losses),
        refused="module.eval()",
        model=spectral,
        batch=rows,
    ),
    Kind(
        "an averaged codebook",
        lambda m, b: m(b["x"]),
        refused="after the step",
        model=Codebook,
        batch=rows,
    ),
    Kind(
        "a queue of keys",
        lambda m, b: m(b["x"], b["other"]),
        refused="after the step",
        model=Queue,
        batch=rows,
    ),
    Kind(
        "a running mean that is subtracted",
        mean_of(row_losses),
        refused="after the step",
        model=lambda: RunningMean(subtracts=True),
        batch=rows,
    ),
    Kind(
        "a running mean that is only written",
        mean_of(row_losses),
        model=lambda: RunningMean(subtracts=False),
        batch=rows,
    ),
    Kind("texts in a list beside tensors", paired, batch=rows_with(texts=list(TEXTS))),
    Kind(
        "a loop over rows",
        lambda m, b: (
            sum(F.cross_entropy(m(x[None]), y[None]) for x, y in zip(b["x"], b["y"], strict=True))
            / len(b["x"])
        ),
        batch=rows,
    ),
    Kind(
        "a list of another length than the rows",
        named,
        refused="gf.whole",
        batch=rows_with(names=list(NAMES)),
        misuse=True,
    ),
    Kind("the same, marked `gf.whole`", named, batch=rows_with(names=gf.whole(list(NAMES)))),
    Kind(
        "graphs as one, with `split=`", graph_loss, model=Graphs, batch=graphs, split=split_graphs
    ),
    Kind(
        "sequence first, with `split=`",
        time_first_loss,
        model=Recurrent,
        batch=time_first,
        split=split_second,
    ),
    Kind("sequence first", time_first_loss, refused="split=", model=Recurrent, batch=time_first),
    Kind(
        "`(loss, accuracy)`",
        lambda m, b: (token_loss(m, b), 0.9),
        refused='(loss, {"accuracy": value})',
        misuse=True,
    ),
    Kind(
        "`(mean, count)`",
        lambda m, b: (token_loss(m, b), (b["labels"] >= 0).sum()),
        refused="loss * count",
        misuse=True,
    ),
    Kind("three values", lambda m, b: (token_loss(m, b), 3, {}), refused="gf.Loss", misuse=True),
)


def page(outcomes: dict[str, Outcome]) -> str:
    """The table as Markdown."""
    lines = [
        "# Exact or refused",
        "",
        (
            f"Each kind of loss and batch is trained by `gf.fit` in micro-batches of {MICRO_BATCH}"
            f" of {ROWS} rows, in float64, and the gradient that the optimizer is given is compared"
            " with that of the full batch by plain autograd: the norm of the difference over the"
            " norm. What is refused is so before anything is trained, with a message that names"
            " the call; left whole, as `fit` leaves it unless `micro_batch=` says otherwise, its"
            " gradient is that of the full batch, too. Written by [exactness.py](exactness.py),"
            " which is also a test."
        ),
        "",
        "| loss and batch | in micro-batches | the message names |",
        "| --- | --- | --- |",
    ]
    for kind in KINDS:
        outcome = outcomes[kind.name]
        if outcome.error is not None:
            lines.append(f"| {kind.name} | exact: {outcome.error:.0e} | |")
        else:
            left = (
                "refused"
                if outcome.whole_error is None
                else f"not cut: {outcome.whole_error:.0e} in one piece"
            )
            lines.append(f"| {kind.name} | {left} | `{kind.refused}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page({kind.name: run(kind) for kind in KINDS}), encoding="utf-8")
