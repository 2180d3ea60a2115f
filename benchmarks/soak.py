"""Thousands of steps over hundreds of shapes, under a budget that is short for some of them: what
is held must not grow.

Every tenth of the way: plans, operations in their profiles, live tensors and their bytes, Python's
objects, the process's largest resident set, and how many steps so far took more than 5 times the
median. `python benchmarks/soak.py [--steps 5000] [--shapes 200]`.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time
import warnings

import torch
from fair import one_thread
from torch import nn

import gradfit as gf


class Net(nn.Module):
    """Does another thing for one batch of two."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return torch.sin(y) if float(x.sum()) > 0 else y


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--shapes", type=int, default=200)
    options = parser.parse_args()
    print(
        f"{one_thread()}; torch {torch.__version__}; {options.steps} steps, {options.shapes} shapes"
    )
    warnings.simplefilter("ignore")
    rng = random.Random(0)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = gf.fit(model, optimizer, loss_of, torch.randn(16, 40, 16), memory="512 KiB")
    sizes = [(rng.randint(2, 24), rng.randint(4, 80)) for _ in range(options.shapes)]
    taken: list[float] = []
    highest = 0
    for number in range(1, options.steps + 1):
        rows, length = rng.choice(sizes)
        batch = torch.randn(rows, length, 16)
        started = time.process_time()
        highest = max(highest, step(batch).peak_bytes)
        taken.append(time.process_time() - started)
        del batch
        if number % (options.steps // 10) == 0:
            gc.collect()
            objects = gc.get_objects()
            tensors = [one for one in objects if type(one) in (torch.Tensor, nn.Parameter)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
            slow = sum(seconds > 5 * statistics.median(taken) for seconds in taken)
            print(
                f"{number:>6} steps: {len(step.known)} plans of"
                f" {sum(len(one.profile.operations) for one in step.known)} operations;"
                f" {len(tensors)} tensors, {sum(s.nbytes() for s in storages.values())} bytes;"
                f" {len(objects)} objects;"
                f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB;"
                f" median {1e3 * statistics.median(taken):.2f} ms, {slow} slow;"
                f" peak {highest / step.budget_bytes:.3f} of the budget",
                flush=True,
            )
            del objects, tensors, storages


if __name__ == "__main__":
    main()
