"""Random loops as nobody would write them, through `fit` and as plain PyTorch in float64.

Which blocks a model has, what its loss is divided by, how its batch is nested and cut, which
optimizer steps, and what lies between two steps (other lengths and rows, a saved state, a
garbage collection) is drawn by the seed. After each update the parameters, the loss and the
norm are those of the full batch; or the call was refused by a `GradfitError` before anything
changed.

`python strange_loops.py FIRST COUNT` prints one line of JSON: how many loops were equal, how many
refused, and the first that were neither.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradfit as gf

WIDTH, CLASSES, WORDS = 8, 5, 11
EXACT = 1e-9
Batch = dict[str, Any]


# ------------------------------------------------------------------------------------------- blocks
class Block(nn.Module):
    """Parts by name, and a function of them and of what comes in."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.parts, x)


class Dirty(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def recurrent(parts: Any, x: Tensor) -> Tensor:
    state, states = x.new_zeros(len(x), WIDTH), []
    for token in range(x.shape[1]):
        state = parts["cell"](x[:, token], state)
        states.append(state)
    return torch.stack(states, 1)


def experts(parts: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    weight, chosen = parts["gate"](flat).softmax(-1).max(-1)
    out = torch.zeros_like(flat)
    for number, expert in enumerate(parts["experts"]):
        rows = (chosen == number).nonzero().flatten()
        if len(rows):
            out.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
    return x + out.view_as(x)


def written(parts: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(x.shape[1]):
        out[:, token] = parts["layer"](x[:, token]).tanh_()
    out.transpose(1, 2)[:, 0] = x[..., 1]
    return out.mul_(0.5).add_(x)


def hooked() -> nn.Module:
    layer = linear()
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    layer.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.7,))
    return layer


def slope(parts: Any, x: Tensor) -> Tensor:
    y = x if x.requires_grad else x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(parts["layer"](y).tanh().square().sum(), y, create_graph=True)
    return x + gradient


def tied() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.Tanh(), layer)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True
    ),
    "lstm": lambda: Block(
        lambda p, x: p["lstm"](x)[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)
    ),
    "recurrent": lambda: Block(recurrent, cell=nn.RNNCell(WIDTH, WIDTH)),
    "convolution": lambda: Block(
        lambda p, x: x + p["conv"](x.mT).mT, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
    ),
    "experts": lambda: Block(
        experts, gate=nn.Linear(WIDTH, 3), experts=nn.ModuleList(linear() for _ in range(3))
    ),
    "written": lambda: Block(written, layer=linear()),
    "dirty": lambda: Block(lambda p, x: Dirty.apply(p["layer"](x) + 1), layer=linear()),
    "hooked": hooked,
    "slope": lambda: Block(slope, layer=linear()),
    "tied": tied,
    "normed": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "mapped": lambda: Block(lambda p, x: torch.func.vmap(p["layer"])(x), layer=linear()),
    "gathered": lambda: Block(
        lambda p, x: p["layer"](x).gather(1, x.detach().argsort(1)), layer=linear()
    ),
    "looked up": lambda: Block(
        lambda p, x: x + p["table"]((x[..., 0] > 0).long()), table=nn.Embedding(2, WIDTH)
    ),
    "renormalised": lambda: Block(
        lambda p, x: x + p["table"]((x[..., 0] > 0).long()),
        table=nn.Embedding(2, WIDTH, max_norm=0.5),
    ),
    "group": lambda: Block(lambda p, x: p["norm"](x.mT).mT, norm=nn.GroupNorm(2, WIDTH)),
    "batch": lambda: Block(lambda p, x: p["norm"](x.mT).mT, norm=nn.BatchNorm1d(WIDTH)),
}


