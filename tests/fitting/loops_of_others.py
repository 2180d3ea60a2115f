"""Training loops as people write them, whose step is nobody's but their own.

Each is called with `hold`, which gets its models once they are made, and returns what it has come
to: every tensor of it is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Hold = Callable[..., Any]
Loop = Callable[[Hold], list[torch.Tensor]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def deep(width: int = 48, layers: int = 6, out: int = 1, dropout: float = 0.1) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.GELU(),
            nn.Dropout(dropout),
        ]
    return nn.Sequential(*blocks, nn.Linear(width, out))


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.Adam(parameters, lr=1e-2)


def state(*models: nn.Module) -> list[torch.Tensor]:
    found = [tensor.clone() for model in models for tensor in model.state_dict().values()]
    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    return found + gradients


@loop
def usual(hold: Hold) -> list[torch.Tensor]:
    model = deep()
    optimizer = adam(model)
    hold(model)
    losses = []
    for _ in range(4):
        x = torch.randn(128, 48)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [*state(model), *losses]


@loop
def adversaries(hold: Hold) -> list[torch.Tensor]:
    """A GAN: backward goes through one model into the other."""
    maker, judge = deep(layers=4, out=48), deep(layers=4)
    for_maker, for_judge = adam(maker), adam(judge)
    hold(maker, judge)
    for _ in range(3):
        real, noise = torch.randn(128, 48), torch.randn(128, 48)
        made = maker(noise)
        for_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
        for_judge.step()
        for_maker.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        for_maker.step()
    return state(maker, judge)


@loop
def accumulation_by_hand(hold: Hold) -> list[torch.Tensor]:
    model = deep()
    optimizer = adam(model)
    hold(model)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            (model(torch.randn(96, 48)).square().mean() / 3).backward()
        optimizer.step()
    return state(model)


@loop
def two_forwards_before_a_backward(hold: Hold) -> list[torch.Tensor]:
    model = deep(layers=4)
    optimizer = adam(model)
    hold(model)
    for _ in range(3):
        one, other = model(torch.randn(96, 48)), model(torch.randn(96, 48))
        optimizer.zero_grad()
        (one - other).square().mean().backward()
        optimizer.step()
    return state(model)


@loop
def evaluations_in_between(hold: Hold) -> list[torch.Tensor]:
    model = deep()
    optimizer = adam(model)
    hold(model)
    seen = []
    for _ in range(3):
        x = torch.randn(128, 48)
        out = model(x)
        model.eval()
        with torch.no_grad():
            seen.append(model(x[:32]))
        with torch.inference_mode():
            model(x[:32])
        model.train()
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    return [*state(model), *seen]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(24, 24), nn.Linear(24, 5)

    def forward(self, seen: torch.Tensor, memory: torch.Tensor) -> tuple[Any, torch.Tensor]:
        memory = self.cell(seen, memory)
        return torch.distributions.Categorical(logits=self.head(torch.tanh(memory))), memory


@loop
def reinforcement(hold: Hold) -> list[torch.Tensor]:
    """REINFORCE: many forwards before a backward pass, and the data decide how many."""
    policy = Policy()
    optimizer = adam(policy)
    hold(policy)
    lengths = []
    for _ in range(3):
        seen, memory = torch.randn(256, 24), torch.zeros(256, 24)
        chances, rewards = [], []
        for _ in range(12):
            choices, memory = policy(seen, memory)
            action = choices.sample()
            chances.append(choices.log_prob(action))
            rewards.append((action.float() - seen.mean(1)).detach())
            seen = (seen + action[:, None].float() * 0.1).sin()
            if len(rewards) > 4 and float(seen[0, 0]) > 0.3:
                break
        lengths.append(torch.tensor(len(rewards)))
        total = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        optimizer.zero_grad()
        (-(torch.stack(chances) * total).mean()).backward()
        optimizer.step()
    return [*state(policy), *lengths]


@loop
def gradient_penalty(hold: Hold) -> list[torch.Tensor]:
    """A backward pass through a backward pass."""
    judge = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Softplus()) for _ in range(6)])
    optimizer = adam(judge)
    hold(judge)
    for _ in range(3):
        x = torch.randn(128, 32, requires_grad=True)
        real, score = judge(torch.randn(384, 32)).sum(1), judge(x).sum(1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (score.mean() - real.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return state(judge)


@loop
def retained_graph(hold: Hold) -> list[torch.Tensor]:
    model = deep(layers=5, out=2)
    hold(model)
    out = model(torch.randn(128, 48))
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].square().sum().backward()
    return state(model)


@loop
def a_part_with_a_budget_of_its_own(hold: Hold) -> list[torch.Tensor]:
    model = nn.Sequential(deep(layers=3, out=48), deep(layers=3, out=48), nn.Linear(48, 1))
    optimizer = adam(model)
    hold(model, model[0], model[1])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(128, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[1](torch.randn(64, 48)).square().mean().backward()  # the part alone
        optimizer.step()
    return state(model)


@loop
def a_forward_that_fails(hold: Hold) -> list[torch.Tensor]:
    model = deep()
    optimizer = adam(model)
    hold(model)
    for number in range(4):
        x = torch.randn(128, 48 if number != 1 else 47)
        optimizer.zero_grad()
        try:
            model(x).square().mean().backward()
        except RuntimeError:
            continue
        optimizer.step()
    return state(model)


class Stopped(nn.Module):
    """Ctrl-C in its second forward."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return x


@loop
def ctrl_c_in_a_forward(hold: Hold) -> list[torch.Tensor]:
    model = nn.Sequential(deep(out=48), Stopped(), deep(layers=2))
    optimizer = adam(model)
    hold(model)
    for _ in range(4):
        optimizer.zero_grad()
        try:
            model(torch.randn(128, 48)).square().mean().backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()
    return state(model)


@loop
def copies_of_the_model(hold: Hold) -> list[torch.Tensor]:
    """An average of the weights, in a copy that is made in the middle and trained, too."""
    model = deep()
    optimizer = adam(model)
    hold(model)
    twin: nn.Module | None = None
    for _ in range(3):
        optimizer.zero_grad()
        out = model(torch.randn(96, 48))
        if twin is None:
            twin = copy.deepcopy(model)
        out.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
    assert twin is not None
    twin(torch.randn(32, 48)).square().mean().backward()
    return state(model, twin)


@loop
def calls_itself(hold: Hold) -> list[torch.Tensor]:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, depth: int = 4) -> torch.Tensor:
            h = torch.tanh(self.up(x))
            return torch.tanh(self.down(self(h, depth - 1))) + x if depth else h

    model = Tree()
    optimizer = adam(model)
    hold(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(192, 32)).square().mean().backward()
        optimizer.step()
    return state(model)
