"""What it costs to move values out of memory, with copies beside computation and without.

On the CPU (`python benchmarks/offload.py [--rounds 7] [--threads 1]`): forward and backward of a
GPT at a few budgets, in turn: everything kept; values moved to a file by another thread; the same
plan where computation waits for each copy; and everything that does not fit rebuilt. Given are the
least and the median of the seconds over those of plain PyTorch in the same round, and what the plan
predicted.

On the simulated device (`python benchmarks/offload.py --device`): the same by its own clock, where
every kernel and every copy takes a fixed time, with the host's side taking none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "device"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.recompute import offload
from gradfit.recompute.copying_thread import Copy
from gradfit.runs.builtin_networks import Transformer

_KERNEL_US = 2000  # longer than what the host takes for one


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Copies to the file are made at once, where they are asked for."""

    def begin(make: Callable[[], None]) -> Copy:
        copy = Copy(make)
        copy.run()
        return copy

    beside, offload.begin_copy = offload.begin_copy, begin
    try:
        yield
    finally:
        offload.begin_copy = beside


class Ways:
    """Passes over one model, by name."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens

    def plain(self) -> None:
        loss_fn(self.model, self.tokens).backward()

    def planned(self, plan: gf.Plan) -> None:
        with gf.apply(self.model, plan):
            loss = loss_fn(self.model, self.tokens)
        loss.backward()

    def serial(self, plan: gf.Plan) -> None:
        with one_after_the_other():
            self.planned(plan)

    def peak(self, plan: gf.Plan) -> int:
        with gf.meter(self.model, self.tokens) as live:
            self.planned(plan)
        return live.peak_bytes


def plans(
    ways: Ways, bandwidth: float, shares: list[float]
) -> Iterator[tuple[str, gf.Plan, gf.Plan]]:
    """At each budget, a share of the way from the least to everything: moving, and rebuilding."""
    rebuilding = gf.profile(ways.model, loss_fn, ways.tokens)
    moving = gf.profile(ways.model, loss_fn, ways.tokens, host_bandwidth=bandwidth)
    rows = len(ways.tokens)
    whole = gf.plan(rebuilding, memory="1 TiB", micro_batch=rows).peak_bytes
    least = gf.frontier(rebuilding, points=2)[-1].peak_bytes
    for share in shares:
        memory = int(least + share * (whole - least))
        yield (
            f"{share:.0%}",
            gf.plan(moving, memory=memory, micro_batch=rows),
            gf.plan(rebuilding, memory=memory, micro_batch=rows),
        )


def report(name: str, ratios: list[float], plan: gf.Plan, base_seconds: float, peak: int) -> None:
    predicted = 1 + plan.extra_seconds / base_seconds
    print(
        f"    {name:26} {min(ratios):6.3f} {statistics.median(ratios):6.3f}   predicted"
        f" {predicted:6.3f}   moved {plan.actions.count('offload'):3}, rebuilt"
        f" {plan.actions.count('rebuild'):3}   peak {peak / 2**20:7.1f} MiB, predicted"
        f" {plan.peak_bytes / 2**20:7.1f}"
    )


def on_the_cpu(rounds: int) -> None:
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=2048, length=256, layers=6, width=256, heads=4, causal=True, dropout=0.0
    )
    ways = Ways(model, torch.randint(2048, (8, 257)))
    for _ in range(2):
        ways.plain()
    bandwidth = offload.measure_bandwidth(torch.device("cpu"))
    print(
        f"CPU, {torch.get_num_threads()} thread(s) of torch, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; to a file {bandwidth / 1e9:.2f} GB/s"
    )
    for share, moving, rebuilding in plans(ways, bandwidth, [0.75, 0.5, 0.25]):
        runs: dict[str, tuple[Callable[[], None], gf.Plan]] = {
            "moved, beside": (lambda plan=moving: ways.planned(plan), moving),
            "moved, one by one": (lambda plan=moving: ways.serial(plan), moving),
            "rebuilt": (lambda plan=rebuilding: ways.planned(plan), rebuilding),
        }
        peaks = {name: ways.peak(plan) for name, (_, plan) in runs.items()}
        print(f"  {share} of what can be saved is there, {rounds} rounds:  least, median")
        measure(ways, runs, peaks, rounds, lambda run: seconds_of(run))


def measure(
    ways: Ways,
    runs: dict[str, tuple[Callable[[], None], gf.Plan]],
    peaks: dict[str, int],
    rounds: int,
    clock: Callable[[Callable[[], None]], float],
) -> None:
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    plain = []
    for _ in range(rounds):
        plain.append(clock(ways.plain))
        for name, (run, _) in runs.items():
            ratios[name].append(clock(run))
    for name, (_, plan) in runs.items():
        of_rounds = [mine / base for mine, base in zip(ratios[name], plain, strict=True)]
        of_rounds.append(min(ratios[name]) / min(plain))
        report(name, sorted(of_rounds), plan, min(plain), peaks[name])


def seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    on_the_cpu(arguments.rounds)


if __name__ == "__main__":
    main()
