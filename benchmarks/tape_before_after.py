"""What the tape costs in two trees of gradfit, by turns: `python benchmarks/tape_before_after.py
BEFORE AFTER [--pairs 3] [--steps 200] [--larger]`, each the root of a checkout.

Both trees run the steps of their own `benchmarks/tape.py`, each in a child process; the two take
turns after every single step, so that whatever disturbs the machine disturbs both. Printed is the
least CPU time of each step, and the median of the ratios of neighbours. Several pairs of processes
are started one after the other: where the memory of a process lies makes a difference, too. With
`--larger` the models are the larger ones of `benchmarks/tape.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 5


def serve(larger: bool) -> None:
    """In a child: run the step that is asked for, and answer with its seconds."""
    import torch
    from fair import one_thread
    from tape import Block, Bottleneck, steps_of

    one_thread()
    torch.manual_seed(0)
    cases: dict[str, tuple[list[Any], torch.Tensor]] = {
        "tiny GPT-2": ([Block(64, 4) for _ in range(12)], torch.randn(1, 16, 64)),
        "tiny ResNet": ([Bottleneck(32) for _ in range(12)], torch.randn(1, 32, 8, 8)),
    }
    if larger:
        cases = {
            "24 × 128, 8 × 128": ([Block(128, 4) for _ in range(24)], torch.randn(8, 128, 128)),
            "small ResNet": ([Bottleneck(64) for _ in range(8)], torch.randn(8, 64, 32, 32)),
            "ResNet": ([Bottleneck(256) for _ in range(8)], torch.randn(16, 256, 28, 28)),
            "GPT-2": ([Block(256, 8) for _ in range(12)], torch.randn(16, 256, 256)),
        }
    steps: dict[str, Callable[[], None]] = {
        f"{title}, {name}": step
        for title, (blocks, x) in cases.items()
        for name, step in steps_of(blocks, x).items()
    }
    print("\t".join(steps), flush=True)
    for line in sys.stdin:
        step = steps[line.strip()]
        started = time.process_time()
        step()
        print(time.process_time() - started, flush=True)


class Child:
    """A process that runs the steps of one tree."""

    def __init__(self, tree: Path, options: list[str]) -> None:
        paths = [str(tree / "src"), str(tree / "benchmarks")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.steps = self._answer().split("\t")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, step: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def end(self) -> None:
        self._process.communicate()


def commit_of(tree: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(tree), "log", "-1", "--format=%h"], capture_output=True, text=True
    )
    return done.stdout.strip() or tree.name


def compare(trees: list[Path], pairs: int, count: int, only: str, options: list[str]) -> None:
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(pairs):
        children = [Child(tree, options) for tree in trees]
        for step in children[0].steps:
            if only not in step:
                continue
            sides = taken.setdefault(step, ([], []))
            for number in range(WARM_UP + count):
                for side in (0, 1) if number % 2 else (1, 0):
                    seconds = children[side].seconds(step)
                    if number >= WARM_UP:
                        sides[side].append(seconds)
        for child in children:
            child.end()
    report(trees, taken, f"{pairs} pairs of processes, {count} steps each")


def report(trees: list[Path], taken: dict[str, tuple[list[float], list[float]]], how: str) -> None:
    import torch

    print(
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()},"
        f" commits {' and '.join(map(commit_of, trees))}, CPU milliseconds of one thread, {how}\n"
    )
    print(f"{'':40}{'before':>10}{'after':>10}{'of least':>10}{'median':>10}")
    for step, (before, after) in taken.items():
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        print(
            f"{step:40}{min(before) * 1e3:10.3f}{min(after) * 1e3:10.3f}"
            f"{min(after) / min(before):10.3f}{ratio:10.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="*", type=Path, help="two checkouts: before and after")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="steps with this in their name")
    parser.add_argument("--larger", action="store_true", help="the larger shapes of tape.py")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.larger)
        return
    if len(given.trees) != 2:
        parser.error("give two checkouts: before and after")
    options = ["--larger"] if given.larger else []
    trees = [tree.resolve() for tree in given.trees]
    compare(trees, given.pairs, given.steps, given.only, options)


if __name__ == "__main__":
    main()
