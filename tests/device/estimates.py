"""How far `gf.estimate` is from the simulated device's own counter, on 25 models.

`python tests/device/estimates.py` prints a line for each: what it says on shapes alone, and the
peak that the allocator has counted over three plain steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import simulated
import torch
from torch import nn

import gradfit as gf

sys.path.insert(0, str(Path(__file__).parents[1] / "profiling"))

HARDWARE = gf.Hardware(name="simulated", memory="4 GiB", flops=1e12, bandwidth=1e11)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(24, 48, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def _rows(batch: Any, times: int) -> Any:
    if isinstance(batch, dict):
        return {name: _rows(one, times) for name, one in batch.items()}
    return batch.repeat(times, *[1] * (batch.dim() - 1))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def cases() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any, Any]], str]]:
    """Eight models, each with three optimizers, and one more."""
    from profiling_models import make

    def larger(name: str, times: int) -> Callable[[], tuple[nn.Module, Any, Any]]:
        def made() -> tuple[nn.Module, Any, Any]:
            model, batch, loss_fn = make(name)
            return model, _rows(batch, times), loss_fn

        return made

    def recurrent() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        return Recurrent(), torch.randn(16, 12, 24), _loss

    models = {n: larger(n, t) for n, t in {
        "perceptron": 64, "gpt2": 4, "t5": 4, "llama": 4, "vit": 2, "resnet": 2,
    }.items()}  # fmt: skip
    models |= {"lstm": recurrent, "gpt2, long": larger("gpt2", 16)}
    for name, made in models.items():
        for optimizer in ("SGD", "momentum", "AdamW"):
            yield name, made, optimizer
    yield "gpt2", models["gpt2"], "AdamW, one by one"


def compare(made: Callable[[], tuple[nn.Module, Any, Any]], optimizer: str) -> tuple[int, int]:
    """What is estimated, and what the device counts of live tensors."""
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
    model, batch, loss_fn = made()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    said = gf.estimate(model, loss_fn, batch, stepper, HARDWARE).peak_bytes
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        stepper.zero_grad()
        loss_fn(model, batch).backward()
        stepper.step()
    return said, torch.accelerator.memory_stats()["requested_bytes.all.peak"] - before


def main() -> None:
    simulated.load()
    torch.set_default_device("sim")
    errors = []
    for name, made, optimizer in cases():
        said, counted = compare(made, optimizer)
        errors.append(said / counted - 1)
        print(f"{name:<12} {optimizer:<18} {said:>10} {counted:>10} {errors[-1]:+.2%}", flush=True)
    sizes = sorted(map(abs, errors))
    below = sum(error < 0 for error in errors)
    print(f"{len(errors)} models: median {statistics.median(sizes):.2%}, worst {sizes[-1]:.2%}; "
          f"{below} below the counter")  # fmt: skip


if __name__ == "__main__":
    main()
