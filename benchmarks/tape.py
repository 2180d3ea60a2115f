"""What recording and replaying costs: against plain PyTorch and against `torch.utils.checkpoint`.

Seconds are CPU seconds of one thread, interleaved: the median over the rounds of the ratio to plain
runs just before and after, and the ratio of the least of each. `python benchmarks/tape.py
[--quick]`.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fair import one_thread, race
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradfit as gf
from gradfit.choices import HOLD
from gradfit.tape.decisions import TapeDecision
from gradfit.tape.operators import info_of
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Segment

Step = Callable[[], None]


class Block(nn.Module):
    """GPT-2's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        h = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.drop(self.out(h))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Bottleneck(nn.Module):
    """ResNet's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width // 4, 1, bias=False), nn.BatchNorm2d(width // 4),
            nn.ReLU(inplace=True), nn.Conv2d(width // 4, width // 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(width // 4), nn.ReLU(inplace=True), nn.Conv2d(width // 4, width, 1,
            bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


DECISIONS = [TapeDecision((HOLD,) * count) for count in range(16)]  # made once, as a plan's are


class Hold:
    """Everything recorded, every tensor kept."""

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        return DECISIONS[len(results)]


def steps_of(blocks: list[nn.Module], x: torch.Tensor) -> dict[str, Step]:
    """One training step in four ways."""
    modules = nn.ModuleList(blocks)

    def step(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        h = x
        for block in blocks:
            h = run(block, h)
        h.square().mean().backward()
        modules.zero_grad()

    def recorded() -> None:
        h = x
        with Recorder(Segment(None), Hold()):
            for block in blocks:
                h = block(h)
            loss = h.square().mean()
        loss.backward()
        modules.zero_grad()

    return {
        "plain": lambda: step(lambda block, h: block(h)),
        "recorded, all kept": recorded,
        "torch.utils.checkpoint": lambda: step(
            lambda block, h: torch_checkpoint(block, h, use_reentrant=False)
        ),
        "gf.checkpoint": lambda: step(gf.checkpoint),
    }


def compare(title: str, blocks: list[nn.Module], x: torch.Tensor, rounds: int) -> None:
    steps = steps_of(blocks, x)
    peaks = {}
    for name, step in steps.items():
        with gf.meter() as meter:
            step()
        peaks[name] = meter.peak_bytes
    recorded = count_operations(blocks, x)
    print(f"\n{title}: {recorded} recorded operations")
    print(
        f"  {'':24}{'peak MiB':>10}{'of plain':>10}{'ms':>10}{'of plain':>10}{'by least':>10}"
        f"{'µs per op':>11}"
    )
    plain, *others = steps.values()
    times = race(plain, others, rounds=rounds)
    for name, found in zip(steps, times, strict=True):
        extra = (found.ratio - 1) * times[0].least / recorded * 1e6
        print(
            f"  {name:24}{peaks[name] / 2**20:10.1f}{peaks[name] / peaks['plain']:10.3f}"
            f"{found.least * 1e3:10.2f}"
            f"{found.ratio:10.3f}{found.least / times[0].least:10.3f}"
            + (f"{extra:11.1f}" if name != "plain" else ""),
            flush=True,
        )


def count_operations(blocks: list[nn.Module], x: torch.Tensor) -> int:
    """How many operations of a forward pass are recorded."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        found = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.found += not info_of(func).view
            return func(*args, **(kwargs or {}))

    with Count() as count:
        h = x
        for block in blocks:
            h = block(h)
    return count.found


def contrastive(batch: int, size: int, width: int, depth: int) -> None:
    """The logits, batch × batch, are not chunked: a small encoder cannot gain as much as a large
    one.
    """
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128)) for _ in range(depth)
    ]
    encoder = nn.Sequential(*layers).double()
    left, right = torch.randn(batch, 128).double(), torch.randn(batch, 128).double()

    def loss(encode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        a, b = F.normalize(encode(left), dim=1), F.normalize(encode(right), dim=1)
        return F.cross_entropy(a @ b.t() / 0.07, torch.arange(batch))

    found = []
    for encode in (encoder, lambda t: gf.chunked(encoder, t, size)):
        with gf.meter() as meter:
            gradients = torch.autograd.grad(loss(encode), list(encoder.parameters()))
        found.append((meter.peak_bytes, torch.cat([g.flatten() for g in gradients])))
    (plain, expected), (ours, gradient) = found
    error = ((gradient - expected).norm() / expected.norm()).item()
    print(
        f"\nInfoNCE, batch {batch} in chunks of {size}, float64, encoder of {depth} blocks"
        f" 128-{width}-128"
    )
    print(
        f"  peak {plain / 2**20:.1f} -> {ours / 2**20:.1f} MiB ({ours / plain:.3f}), gradient error"
        f" {error:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    quick = parser.parse_args().quick
    ground = one_thread()
    torch.manual_seed(0)
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, gradfit {gf.__version__}, {ground},"
        " CPU seconds"
    )
    compare(
        "tiny: 12 layers, width 64, batch 1 × 16",
        [Block(64, 4) for _ in range(12)],
        torch.randn(1, 16, 64),
        100 if quick else 200,
    )
    contrastive(1024, 32, width=256, depth=8)
    contrastive(1024, 32, width=512, depth=12)
    if quick:
        return
    compare(
        "24 layers, width 128, batch 8 × 128",
        [Block(128, 4) for _ in range(24)],
        torch.randn(8, 128, 128),
        15,
    )
    compare(
        "small ResNet: 8 × 64 × 32²",
        [Bottleneck(64) for _ in range(8)],
        torch.randn(8, 64, 32, 32),
        60,
    )
    compare(
        "ResNet: 8 bottlenecks, 16 × 256 × 28²",
        [Bottleneck(256) for _ in range(8)],
        torch.randn(16, 256, 28, 28),
        15,
    )
    compare(
        "GPT-2: 12 × 256, batch 16 × 256",
        [Block(256, 8) for _ in range(12)],
        torch.randn(16, 256, 256),
        7,
    )


if __name__ == "__main__":
    main()
