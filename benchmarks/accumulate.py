"""Step time of accumulation: gradfit against a hand-written loop, accelerate and Lightning Fabric.

Every contender trains its own copy of the same model on the same micro-batches, with the loop that
its library's guide prints. They take turns, in an order that is drawn anew for each turn, so that
what the machine does beside it falls on all alike; several sittings with fresh copies even out
where in memory each one happens to lie. The hand-written loop runs twice, and the others are
compared to the mean of both: what these two differ by is what the numbers can be trusted to.

- fastest tenth: the mean of a contender's fastest tenth of turns, and its ratio to the hand-written
  loop's. (The very fastest one is luck: two copies of one loop differ by 2 % in it.)
- median: over all rounds, of a turn's ratio to the hand-written loop's same turn, and its standard
  error (bootstrap).

The bar: at most 1.01 of the hand-written loop, and no tensor bytes per micro-batch beyond those of
the backward pass itself. The hand-written loop neither clips nor looks for NaN, gradfit does look
(and reports the norm).

    python benchmarks/accumulate.py [seconds per model]
"""

from __future__ import annotations

import copy
import datetime
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import cycle

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf

STEPS = 4
SITTINGS = 4
Loop = Iterator[None]  # each next() is one micro-batch; a window is STEPS of them
LossOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Setup = Callable[[], tuple[nn.Module, list[torch.Tensor], LossOf]]


def hand_written(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for index, batch in enumerate(cycle(batches)):
        loss = loss_of(model, batch)
        (loss / STEPS).backward()
        if (index + 1) % STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
        yield


def gradfit_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Loop:
    acc = gf.GradientAccumulator(torch.optim.AdamW(model.parameters(), lr=1e-4), steps=STEPS)
    for batch in cycle(batches):
        loss = loss_of(model, batch)
        acc.backward(loss, weight=len(batch))
        acc.step()
        yield


def seed_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    acc = gf.GradientAccumulator(steps=STEPS, parameters=model.parameters())
    for batch in cycle(batches):
        loss_of(model, batch).backward()
        if acc.is_ready:
            optimizer.step()
            optimizer.zero_grad()
        yield


def accelerate_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Loop:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for batch in cycle(batches):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield


def fabric_loop(model: nn.Module, batches: list[torch.Tensor], loss_of: LossOf) -> Loop:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for index, batch in enumerate(cycle(batches)):
        last = (index + 1) % STEPS == 0
        with fabric.no_backward_sync(wrapped, enabled=not last):
            loss = loss_of(wrapped, batch)
            fabric.backward(loss / STEPS)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        yield


HAND = ("hand-written loop", "the same once more")
CONTENDERS = {
    **dict.fromkeys(HAND, hand_written),
    "gradfit": gradfit_loop,
    "gradfit, seed 000's loop": seed_loop,
    "accelerate": accelerate_loop,
    "Lightning Fabric": fabric_loop,
}


def tiny() -> tuple[nn.Module, list[torch.Tensor], LossOf]:
    """So little work per parameter that the fixed costs show: microseconds of Python, one read of
    the gradients.
    """
    model = nn.Sequential(nn.Linear(784, 256), nn.GELU(), nn.Linear(256, 10))
    return (
        model,
        [torch.randn(256, 784) for _ in range(STEPS)],
        lambda net, x: net(x).square().mean(),
    )


def small() -> tuple[nn.Module, list[torch.Tensor], LossOf]:
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU()
    )
    model = nn.Sequential(
        *convolutions,
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return (
        model,
        [torch.randn(32, 1, 28, 28) for _ in range(STEPS)],
        lambda net, x: net(x).square().mean(),
    )


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
    batches = [torch.randint(0, 2000, (2, 128)) for _ in range(STEPS)]
    return model, batches, lambda net, x: net(input_ids=x, labels=x).loss


def measure(setup: Setup, seconds: float, turn: int) -> dict[str, list[list[float]]]:
    """For each contender and round, the seconds of each of its turns; a turn is that many
    micro-batches.
    """
    torch.manual_seed(0)
    shuffle = random.Random(0).shuffle
    taken: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for _ in range(SITTINGS):
        model, batches, loss_of = setup()
        shuffle(names)
        loops = {name: CONTENDERS[name](copy.deepcopy(model), batches, loss_of) for name in names}
        for loop in loops.values():
            for _ in range(STEPS):  # the optimizer makes its state
                next(loop)
        gc.collect()
        end = time.monotonic() + seconds / SITTINGS
        while time.monotonic() < end:
            for rounds in taken.values():
                rounds.append([])
            for _ in range(STEPS // turn):
                shuffle(names)
                for name in names:
                    loop = loops[name]
                    # one thread: what other processes take of the machine does not count
                    start = time.process_time()
                    for _ in range(turn):
                        next(loop)
                    taken[name][-1].append(time.process_time() - start)
    return taken


def table(title: str, taken: dict[str, list[list[float]]]) -> Iterator[str]:
    best = {
        name: sum(fastest_tenth(turns) for turns in zip(*rounds, strict=True))
        for name, rounds in taken.items()
    }
    best_hand = statistics.fmean(best[name] for name in HAND)
    first, second = (torch.tensor(taken[name]) for name in HAND)  # rounds × turns
    hand = (first + second) / 2
    yield f"{title:36} {'fastest tenth':>13} {'of hand-written':>16} {f'median of {len(hand)}':>18}"
    for name in CONTENDERS:
        ratio, error = median_ratio(torch.tensor(taken[name]), hand)
        of_hand = f"{best[name] / best_hand:16.3f}"
        yield (
            f"  {name:34} {best[name] * 1e3:10.2f} ms {of_hand} {f'{ratio:.3f} ± {error:.3f}':>18}"
        )


def median_ratio(ours: torch.Tensor, hand: torch.Tensor) -> tuple[float, float]:
    """The median of each turn's ratios, weighted by how long the turn takes, and its standard
    error.
    """
    draws = torch.randint(len(hand), (200, len(hand)), generator=torch.Generator().manual_seed(0))
    draws[0] = torch.arange(len(hand))  # as measured
    ratios = (ours / hand)[draws].quantile(0.5, dim=1)
    shares = hand.quantile(0.5, dim=0)
    windows = (ratios * shares).sum(dim=1) / shares.sum()
    return windows[0].item(), windows[1:].std().item()


def fastest_tenth(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return statistics.fmean(ordered[: max(1, len(ordered) // 10)])


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
    given = float(sys.argv[1]) if len(sys.argv) > 1 else None
    torch.set_num_threads(1)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "lightning"))
    print(
        f"{datetime.date.today()}, {packages}, CPU seconds of 1 thread, {STEPS} micro-batches per"
        " window, AdamW\n"
    )
    for title, setup, seconds, turn in (
        ("tiny: 2 layers, 0.2 M parameters", tiny, 60.0, STEPS),
        ("small: convolutions, 0.08 M", small, 70.0, STEPS),
        ("large: GPT-2, 5.3 M", large, 170.0, 1),
    ):
        print("\n".join(table(title, measure(setup, given or seconds, turn))), "\n", flush=True)
    print(allocation_table())


if __name__ == "__main__":
    main()
