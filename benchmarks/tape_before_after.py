"""What the tape costs in two trees of gradfit, by turns: `python benchmarks/tape_before_after.py
BEFORE AFTER [--rounds 12]`, each the root of a checkout.

Both trees run the steps of their own `benchmarks/tape.py`, in child processes that take turns, so
that whatever disturbs the machine disturbs both. Printed is the least CPU time of each step over
all rounds, and the median over the rounds of the ratio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Seconds = dict[str, float]  # the least of each step


def measure(repeats: int) -> Seconds:
    """In a child: the steps of the `tape.py` that the path leads to."""
    import torch
    from fair import one_thread
    from tape import Block, Bottleneck, steps_of

    one_thread()
    torch.manual_seed(0)
    cases: dict[str, tuple[list[Any], torch.Tensor]] = {
        "tiny GPT-2": ([Block(64, 4) for _ in range(12)], torch.randn(1, 16, 64)),
        "tiny ResNet": ([Bottleneck(32) for _ in range(12)], torch.randn(1, 32, 8, 8)),
    }
    least: Seconds = {}
    for title, (blocks, x) in cases.items():
        steps = steps_of(blocks, x)
        for number in range(repeats + 3):
            for name, step in steps.items():
                started = time.process_time()
                step()
                seconds = time.process_time() - started
                if number >= 3:  # the first ones warm up
                    key = f"{title}, {name}"
                    least[key] = min(least.get(key, seconds), seconds)
    return least


def run_child(tree: Path, repeats: int) -> Seconds:
    paths = [str(tree / "src"), str(tree / "benchmarks")]
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--measure", str(repeats)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: Seconds = json.loads(done.stdout)
    return seconds


def commit_of(tree: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(tree), "log", "-1", "--format=%h"], capture_output=True, text=True
    )
    return done.stdout.strip() or tree.name


def compare(before: Path, after: Path, rounds: int, repeats: int) -> None:
    trees = [before, after]
    runs: list[list[Seconds]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            runs[side].append(run_child(trees[side], repeats))
    import torch

    print(
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()},"
        f" {commit_of(before)} and {commit_of(after)}, CPU milliseconds of one thread, the least"
        f" of {rounds} processes of {repeats} steps each, which took turns\n"
    )
    print(f"{'':40}{'before':>10}{'after':>10}{'ratio':>10}{'median':>10}")
    for name in runs[0][0]:
        old, new = ([run[name] for run in side] for side in runs)
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        print(
            f"{name:40}{min(old) * 1e3:10.3f}{min(new) * 1e3:10.3f}{min(new) / min(old):10.3f}"
            f"{statistics.median(ratios):10.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="*", type=Path, help="two checkouts: before and after")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(measure(given.measure)))
        return
    if len(given.trees) != 2:
        parser.error("give two checkouts: before and after")
    compare(*(tree.resolve() for tree in given.trees), given.rounds, given.repeats)


if __name__ == "__main__":
    main()
