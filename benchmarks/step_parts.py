"""What the parts of a step's fixed cost take: the same step without one of them, and the loop by
hand, in turn.

    python benchmarks/step_parts.py [seconds]

A part that is taken out leaves a step that promises less: without the copy an update that fails
half-way cannot be taken back, without the hooks a forward that saves more than was measured is not
stopped, without the norm a NaN reaches the parameters, without the snapshot a failed pass leaves
buffers and generators changed. So this says what each promise costs, not what could be left out.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import step as steps
import torch
from two_trees import by_hand, measure, print_table

from gradfit import fit
from gradfit.fitting import tested_plan, train_step
from gradfit.recompute.follow_plan import UnrecordedRest

SHAPE = "10 ms"


class NoCopy:
    """In the place of `UpdateSnapshot`."""

    done = False

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None:
        self.done = True


class NoHooks:
    """In the place of `Unrecorded`."""

    def __init__(self, limit_bytes: float = 0) -> None:
        self.rest = UnrecordedRest()

    def __enter__(self) -> NoHooks:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Swap(NamedTuple):
    """A name that stands for something else for the time of a step."""

    owner: Any
    name: str
    used: Any
    instead: Any


def without(parts: list[Swap], step: Callable[[], object]) -> object:
    """One step with these parts replaced."""
    for owner, name, _, instead in parts:
        setattr(owner, name, instead)
    try:
        return step()
    finally:
        for owner, name, used, _ in parts:
            setattr(owner, name, used)


def swap(owner: Any, name: str, instead: Any) -> Swap:
    return Swap(owner, name, getattr(owner, name), instead)


def works() -> dict[str, Callable[[], object]]:
    model, optimizer, ids, loss_fn = steps.setup(*steps.SHAPES[SHAPE])
    step = fit(model, optimizer, loss_fn, ids, memory="4 GiB")
    for _ in range(4):
        step(ids)
    ranks = type(step.accumulator.ranks)
    before = step._snapshot()
    parts = {
        "the copy to go back to": swap(train_step, "UpdateSnapshot", NoCopy),
        "hooks on what is saved": swap(tested_plan, "Unrecorded", NoHooks),
        "the gradient's norm": swap(ranks, "norm", lambda self, gradients: 1.0),
        "the snapshot": swap(train_step.TrainStep, "_snapshot", lambda self: before),
    }
    run = partial(step, ids)
    loops = {name: by_hand(SHAPE) for name in ("hand-written loop", "the same once more")}
    one_less = {f"without {name}": partial(without, [part], run) for name, part in parts.items()}
    return {
        **loops,
        "step": partial(without, [], run),
        **one_less,
        "without all four": partial(without, [*parts.values()], run),
    }


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, one thread, load"
        f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
    )
    print_table(f"parts of a step, {SHAPE}", measure(works(), seconds))


if __name__ == "__main__":
    main()