class Net(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(BLOCKS[name]() for name in names), nn.LayerNorm(WIDTH))
        self.classes, self.back = nn.Linear(WIDTH, CLASSES), linear()

    def forward(self, b: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of tokens, scores of rows, and what is compared with the targets."""
        h = self.blocks(self.table(b["words"]) + b["x"])
        pooled = (h * b["mask"][..., None]).sum(1) / b["mask"].sum(1, keepdim=True).clamp(min=1)
        return self.classes(h), self.classes(pooled), self.back(h)


# ------------------------------------------------------------------------------------------- losses
def tokens(model: nn.Module, b: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(model(b)[0].flatten(0, 1), b["labels"].flatten(), **options)


def each_token(model: nn.Module, b: Batch) -> Tensor:
    labels = b["labels"].clamp(min=0).flatten()
    losses = F.cross_entropy(model(b)[0].flatten(0, 1), labels, reduction="none")
    return losses.view_as(b["mask"]) * b["mask"]


def squares(model: nn.Module, b: Batch) -> Tensor:
    return (model(b)[2] - b["target"]).square()


def rows(model: nn.Module, b: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(model(b)[1], b["y"], **options)


def contrast(model: nn.Module, b: Batch) -> Tensor:
    h = F.normalize(model(b)[1], dim=-1)
    return F.cross_entropy(h @ h.T, b["y"] % len(h))


def penalised(model: nn.Module, b: Batch) -> Tensor:
    return squares(model, b).mean() + 0.01 * sum(p.norm() for p in model.parameters())


LOSSES: dict[str, Callable[[nn.Module, Batch], Any]] = {
    "squares": lambda m, b: squares(m, b).mean(),
    "sum of squares": lambda m, b: squares(m, b).sum(),
    "a norm each": lambda m, b: (squares(m, b).sum(-1) + 1e-3).sqrt().mean(),
    "root": lambda m, b: squares(m, b).mean().sqrt(),
    "tokens": tokens,
    "smoothed": lambda m, b: tokens(m, b, label_smoothing=0.1),
    "weighed classes": lambda m, b: tokens(m, b, weight=torch.linspace(0.2, 2, CLASSES)),
    "sum and count": lambda m, b: (tokens(m, b, reduction="sum"), (b["labels"] != -100).sum()),
    "by hand": lambda m, b: each_token(m, b).sum() / b["mask"].sum().clamp(min=1),
    "mean of means": lambda m, b: (each_token(m, b).sum(1) / b["mask"].sum(1).clamp(min=1)).mean(),
    "weighed rows": lambda m, b: (rows(m, b, reduction="none") * b["w"]).sum() / b["w"].sum(),
    "tasks": lambda m, b: tokens(m, b) + rows(m, b) + 0.1 * squares(m, b).mean(),
    "logged": lambda m, b: (rows(m, b), {"rows": len(b["y"])}),
    "worst": lambda m, b: rows(m, b, reduction="none").max(),
    "contrast": contrast,
    "penalised": penalised,
}


def mean_of(result: Any) -> Tensor:
    loss: Tensor
    if isinstance(result, tuple):
        loss = result[0] if isinstance(result[1], dict) else result[0] / result[1]
    else:
        loss = result
    return loss


# ------------------------------------------------------------------------------------------ batches
def batch_of(count: int, length: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(0, CLASSES, (count, length), generator=generator)
    lengths = torch.randint(0, length + 1, (count,), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    return {
        "x": torch.randn(count, length, WIDTH, generator=generator),
        "words": torch.randint(0, WORDS, (count, length), generator=generator),
        "labels": labels.masked_fill(~mask, -100),
        "mask": mask.double(),
        "y": torch.randint(0, CLASSES, (count,), generator=generator),
        "target": torch.randn(count, length, WIDTH, generator=generator),
        "w": torch.rand(count, generator=generator) + 0.1,
    }


def unevenly(batch: Batch, size: int) -> Iterator[Batch]:
    """Parts of a size and of half of it, by turns."""
    start, take = 0, size
    while start < len(batch["y"]):
        yield {name: value[start : start + take] for name, value in batch.items()}
        start, take = start + take, size if take != size else max(1, size // 2)


# ---------------------------------------------------------------------------------------- one loop
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), eps=1e-3, foreach=False),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-3, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
}


class Loop:
    """What a seed makes: alike each time it is made."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.names = [dice.choice(list(BLOCKS)) for _ in range(dice.randrange(1, 4))]
        self.loss_fn = LOSSES[dice.choice(list(LOSSES))]
        self.make_optimizer = OPTIMIZERS[dice.choice(list(OPTIMIZERS))]
        generator = torch.Generator().manual_seed(seed)
        count, length = dice.randrange(1, 10), dice.randrange(1, 6)
        others = [
            (dice.choice([count, max(1, count // 2), 2 * count]), length + dice.randrange(2))
            for _ in range(3)
        ]
        self.batches = [batch_of(*size, generator) for size in [(count, length), *others]]
        self.clip = dice.choice([None, 0.1, 10.0])
        self.options = {
            "micro_batch": dice.choice([None, dice.randrange(1, count + 1), "whole"]),
            "split": dice.choice([None, None, unevenly]),
            "offload": dice.random() < 0.3,
            "memory": dice.choice([None, None, "24 KiB", "96 KiB"]),
            "clip": self.clip,
            "planning_share": dice.choice([0, 0.05]),
        }
        self.seed = seed

    def model(self) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        model = Net(self.names)
        return model, self.make_optimizer(model.parameters())

    def plain_update(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> tuple[float, float]:
        optimizer.zero_grad()
        loss = mean_of(self.loss_fn(model, batch))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([one.norm() for one in gradients]).norm())
        for one in gradients:
            one.mul_(min(1.0, (self.clip or norm) / norm))
        optimizer.step()
        return float(loss.detach()), norm


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, states)]
    return [*(tensor.detach().clone() for tensor in tensors), torch.get_rng_state()]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def judge(seed: int) -> str:
    loop = Loop(seed)
    (model, optimizer), (plain, plain_optimizer) = loop.model(), loop.model()
    before = contents(model, optimizer)
    try:
        step = gf.fit(model, optimizer, loop.loss_fn, loop.batches[0], **loop.options)
    except gf.GradfitError:
        return "refused" if alike(contents(model, optimizer), before) else "refused after a change"
    if not alike(contents(model, optimizer), before):
        return "fit left a trace"
    verdict = "refused"
    for batch in loop.batches:
        before = contents(model, optimizer)
        try:
            result = step(batch)
        except gf.GradfitError:
            if not alike(contents(model, optimizer), before):
                return "a step was refused after a change"
            continue
        loss, norm = loop.plain_update(plain, plain_optimizer, batch)
        wrong = difference(model, plain, result, loss, norm)
        if step.budget_bytes is not None and result.peak_bytes > step.budget_bytes:
            wrong = f"a peak of {result.peak_bytes}, more than {step.budget_bytes}"
        if wrong:
            return f"{wrong} in {result.micro_batches} micro-batches of {loop.names}"
        verdict = "equal"
        if loop.dice.random() < 0.3:
            step.load_state_dict(step.state_dict())
        gc.collect(loop.dice.randrange(3))
    return verdict


def difference(
    model: nn.Module, plain: nn.Module, result: gf.TrainResult, loss: float, norm: float
) -> str:
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = float((ours - other).norm().detach()) / max(0.01, float(other.norm().detach()))
        if not error <= EXACT:
            return f"{name} is off by {error:.1e}"
    if not abs(float(result.loss) - loss) <= EXACT * max(1.0, abs(loss)):
        return f"a loss of {float(result.loss)}, not {loss}"
    if not abs(float(result.grad_norm) - norm) <= EXACT * max(1.0, norm):
        return f"a norm of {float(result.grad_norm)}, not {norm}"
    return ""


def main(first: int, count: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    verdicts = {}
    for seed in range(first, first + count):
        try:
            verdicts[seed] = judge(seed)
        except Exception as error:
            verdicts[seed] = f"{type(error).__name__}: {error}"
    wrong = {seed: one for seed, one in verdicts.items() if one not in ("equal", "refused")}
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in ("equal", "refused")}
    print(json.dumps({**counts, "wrong": dict(list(wrong.items())[:5]), "wrong_count": len(wrong)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
