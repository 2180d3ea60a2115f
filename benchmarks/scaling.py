"""What exactness over ranks costs beside plain DDP with `no_sync`, at 1 to 4 ranks on this machine.

Both train the same model on the same micro-batches, in turns within one run: a few windows of DDP
by hand (`no_sync` around all but the last micro-batch, a loss divided by hand, which is only right
because all micro-batches are equal), then as many of `GradientAccumulator`, in the other order in
every second round. Each round gives a ratio; the table has their median and the quartiles around
it, so that neither drift nor another process on the machine decides; beside it is the ratio of the
processors' time that all ranks used, which is what counts once ranks share cores.

    python benchmarks/scaling.py            # prints a table
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradfit as gf

MICRO_BATCHES, ROWS, WIDTH, BLOCKS = 4, 64, 384, 6
WINDOWS = 3  # per turn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def by_hand(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: list[torch.Tensor]
) -> None:
    for part in parts[:-1]:
        with model.no_sync():
            (model(part).square().mean() / len(parts)).backward()
    (model(parts[-1]).square().mean() / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated(
    model: nn.Module, accumulator: gf.GradientAccumulator, parts: list[torch.Tensor]
) -> None:
    for part in parts:
        accumulator.backward(model(part).square().mean(), weight=len(part))
        accumulator.step()


def work(rank: int, size: int, port: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    first = make_model()
    plain, ours = DistributedDataParallel(copy.deepcopy(first)), DistributedDataParallel(first)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    accumulator = gf.GradientAccumulator(optimizer, steps=MICRO_BATCHES)
    parts = [
        torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
        for _ in range(MICRO_BATCHES)
    ]
    turns = {
        "plain": lambda: by_hand(plain, plain_optimizer, parts),
        "ours": lambda: accumulated(ours, accumulator, parts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    busy = dict.fromkeys(turns, 0.0)
    for number in range(rounds + 2):
        for name in turns if number % 2 else reversed(turns):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            for _ in range(WINDOWS):
                turns[name]()
            used = time.process_time() - used
            dist.barrier()
            if number >= 2:
                seconds[name].append((time.perf_counter() - started) / WINDOWS)
                busy[name] += used
    total = torch.tensor([busy["plain"], busy["ours"]])
    dist.all_reduce(total)
    if rank == 0:
        apart = max(
            (a - b).abs().max().item()
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True)
        )
        results.put((seconds["plain"], seconds["ours"], (total[1] / total[0]).item(), apart))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    parameters = sum(p.numel() for p in make_model().parameters())
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, {os.cpu_count()} cores,"
        f" {platform.machine()}, gloo"
    )
    print(
        f"{parameters / 1e6:.1f} M parameters in float32, {MICRO_BATCHES} micro-batches of {ROWS}"
        " rows per window,"
    )
    print(f"1 thread per rank, medians of {options.rounds} rounds of {WINDOWS} windows each\n")
    print(
        "ranks  DDP with no_sync     gradfit  ratio (quartiles)     of CPU time  parameters apart"
    )
    context = torch.multiprocessing.get_context("spawn")
    for size in options.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.SimpleQueue()
        torch.multiprocessing.start_processes(
            work, args=(size, port, options.rounds, results), nprocs=size, start_method="spawn"
        )
        plain, ours, used, apart = results.get()
        low, ratio, high = statistics.quantiles(
            (b / a for a, b in zip(plain, ours, strict=True)), n=4
        )
        print(
            f"{size:5}  {statistics.median(plain) * 1e3:13.2f} ms "
            f" {statistics.median(ours) * 1e3:7.2f} ms  {ratio:5.3f} ({low:5.3f}-{high:5.3f}) "
            f" {used:14.3f}  {apart:16.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
