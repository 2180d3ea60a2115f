"""A job for `torchrun -m gradfit train`; rank 1 kills itself in a step, once there is a state in
KILL_AFTER.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gradfit as gf


def tiny() -> gf.Job:
    """Replicated; gradfit does it."""
    return _job(_network())


def sharded() -> gf.Job:
    """Each layer a `fully_shard` unit, where there is a group: a process alone has the plain
    model.
    """
    model = _network()
    if dist.is_initialized():
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    return _job(model)


def _network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 15),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(15, 1),
        Own(1),
    ).double()


class Own(torch.nn.Module):
    """A parameter of the root's own, smaller than the number of ranks, and a buffer that counts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(size))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.scale


def _job(model: torch.nn.Module) -> gf.Job:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(90, 4, generator=generator, dtype=torch.float64)
    calls = 0

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        nonlocal calls
        trigger = os.environ.get("KILL_AFTER")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if (
            trigger
            and first
            and os.environ.get("RANK") == "1"
            and any(Path(trigger).glob("state-*[1-9]-*.json"))
        ):
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return (model(batch["x"]) - batch["y"]).square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return gf.Job(
        model, loss, {"x": rows, "y": rows.sum(1, keepdim=True)}, optimizer, batch_size=13
    )
