"""What exactness over ranks costs beside plain DDP with `no_sync`, at 1 to 4 ranks on this machine.

Both train the same model on the same micro-batches, in turns within one run: a window of DDP by hand (`no_sync` around
all but the last micro-batch, a loss divided by hand, which is only right because all micro-batches are equal), then a
window of `GradientAccumulator`. The ratio is that of the fastest windows, so that another process on the machine counts
as little as it can. Ranks beyond the number of cores share them, which makes both slower, not one.

    python benchmarks/scaling.py            # prints a table
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradfit as gf

MICRO_BATCHES, ROWS, WIDTH, BLOCKS = 4, 64, 384, 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def by_hand(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, parts: list[torch.Tensor]) -> None:
    for part in parts[:-1]:
        with model.no_sync():
            (model(part).square().mean() / len(parts)).backward()
    (model(parts[-1]).square().mean() / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, accumulator: gf.GradientAccumulator, parts: list[torch.Tensor]) -> None:
    for part in parts:
        accumulator.backward(model(part).square().mean(), weight=len(part))
        accumulator.step()


def work(rank: int, size: int, port: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    first = make_model()
    plain, ours = DistributedDataParallel(copy.deepcopy(first)), DistributedDataParallel(first)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    accumulator = gf.GradientAccumulator(optimizer, steps=MICRO_BATCHES)
    parts = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)) for _ in range(MICRO_BATCHES)]
    turns = {
        "plain": lambda: by_hand(plain, plain_optimizer, parts),
        "ours": lambda: accumulated(ours, accumulator, parts),
    }
    best = dict.fromkeys(turns, float("inf"))
    for number in range(rounds + 2):
        for name in turns if number % 2 else reversed(turns):
            dist.barrier()
            started = time.perf_counter()
            turns[name]()
            dist.barrier()
            if number >= 2:
                best[name] = min(best[name], time.perf_counter() - started)
    if rank == 0:
        apart = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
        results.put((size, best["plain"], best["ours"], apart))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    parameters = sum(p.numel() for p in make_model().parameters())
    print(f"{datetime.date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}, gloo")
    print(f"{parameters / 1e6:.1f} M parameters in float32, {MICRO_BATCHES} micro-batches of {ROWS} rows per window,")
    print(f"1 thread per rank, fastest of {options.rounds} windows\n")
    print("ranks  DDP with no_sync  gradfit     ratio  parameters apart")
    context = torch.multiprocessing.get_context("spawn")
    for size in options.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.SimpleQueue()
        torch.multiprocessing.start_processes(
            work, args=(size, port, options.rounds, results), nprocs=size, start_method="spawn"
        )
        _, plain, ours, apart = results.get()
        print(f"{size:5}  {plain * 1e3:13.2f} ms  {ours * 1e3:7.2f} ms  {ours / plain:5.3f}  {apart:.1e}", flush=True)


if __name__ == "__main__":
    main()
