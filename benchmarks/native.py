"""The fixed cost of an operation with each core, Python's and the native one: `python
benchmarks/native.py`, after `gradfit build-native`.

Small models, where recording is most of a step. Everything is interleaved in one process: where the
native core is switched off, the Python functions are called as they are without it. CPU seconds,
ratios round by round; the extra time over plain PyTorch, by operation that is recorded.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable

import torch
from fair import one_thread, race
from tape import Block, Bottleneck, Hold, count_operations, steps_of
from torch import nn

import gradfit as gf
from gradfit._torch_native import core
from gradfit.tape.recorder import Recorder
from gradfit.tape.values import Segment

Step = Callable[[], None]


class Chain(nn.Module):
    """Small operations, one after the other."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 2):
            x = torch.tanh(x + x)
        return x


def forwards_of(blocks: list[nn.Module], x: torch.Tensor) -> dict[str, Step]:
    """Forward passes alone: the graph is dropped."""

    def forward() -> None:
        h = x
        for block in blocks:
            h = block(h)

    def recorded(policy: object) -> Step:
        def run() -> None:
            with Recorder(Segment(None), policy):  # type: ignore[arg-type]
                forward()

        return run

    return {
        "forward, plain": forward,
        "forward, recorded": recorded(None),
        "forward, recorded, kept": recorded(Hold()),
    }


def by(step: Step, native: bool) -> Step:
    def run() -> None:
        core().enable(native)
        step()

    return run


def compare(title: str, blocks: list[nn.Module], x: torch.Tensor, rounds: int) -> None:
    operations = count_operations(blocks, x)
    print(f"\n{title}: {operations} recorded operations")
    print(f"  {'':26}{'of plain':>18}{'µs an operation':>20}{'native of':>12}")
    print(f"  {'':26}{'Python':>9}{'native':>9}{'Python':>10}{'native':>10}{'Python':>12}")
    steps = steps_of(blocks, x)
    steps.pop("torch.utils.checkpoint")
    for group in (forwards_of(blocks, x), steps):
        (_, plain), *others = group.items()
        runs = [by(step, native) for _, step in others for native in (False, True)]
        reference, *times = race(plain, runs, rounds=rounds)
        for at, (name, _) in enumerate(others):
            found = times[2 * at : 2 * at + 2]
            extra = [(one.ratio - 1) * reference.least / operations * 1e6 for one in found]
            print(
                f"  {name:26}{found[0].ratio:9.3f}{found[1].ratio:9.3f}{extra[0]:10.1f}"
                f"{extra[1]:10.1f}{extra[1] / extra[0]:12.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    ground = one_thread()
    torch.manual_seed(0)
    if core() is None:
        raise SystemExit(f"{gf.native_core()}")
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, gradfit {gf.__version__}, {ground},"
        " CPU seconds"
    )
    compare(
        "tiny GPT-2: 12 layers, width 64, batch 1 × 16",
        [Block(64, 4) for _ in range(12)],
        torch.randn(1, 16, 64),
        rounds,
    )
    compare(
        "tiny ResNet: 8 bottlenecks, 1 × 32 × 8²",
        [Bottleneck(32) for _ in range(8)],
        torch.randn(1, 32, 8, 8),
        rounds,
    )
    compare(
        "a chain of 2,000 operations on 16 numbers",
        [Chain(2000)],
        torch.randn(16, requires_grad=True),
        max(rounds // 4, 5),
    )


if __name__ == "__main__":
    main()
