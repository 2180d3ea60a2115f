"""What the host's side of a step costs on an accelerator: a step of gradfit over a plain one, by
simulated time.

The simulated device (tests/device) takes a fixed time for each kernel; the host's time is this
process's processor time without what it spends on computing those kernels. The host runs ahead of
the device, as on a GPU, until it reads a number. So at 20 µs a kernel the host is the slower one
and everything Python does shows; at 200 µs hardly any of it.

What is rebuilt is computed by kernels of its own. So kernels are counted, and the ratio of times is
also given over that of kernels: what is left of it is the host's. A step begins once with a device
that has done all before it, and once, as in a training loop, while that may still be at work on the
update before.

`python benchmarks/device.py [--rounds 5]`
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "device"))

import simulated
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradfit as gf
from gradfit.runs.builtin_networks import Transformer

_KERNELS_US = (20, 50, 200)
_IN_A_ROW = 5
_VOCABULARY, _LENGTH, _ROWS = 256, 32, 8


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def a_model() -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(
        vocabulary=_VOCABULARY,
        length=_LENGTH,
        layers=3,
        width=32,
        heads=4,
        causal=True,
        dropout=0.1,
    )
    return model.to("sim")


class Sample(NamedTuple):
    """One step, or the mean of several."""

    seconds: float
    """Simulated, until the device has done all of it."""
    kernels: float
    """That the device was given; a list of tensors (`_foreach_…`) is one."""


def sample_of(step: Callable[[], object], steps: int) -> Sample:
    """So many steps, with a device that has done everything before the first and after the last."""
    torch.accelerator.synchronize()
    started, before = simulated.settings().now(), simulated.counters()["kernels"]
    for _ in range(steps):
        step()
    torch.accelerator.synchronize()
    seconds = simulated.settings().now() - started
    return Sample(seconds / steps, (simulated.counters()["kernels"] - before) / steps)


def plain_step(micro_batch: int) -> Callable[[Tensor], object]:
    """By hand, with the loss read once per step, as most loops do; of parts it is weighted."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> float:
        total = passes(tokens)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    def passes(tokens: Tensor) -> Tensor:
        if micro_batch == len(tokens):
            loss = loss_fn(model, tokens)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device="sim")
        for part in tokens.split(micro_batch):
            loss = loss_fn(model, part) * (len(part) / len(tokens))
            loss.backward()
            total += loss.detach()
        return total

    return step


def fitted_step(
    tokens: Tensor, share: float, micro_batch: int
) -> tuple[Callable[[Tensor], object], str]:
    """`share` of what can be saved is not there."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    part = tokens[:micro_batch]
    plans = gf.frontier(gf.profile(model, loss_fn, part, optimizer), points=2, tile=False)
    least, most = plans[-1].peak_bytes, plans[0].peak_bytes
    budget = int(most - share * (most - least)) + (256 << 10 if share else most)
    step = gf.fit(
        model, optimizer, loss_fn, tokens, memory=budget, micro_batch=micro_batch, tile=False
    )
    return step, f"{step.plan.kept_values} of {step.plan.saved_values} values kept"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    rounds = arguments.parse_args().rounds
    simulated.load()
    torch.set_num_threads(1)
    tokens = torch.randint(_VOCABULARY, (_ROWS, _LENGTH + 1)).to("sim")
    ways: Ways = {}
    for micro_batch in (_ROWS, 2):
        name = "whole batch" if micro_batch == _ROWS else f"micro-batches of {micro_batch}"
        ways[f"plain, {name}"] = micro_batch, plain_step(micro_batch)
        for share in (0.0, 0.5):
            step, kept = fitted_step(tokens, share, micro_batch)
            ways[f"gradfit, {name}, {kept}"] = micro_batch, step
    print("simulated milliseconds of a step, and over plain PyTorch with the same micro-batches;")
    print(f"medians of {rounds}. Last of three numbers: that over the ratio of kernels launched.")
    for steps in (1, _IN_A_ROW):
        print("\none step, the device idle before it:" if steps == 1 else f"\n{steps} in a row:")
        print(
            f"{'':<52}{'kernels':>7}" + "".join(f"{f'{us} µs a kernel':>24}" for us in _KERNELS_US)
        )
        print_table(ways, measured(ways, tokens, rounds, steps))


Ways = dict[str, tuple[int, Callable[[Tensor], object]]]
Measured = dict[tuple[str, int], Sample]


def measured(ways: Ways, tokens: Tensor, rounds: int, steps: int) -> Measured:
    """Medians of each way at each time a kernel takes; the ways take turns."""
    samples: dict[tuple[str, int], list[Sample]] = {
        (name, us): [] for name in ways for us in _KERNELS_US
    }
    for us in _KERNELS_US:
        simulated.settings().set_kernel_time(us)
        for _ in range(rounds + 2):
            for name, (_, step) in ways.items():
                samples[name, us].append(sample_of(lambda step=step: step(tokens), steps))
        simulated.settings().set_kernel_time(0)
    return {
        key: Sample(*(statistics.median(column) for column in zip(*found[2:], strict=True)))
        for key, found in samples.items()
    }


def print_table(ways: Ways, table: Measured) -> None:
    for name, (micro_batch, _) in ways.items():
        plain = next(
            other
            for other, (size, _) in ways.items()
            if size == micro_batch and other.startswith("plain")
        )
        cells = []
        for us in _KERNELS_US:
            own, base = table[name, us], table[plain, us]
            ratio, kernels = own.seconds / base.seconds, own.kernels / base.kernels
            cells.append(f"{own.seconds * 1e3:>9.2f} {ratio:>5.2f}× {ratio / kernels:>5.2f}×")
        kernels = table[name, _KERNELS_US[-1]].kernels
        print(f"{name:<52}{kernels:>7.0f}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
