"""An older tree of gradfit and this one, taking turns in one process with the loop by hand.

    python benchmarks/two_trees.py OLD_TREE [seconds per table] [accumulate | step]

Both packages are loaded side by side, so that whatever the machine does beside it falls on all
alike; turns come in an order that is drawn anew for each round. The figures are the mean CPU time
of each one's fastest tenth of turns, its ratio to the hand-written loop's (two copies of which say
what the figures can be trusted to), and the ratio of the medians.
"""

from __future__ import annotations

import copy
import datetime
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import accumulate
import step as steps
import torch
from torch import nn

HERE = Path(__file__).resolve().parents[1]
Work = Callable[[], object]


def load(tree: Path) -> Any:
    """The gradfit of a tree, beside another one that was loaded before."""
    for name in [name for name in sys.modules if name.split(".")[0] == "gradfit"]:
        del sys.modules[name]
    sys.path.insert(0, str(tree / "src"))
    try:
        import gradfit

        assert Path(gradfit.__file__ or "").is_relative_to(tree), gradfit.__file__
        _ = gradfit.fit, gradfit.GradientAccumulator  # which are imported when asked for
        return gradfit
    finally:
        sys.path.pop(0)


def plain_loop(model: nn.Module, batches: Any, loss_of: Any, *, gf: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    acc = gf.GradientAccumulator(optimizer, steps=accumulate.STEPS)
    for batch in cycle(batches):
        loss_of(model, batch).backward()
        acc.step()
        yield


def own_loop(model: nn.Module, batches: Any, loss_of: Any, *, gf: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    acc = gf.GradientAccumulator(optimizer, steps=accumulate.STEPS)
    for batch in cycle(batches):
        acc.backward(loss_of(model, batch), weight=len(batch))
        acc.step()
        yield


def seed_loop(model: nn.Module, batches: Any, loss_of: Any, *, gf: Any) -> Iterator[None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    acc = gf.GradientAccumulator(steps=accumulate.STEPS, parameters=model.parameters())
    for batch in cycle(batches):
        loss_of(model, batch).backward()
        if acc.is_ready:
            optimizer.step()
            optimizer.zero_grad()
        yield


def windows(setup: Any, trees: dict[str, Any]) -> dict[str, Work]:
    """One window of each loop."""
    model, batches, loss_of = setup()
    kinds = {"own": own_loop, "plain": plain_loop, "seed": seed_loop}
    loops: dict[str, Any] = dict.fromkeys(accumulate.HAND, accumulate.hand_written)
    for version, gf in trees.items():
        loops |= {f"{version}, {kind}": partial(loop, gf=gf) for kind, loop in kinds.items()}
    running = {name: loop(copy.deepcopy(model), batches, loss_of) for name, loop in loops.items()}
    return {name: partial(run_window, loop) for name, loop in running.items()}


def run_window(loop: Iterator[None]) -> None:
    for _ in range(accumulate.STEPS):
        next(loop)


def whole_steps(shape: str, trees: dict[str, Any]) -> dict[str, Work]:
    """A step by hand, and each tree's."""
    works: dict[str, Work] = {name: by_hand(shape) for name in accumulate.HAND}
    for version, gf in trees.items():
        model, optimizer, ids, loss_fn = steps.setup(*steps.SHAPES[shape])
        step = gf.fit(model, optimizer, loss_fn, ids, memory="4 GiB")
        works[version] = partial(step, ids)
    return works


def by_hand(shape: str) -> Work:
    model, optimizer, ids, loss_fn = steps.setup(*steps.SHAPES[shape])

    def run() -> float:
        loss = loss_fn(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def measure(works: dict[str, Work], seconds: float) -> dict[str, list[float]]:
    turns: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        for _ in range(4):
            work()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in random.sample(list(works), len(works)):
            started = time.process_time()
            works[name]()
            turns[name].append(time.process_time() - started)
    return turns


def print_table(title: str, turns: dict[str, list[float]]) -> None:
    rounds = len(turns[accumulate.HAND[0]])
    fast = {
        name: statistics.mean(sorted(one)[: max(1, rounds // 10)]) for name, one in turns.items()
    }
    middle = {name: statistics.median(one) for name, one in turns.items()}
    hand, usual = (
        statistics.mean(found[name] for name in accumulate.HAND) for found in (fast, middle)
    )
    print(f"{f'{title}, {rounds} rounds':34}{'fastest tenth':>14}{'ratio':>8}{'median':>9}")
    for name in turns:
        ratios = f"{fast[name] / hand:8.3f}{middle[name] / usual:9.3f}"
        print(f"  {name:32}{1000 * fast[name]:11.2f} ms{ratios}")
    print(flush=True)


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    trees = {"before": load(Path(sys.argv[1]).resolve()), "now": load(HERE)}
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()},"
        f" one thread, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
    )
    wanted = sys.argv[3:] or ["accumulate", "step"]
    for name in ("tiny", "small") if "accumulate" in wanted else ():
        print_table(
            f"accumulate, {name}", measure(windows(getattr(accumulate, name), trees), seconds)
        )
    for shape in steps.SHAPES if "step" in wanted else ():
        print_table(f"step, {shape}", measure(whole_steps(shape, trees), seconds))


if __name__ == "__main__":
    main()
