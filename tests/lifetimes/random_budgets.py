"""Random models under random budgets, through `CheckpointManager` and through `fit`, in a process
of their own.

`python random_budgets.py online|fit FIRST COUNT` prints one line of JSON: how many held their
budget and were equal to plain PyTorch, how many were refused (`BudgetInfeasible`, before anything
changed), and the first that were neither.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import gradfit as gf

WIDTH, LENGTH = 16, 6


class Experts(nn.Module):
    """A mixture of experts: which rows an expert gets, and so every shape inside, is decided by the
    data.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.out(h)


class Written(nn.Module):
    """Writes its result piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token in range(x.shape[1]):
            out[:, token] = self.layer(x[:, token]).tanh_()
        return out.mul_(0.5).add_(x)


BLOCKS: dict[str, Callable[[random.Random], nn.Module]] = {
    "experts": lambda dice: Experts(dice.randrange(2, 5)),
    "attention": lambda dice: Attention(),
    "written": lambda dice: Written(),
    "feedforward": lambda dice: nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH)
    ),
    "norm": lambda dice: nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU()),
}


def model_of(dice: random.Random) -> nn.Module:
    names = [dice.choice(list(BLOCKS)) for _ in range(dice.randrange(2, 6))]
    return nn.Sequential(*(BLOCKS[name](dice) for name in names), nn.Linear(WIDTH, 1))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs).squeeze(-1), targets)


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, LENGTH, WIDTH), torch.randn(rows, LENGTH)


# ------------------------------------------------------------------------------------------- online
def judge_online(seed: int) -> str:
    """One forward and backward under a budget, several budgets in turn: bit-identical, or
    refused.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model, batch = model_of(dice), batch_of(dice.randrange(1, 9))
    with gf.meter(model, batch) as meter:
        loss_fn(model, batch).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    held = "refused"
    for _ in range(4):
        model.zero_grad()
        limit = int(meter.peak_bytes * dice.uniform(0.3, 1.1))
        manager = gf.CheckpointManager(
            max_memory_mb=limit / 2**20, auto_checkpoint=True, memory_threshold=1.0
        )
        try:
            with gf.meter(model, batch), manager:
                loss_fn(model, batch).backward()
        except gf.BudgetInfeasible:
            gc.collect(dice.randrange(3))
            continue
        for expected, parameter in zip(plain, model.parameters(), strict=True):
            if (expected is None) != (parameter.grad is None):
                return "a gradient is missing"
            if expected is not None and not torch.equal(expected, parameter.grad):
                return f"differs under {limit} bytes"
        held = "equal"
    return held


# ---------------------------------------------------------------------------------------------- fit
def judge_fit(seed: int) -> str:
    """`fit` near its smallest budget: the update of plain PyTorch, in no more memory, or refused
    before it starts.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    model, rows = model_of(dice), dice.choice([2, 4, 6])
    batch = batch_of(rows)
    plain_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    least = smallest_budget(model, optimizer, batch)
    limit = int(least * dice.choice([1.0, 1.02, 1.1, 1.3]))
    try:
        step = gf.fit(model, optimizer, loss_fn, batch, memory=limit)
    except gf.BudgetInfeasible:
        return "refused"
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for _ in range(2):
        result = step(batch)
        if result.peak_bytes is not None and result.peak_bytes > limit:
            return f"peak {result.peak_bytes} under a budget of {limit}"
        plain.zero_grad()
        loss_fn(plain_model, batch).backward()
        plain.step()
        gc.collect(dice.randrange(3))
    for expected, parameter in zip(plain_model.parameters(), model.parameters(), strict=True):
        if not torch.allclose(expected, parameter, rtol=1e-3, atol=1e-5):
            return f"off by {(expected - parameter).abs().max()}"
    return "equal"


def smallest_budget(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> int:
    try:
        gf.fit(model, optimizer, loss_fn, batch, memory=1024)
    except gf.BudgetInfeasible as refusal:
        return refusal.min_bytes
    raise AssertionError("a kibibyte is enough for nothing")


def main(way: str, first: int, count: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    judge = judge_fit if way == "fit" else judge_online
    verdicts = {}
    for seed in range(first, first + count):
        try:
            verdicts[seed] = judge(seed)
        except Exception as error:
            verdicts[seed] = f"{type(error).__name__}: {error}"
    wrong = {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("equal", "refused")
    }
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in ("equal", "refused")}
    print(json.dumps({**counts, "wrong": dict(list(wrong.items())[:5]), "wrong_count": len(wrong)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
