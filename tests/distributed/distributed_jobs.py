"""Training runs over ranks, each beside the same run on one rank with the full batch: how far apart
are they?

Everything is drawn from a seed on every rank alike, so that each can do the full batch by itself.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradfit as gf


class Block(nn.Module):
    """A residual block with something to recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows of 4 numbers to 3 numbers each."""

    def __init__(self, blocks: int = 2, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * 1.0  # not a view: FSDP2 warns of those


def wrap(model: nn.Module, how: str, size: int, **options: Any) -> nn.Module:
    """The model as DDP or FSDP2 would have it; each block is a unit. HSDP: shards over 2 ranks,
    each pair a replica.
    """
    if how == "ddp":
        return DistributedDataParallel(model, **options)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    elif how == "fsdp, no mesh":
        mesh = None  # then each unit has one of its own
    else:
        mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, wherever it lies."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def largest_difference(model: nn.Module, reference: nn.Module) -> float:
    return max(
        (full(a).double() - b.detach().double()).abs().max().item()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


@dataclass(frozen=True)
class Setting:
    """What a run is like."""

    how: str = "ddp"
    updates: int = 10
    clip: float | None = None
    optimizer: str = "adam"
    scaler: bool = False
    dtype: torch.dtype = torch.float64
    wide: torch.dtype | None = None
    isolate: bool = False
    terms: bool = False
    plain: bool = False
    recompute: str = ""
    seed: int = 0


def parts_of_window(setting: Setting, size: int, window: int) -> list[list[torch.Tensor]]:
    """For each rank its micro-batches: some have many, some none, none is like another."""
    draw = random.Random(setting.seed * 1000 + window)
    generator = torch.Generator().manual_seed(setting.seed * 1000 + window)
    counts = [draw.randint(0, 3) for _ in range(size)]
    if not any(counts):
        counts[draw.randrange(size)] = 1
    return [
        [
            torch.randn(draw.randint(1, 5), 4, generator=generator, dtype=torch.float64)
            for _ in range(count)
        ]
        for count in counts
    ]


def make_optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def contribute(
    acc: gf.GradientAccumulator, setting: Setting, model: nn.Module, rows: torch.Tensor
) -> None:
    """One micro-batch's backward."""
    scope = (
        gf.CheckpointScope("all")
        if setting.recompute == "scope"
        else gf.CheckpointScope("all", enabled=False)
    )
    with scope:
        out = model(rows.to(setting.dtype))
    out = out.double()
    if setting.terms:
        masked = rows[:, 0] > 0
        acc.backward(
            terms={
                "square": (out.square().sum(), out.numel()),
                "some": (torch.nn.functional.softplus(out)[masked].sum(), int(masked.sum())),
            }
        )
    elif setting.plain:
        out.square().mean().backward()
        acc.step()
    else:
        acc.backward(out.square().mean(), weight=len(rows))


def full_batch_loss(
    setting: Setting, model: nn.Module, window: list[list[torch.Tensor]]
) -> torch.Tensor:
    rows = torch.cat([part for parts in window for part in parts])
    out = model(rows.to(setting.dtype)).double()
    if setting.terms:
        masked = rows[:, 0] > 0
        some = torch.nn.functional.softplus(out)[masked].sum()
        return out.square().mean() + some / max(1, int(masked.sum()))
    if setting.plain:  # each micro-batch weighs the same
        parts = [part for parts in window for part in parts]
        return torch.stack(
            [model(part.to(setting.dtype)).double().square().mean() for part in parts]
        ).mean()
    return out.square().mean()


