"""Ranks with different numbers of micro-batches, and different sizes, make the same update as one
process would.

    torchrun --standalone --nproc-per-node 2 examples/distributed_uneven.py

Run as it is, it starts its two processes by itself.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import gradfit as gf


def train() -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(4, 1).double()
    model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
    model.module.load_state_dict(alone.state_dict())
    rank, size = dist.get_rank(), dist.get_world_size()
    data = [
        [torch.randn(1 + number, 4, dtype=torch.float64) for number in range(2 + 2 * r)]
        for r in range(size)
    ]

    accumulator = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=100)
    for rows in data[rank]:
        # nothing is communicated here
        accumulator.backward(model(rows).square().mean(), weight=len(rows))
    result = accumulator.flush()  # one meeting, one all-reduce

    batch = torch.cat([rows for mine in data for rows in mine])
    alone(batch).square().mean().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    apart = max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    print(
        f"rank {rank}: {len(data[rank])} of {result.micro_batches} micro-batches, apart {apart:.0e}"
    )
    assert apart < 1e-12


def start(rank: int, size: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        torch.multiprocessing.start_processes(start, args=(2, free), nprocs=2, start_method="spawn")
