"""What it costs to move values out of memory, with copies beside computation and without.

On the CPU (`python benchmarks/offload.py [--rounds 7] [--threads 1]`): forward and backward of a
GPT at a few budgets, in turn: everything kept; values moved to a file by another thread; the same
plan where computation waits for each copy; and everything that does not fit rebuilt. Given are the
least and the median of the seconds over those of plain PyTorch in the same round, the processor
seconds of the thread that computes over those of plain PyTorch (which other programs disturb less),
and what the plan predicted.

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
    """Computation waits for each copy."""

    def begin(make: Callable[[], None]) -> Copy:
        copy = Copy(make)
        copy.run()
        return copy

    def copy_on(stream: torch.Stream, to: Tensor, source: Tensor) -> torch.Event:
        done = on_a_stream(stream, to, source)
        torch.accelerator.current_stream(stream.device).wait_event(done)
        return done

    beside, on_a_stream = offload.begin_copy, offload._copy_on
    offload.begin_copy, offload._copy_on = begin, copy_on
    try:
        yield
    finally:
        offload.begin_copy, offload._copy_on = beside, on_a_stream


class Ways:
    """Passes over one model, by name."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens

    def plain(self) -> None:
        self.model.zero_grad()
        loss_fn(self.model, self.tokens).backward()

    def planned(self, plan: gf.Plan) -> None:
        self.model.zero_grad()
        with gf.apply(self.model, plan):
            loss = loss_fn(self.model, self.tokens)
        loss.backward()

    def serial(self, plan: gf.Plan) -> None:
        with one_after_the_other():
            self.planned(plan)

    def peak(self, plan: gf.Plan) -> int:
        self.model.zero_grad()
        device = self.tokens.device
        with gf.meter(self.model, self.tokens, device=device) as live:
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


def on_the_cpu(rounds: int, bandwidth: float) -> None:
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=1024, length=128, layers=4, width=192, heads=4, causal=True, dropout=0.0
    )
    ways = Ways(model, torch.randint(1024, (8, 129)))
    for _ in range(2):
        ways.plain()
    measured = offload.measure_bandwidth(torch.device("cpu"))
    print(
        f"CPU, {torch.get_num_threads()} thread(s) of torch, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; to a file {measured / 1e9:.2f} GB/s, planned with"
        f" {(bandwidth or measured) / 1e9:.2f}; {rounds} rounds.\n"
        "Of plain PyTorch: seconds (least, median), and processor seconds of the thread that"
        " computes (least)"
    )
    compare(ways, bandwidth or measured, rounds, on_this_machine)


def on_the_device(rounds: int) -> None:
    import simulated

    simulated.load()
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=256, length=32, layers=4, width=64, heads=4, causal=True, dropout=0.0
    ).to("sim")
    ways = Ways(model, torch.randint(256, (8, 33)).to("sim"))

    def clock(run: Callable[[], None]) -> tuple[float, float]:
        torch.accelerator.synchronize()
        started = simulated.settings().now()
        run()
        torch.accelerator.synchronize()
        seconds = simulated.settings().now() - started
        return seconds, seconds

    simulated.settings().set_kernel_time(_KERNEL_US)
    stream_bytes = 8 * 32 * 64 * 4
    bandwidth = stream_bytes / (_KERNEL_US / 1e6)
    print(
        f"Simulated device, {_KERNEL_US} µs for each kernel and each copy. Of plain PyTorch, by the"
        " device's clock (least, median, least)"
    )
    compare(ways, bandwidth, rounds, clock)
    simulated.settings().set_kernel_time(0)


Clock = Callable[[Callable[[], None]], tuple[float, float]]


def on_this_machine(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and processor seconds of this thread."""
    started, computed = time.perf_counter(), time.thread_time()
    run()
    return time.perf_counter() - started, time.thread_time() - computed


def compare(ways: Ways, bandwidth: float, rounds: int, clock: Clock) -> None:
    for share, moving, rebuilding in plans(ways, bandwidth, [0.75, 0.5, 0.25]):
        runs: dict[str, tuple[Callable[[], None], gf.Plan]] = {
            "moved, beside": (lambda plan=moving: ways.planned(plan), moving),
            "moved, one by one": (lambda plan=moving: ways.serial(plan), moving),
            "rebuilt": (lambda plan=rebuilding: ways.planned(plan), rebuilding),
        }
        peaks = {name: ways.peak(plan) for name, (_, plan) in runs.items()}
        print(f"  {share} of the way from the least memory to that of everything kept")
        plain, seconds = [], {name: [] for name in runs}
        for _ in range(rounds):
            plain.append(clock(ways.plain))
            for name, (run, _) in runs.items():
                seconds[name].append(clock(run))
        for name, (_, plan) in runs.items():
            report(name, plan, peaks[name], ratios(plain, seconds[name]))


Times = list[tuple[float, float]]


def ratios(plain: Times, mine: Times) -> tuple[float, float, float]:
    each = [a / b for (a, _), (b, _) in zip(mine, plain, strict=True)]
    least = min(a for a, _ in mine) / min(a for a, _ in plain)
    computing = min(a for _, a in mine) / min(a for _, a in plain)
    return least, statistics.median(each), computing


def report(name: str, plan: gf.Plan, peak: int, found: tuple[float, float, float]) -> None:
    least, median, computing = found
    predicted = 1 + plan.extra_seconds / plan.plain_seconds
    print(
        f"    {name:18} {least:6.3f} {median:6.3f} {computing:6.3f}  predicted {predicted:6.3f}"
        f"  moved {plan.actions.count('offload'):3}, rebuilt {plan.actions.count('rebuild'):3}"
        f"  peak {peak / 2**20:7.2f} MiB, predicted {plan.peak_bytes / 2**20:7.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="GB/s; 0: as measured")
    parser.add_argument("--device", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device:
        on_the_device(arguments.rounds)
    else:
        on_the_cpu(arguments.rounds, arguments.bandwidth * 1e9)


if __name__ == "__main__":
    main()
