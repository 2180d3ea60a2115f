"""Tiles on several ranks: gradients arrive once, parameters are gathered once, and the update is
that of all rows.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_jobs import full, largest_difference
from distributed_pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf

WORDS, WIDTH, LENGTH = 600, 16, 96


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.mix(x)
        x = x + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return self.head(x + self.mlp(x))


class Communication(TorchDispatchMode):
    """Counts what is sent, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def wrapped(inner: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(inner)
    if how == "fsdp by module":
        fully_shard(inner.mlp)  # type: ignore[arg-type]
    if how == "fsdp head apart":
        fully_shard(inner.head)  # type: ignore[arg-type]
    return fully_shard(inner)


def tiled_by_hand(rank: int, size: int, how: str) -> Any:
    torch.manual_seed(0)
    inner = Decoder().double()
    reference = copy.deepcopy(inner)
    model = wrapped(inner, how)
    tokens = torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(3))
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda _: calls.__setitem__(name, calls.get(name, 0) + 1)

    if how == "ddp":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(count(name))
    counts = []
    for tile in (False, False, False, True):  # DDP arranges its buckets in the second
        model.zero_grad()
        calls.clear()
        handle = gf.tile(model, size=16) if tile else None
        with Communication() as communication:
            loss_fn(model, tokens[rank : rank + 1]).backward()
        counts.append(communication.counts)
        if handle is not None:
            modules = handle.modules
            handle.remove()
    loss_fn(reference, tokens).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(
        float((full(p.grad) - q.grad).abs().max())
        for p, q in pairs
        if p.grad is not None and q.grad is not None
    )
    return {"worst": worst, "calls": set(calls.values()), "counts": counts, "modules": modules}


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp by module", "fsdp head apart"])
def test_gradients_arrive_once_and_parameters_are_gathered_once(pair: Pool, how: str) -> None:
    for answer in pair.run(tiled_by_hand, how):
        assert answer["worst"] < 1e-14
        assert answer["calls"] == ({1} if how == "ddp" else set())
        assert answer["counts"][-2] == answer["counts"][-1]
        assert how == "ddp" or answer["counts"][0]  # DDP reduces below operators
        assert answer["modules"] == (("module.mlp",) if how == "ddp" else ("mlp",))


def fitted(rank: int, size: int, memory: int, how: str = "ddp") -> Any:
    torch.manual_seed(0)
    inner = Decoder()
    reference = copy.deepcopy(inner)
    model = wrapped(inner, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, WORDS, (2 * size, LENGTH), generator=torch.Generator().manual_seed(3))
    mine = tokens[2 * rank : 2 * rank + 2]
    step = gf.fit(model, optimizer, loss_fn, mine, memory=memory)
    result = step(mine)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss_fn(reference, tokens).backward()
    alone.step()
    tiles = step.plan.tiles
    return {
        "heads": None if tiles is None else tiles.heads,
        "peak": result.peak_bytes,
        "difference": largest_difference(model, reference),
    }


def test_fit_with_tiles_over_ranks(pair: Pool) -> None:
    static = 2 * (2 * WORDS * WIDTH + WIDTH * WIDTH * 9) * 4
    memory = 2 * static + LENGTH * WORDS * 4  # DDP's buckets are as large as the gradients
    for answer in pair.run(fitted, memory):
        assert answer["heads"] == ("module.head",)
        assert answer["peak"] <= memory
        assert answer["difference"] < 1e-6


def test_fit_with_tiles_on_shards(pair: Pool) -> None:
    static = 2 * (2 * WORDS * WIDTH + WIDTH * WIDTH * 9) * 4
    memory = 2 * static + LENGTH * WORDS * 4
    for answer in pair.run(fitted, memory, "fsdp"):
        assert answer["heads"] == ("head",)
        assert answer["peak"] <= memory
        assert answer["difference"] < 1e-6