def against_one_rank(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """Ten updates over the ranks and by one rank with the full batch: how far apart are they?"""
    torch.manual_seed(setting.seed)
    inner = Net().to(setting.dtype)
    reference = copy.deepcopy(inner)
    options: dict[str, Any] = {}
    if setting.how == "fsdp" and setting.wide is not None:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=setting.wide)
    model = wrap(inner, setting.how, size, **options)
    optimizer, plain = make_optimizer(setting, model), make_optimizer(setting, reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if setting.scaler else None
    acc = gf.GradientAccumulator(
        optimizer,
        steps=1000,
        clip=setting.clip,
        scaler=scaler,
        dtype=setting.wide,
        isolate=setting.isolate,
    )
    alone = gf.GradientAccumulator(plain, steps=1000, clip=setting.clip, dtype=setting.wide)
    for number in range(setting.updates):
        window = parts_of_window(setting, size, number)
        for rows in window[rank]:
            contribute(acc, setting, model, rows)
        result = acc.flush()
        if setting.wide is None:
            alone.backward(full_batch_loss(setting, reference, window))
        else:  # the same micro-batches: a narrow forward is not the same for other ones
            for rows in (part for parts in window for part in parts):
                contribute(alone, setting, reference, rows)
        expected = alone.flush()
        assert result.stepped, result
        assert result.micro_batches == sum(len(parts) for parts in window), result
        if not setting.terms and not setting.plain:
            assert result.weight == sum(len(part) for parts in window for part in parts), result
        assert abs(result.grad_norm - expected.grad_norm) < 1e-3 * expected.grad_norm, (
            result,
            expected,
        )
    return {"difference": largest_difference(model, reference), "norm": result.grad_norm}


def narrow_sums(rank: int, size: int, how: str) -> tuple[dict[str, float], dict[str, float]]:
    """One update of bfloat16 parameters from 24 micro-batches per rank: how far are we, and a
    bfloat16 sum, off?
    """
    torch.manual_seed(3)
    inner = Net(2, 32).bfloat16()
    reference = copy.deepcopy(inner)
    policy = (
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
        if how == "fsdp, its own policy"
        else {}
    )
    model = wrap(inner, how[:4], size, **policy)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(1 + i % 5, 4, generator=generator).bfloat16() for i in range(24 * size)]
    rows = sum(map(len, data))

    def loss(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
        return model(part).float().square().mean()

    sums = [torch.zeros_like(p, dtype=torch.float64) for p in reference.parameters()]
    native = copy.deepcopy(reference)
    for part in data:
        gradients = torch.autograd.grad(loss(reference, part), list(reference.parameters()))
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient.double() * len(part) / rows
        (loss(native, part) * (len(part) / rows)).backward()
    stepped = [
        (p.detach().double() - 0.1 * total).bfloat16()
        for p, total in zip(reference.parameters(), sums, strict=True)
    ]

    seen: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(full(p.grad).double() for p in model.parameters())
    )
    acc = gf.GradientAccumulator(optimizer, steps=1000, dtype=torch.float32)
    for part in data[rank::size]:
        acc.backward(loss(model, part), weight=len(part))
    assert acc.flush().stepped
    narrow = [p.grad.double() for p in native.parameters()]
    torch.optim.SGD(native.parameters(), lr=0.1).step()

    def off(gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> dict[str, float]:
        worst = max(
            ((g - s).abs().max() / s.abs().max()).item()
            for g, s in zip(gradients, sums, strict=True)
        )
        wrong = sum(int((p != s).sum()) for p, s in zip(parameters, stepped, strict=True))
        return {"gradient": worst, "parameters": wrong / sum(s.numel() for s in stepped)}

    return off(seen, [full(p) for p in model.parameters()]), off(narrow, list(native.parameters()))


class CountCalls:
    """Counts collectives by name while it is entered, below everything that calls them."""

    NAMES = (
        "all_reduce",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "all_gather_into_tensor",
        "all_gather_single",
    )

    def __enter__(self) -> dict[str, int]:
        self.counts: dict[str, int] = dict.fromkeys(self.NAMES, 0)
        self._before = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, call in self._before.items():
            setattr(dist, name, self._counted(name, call))
        return self.counts

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return call(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, call in self._before.items():
            setattr(dist, name, call)
