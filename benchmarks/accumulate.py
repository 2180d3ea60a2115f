"""Step time of accumulation: gradfit against a hand-written loop, accelerate and Lightning Fabric.

Every contender trains its own copy of the same model on the same micro-batches; one window each in turn, the order
changing from round to round, so that what the machine does beside it falls on all alike. The bar: at most 1.01 of
the hand-written loop, and no tensor bytes per micro-batch beyond those of the backward pass itself.

    python benchmarks/accumulate.py [rounds]
"""

from __future__ import annotations

import copy
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf

STEPS = 4
Window = Callable[[], None]
LossOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def hand_written(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Window:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def window() -> None:
        for index, batch in enumerate(batches):
            loss = loss_of(model, batch)
            (loss / STEPS).backward()
            if (index + 1) % STEPS == 0:
                optimizer.step()
                optimizer.zero_grad()

    return window


def gradfit_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Window:
    acc = gf.GradientAccumulator(torch.optim.AdamW(model.parameters(), lr=1e-4), steps=STEPS)

    def window() -> None:
        for batch in batches:
            loss = loss_of(model, batch)
            acc.backward(loss, weight=len(batch))
            acc.step()

    return window


def seed_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Window:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    acc = gf.GradientAccumulator(steps=STEPS, parameters=model.parameters())

    def window() -> None:
        for batch in batches:
            loss_of(model, batch).backward()
            if acc.is_ready:
                optimizer.step()
                optimizer.zero_grad()

    return window


def accelerate_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Window:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def window() -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return window


def fabric_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Window:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def window() -> None:
        for index, batch in enumerate(batches):
            last = (index + 1) % STEPS == 0
            with fabric.no_backward_sync(wrapped, enabled=not last):
                loss = loss_of(wrapped, batch)
                fabric.backward(loss / STEPS)
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return window


CONTENDERS = {
    "hand-written loop": hand_written,
    "gradfit": gradfit_loop,
    "gradfit, seed 000's loop": seed_loop,
    "accelerate": accelerate_loop,
    "Lightning Fabric": fabric_loop,
}


def tiny() -> tuple[nn.Module, list[torch.Tensor], LossOf]:
    """So little work per parameter that the fixed costs show: microseconds of Python, one read of the gradients."""
    model = nn.Sequential(nn.Linear(784, 256), nn.GELU(), nn.Linear(256, 10))
    return model, [torch.randn(256, 784) for _ in range(STEPS)], lambda net, x: net(x).square().mean()


def small() -> tuple[nn.Module, list[torch.Tensor], LossOf]:
    convolutions = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU())
    model = nn.Sequential(
        *convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model, [torch.randn(32, 1, 28, 28) for _ in range(STEPS)], lambda net, x: net(x).square().mean()


def large() -> tuple[nn.Module, list[torch.Tensor], LossOf]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        bos_token_id=0,
        eos_token_id=0,
        n_layer=6,
        n_head=4,
        n_embd=256,
        vocab_size=2000,
        n_positions=128,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    batches = [torch.randint(0, 2000, (4, 128)) for _ in range(STEPS)]
    return model, batches, lambda net, x: net(input_ids=x, labels=x).loss


def measure(setup: Callable[[], tuple[nn.Module, list[torch.Tensor], LossOf]], rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model, batches, loss_of = setup()
    windows = {name: make(copy.deepcopy(model), batches, loss_of) for name, make in CONTENDERS.items()}
    for window in windows.values():
        for _ in range(3):
            window()
    seconds: dict[str, list[float]] = {name: [] for name in windows}
    names = list(windows)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.process_time()  # one thread: what other processes take of the machine does not count
            windows[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


class Allocations(TorchDispatchMode):
    """Bytes of every tensor an operation makes."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                self.total += one.untyped_storage().nbytes()
        return result


def bytes_of(run: Callable[[torch.Tensor], object], model: nn.Module, x: torch.Tensor) -> int:
    loss = model(x).square().mean()
    with Allocations() as allocations:
        run(loss)
    return allocations.total


def allocation_table() -> str:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    x = torch.randn(32, 64)
    acc = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.0), steps=1000)

    def ours(loss: torch.Tensor) -> None:
        acc.backward(loss, weight=32)
        acc.step()

    bytes_of(ours, model, x)
    accumulated = bytes_of(ours, model, x)
    acc.reset()
    acc.disable_accumulation()
    bytes_of(lambda loss: loss.backward(), model, x)
    plain = bytes_of(lambda loss: loss.backward(), model, x)
    hand = bytes_of(lambda loss: (loss / 4).backward(), model, x)
    return (
        f"tensor bytes allocated in one micro-batch's backward: plain loss.backward() {plain}, "
        f"(loss / steps).backward() {hand}, gradfit {accumulated}"
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    torch.set_num_threads(1)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "lightning"))
    print(f"{datetime.date.today()}, {packages}, CPU seconds of 1 thread, {STEPS} micro-batches per window, AdamW\n")
    for name, setup, usual in (
        ("tiny: 2 layers, 0.2 M parameters", tiny, 300),
        ("small: convolutions, 0.08 M", small, 120),
        ("large: GPT-2, 5.3 M", large, 15),
    ):
        seconds = measure(setup, rounds or usual)
        best = min(seconds["hand-written loop"])
        print(f"{name:34} {'best window':>12} {'of hand-written':>16} {'median of rounds':>17}")
        for contender, times in seconds.items():
            paired = [ours / hand for ours, hand in zip(times, seconds["hand-written loop"], strict=True)]
            row = f"{min(times) * 1e3:9.2f} ms {min(times) / best:16.3f} {statistics.median(paired):17.3f}"
            print(f"  {contender:32} {row}")
        print()
    print(allocation_table())


if __name__ == "__main__":
    main()
