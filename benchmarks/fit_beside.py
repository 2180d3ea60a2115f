"""Is what `fit` settles on as fast as every way it could have chosen? One budget, and by hand each
micro-batch that fits it, with everything kept or with torch's checkpoint around every block.

CPU seconds, all in turn (`fair.race`), after `fit` has compared its plans in real steps. A ratio
below 1 is a way by hand that is faster.

    python benchmarks/fit_beside.py [--only gpt] [--rounds 7]
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fair import one_thread, race
from frontier_joint import by_hand, every_block, plainly
from frontier_models import Case, language, residual, vision

import gradfit as gf

_STEPS = 60  # in which plans are compared; searching for them may take as long as training
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def small_gpt() -> tuple[Case, float]:
    return language("GPT, 4 layers", layers=4, width=64, rows=32, length=64, causal=True), 0.25


def deep_gpt() -> tuple[Case, float]:
    return language("GPT, 12 layers", layers=12, width=128, rows=8, length=128, causal=True), 0.3


def vit() -> tuple[Case, float]:
    return vision("ViT", layers=6, width=128, rows=16), 0.3


def resnet() -> tuple[Case, float]:
    """Which is not cut: its BatchNorm takes statistics over the rows."""
    return residual("ResNet", layers=8, width=64, rows=8), 0.4


CASES = (small_gpt, deep_gpt, vit, resnet)


def beside(case: Case, share: float, *, rounds: int) -> list[str]:
    """The table for a budget of so much of the activations."""
    rows = case.batch["x"].size(0)
    peak = by_hand(case, plainly, rows, measured=True)
    static = 2 * sum(p.nbytes for p in case.model.parameters())
    budget = int(static + share * (peak - static))
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = gf.fit(model, optimizer, case.loss, case.batch, memory=budget, planning_share=1.0)
    began = str(step.plan).splitlines()[0]
    for _ in range(_STEPS):
        step(case.batch)
    names, ways = [], list[Callable[[], Any]]()
    for name, runner in (("everything kept", plainly), ("every block checkpointed", every_block)):
        other = Case(name, copy.deepcopy(case.model), case.batch)
        cut = not isinstance(case.model.stem, torch.nn.Sequential)  # else there is BatchNorm
        for size in [one for one in _SIZES if one < rows and cut] + [rows]:
            if by_hand(other, runner, size, measured=True) <= budget:
                names.append(f"by hand, {name}, micro-batch {size}")
                ways.append(partial(by_hand, other, runner, size))
    if not ways:
        return [f"{case.name}: {budget / 2**20:.1f} MiB; no way by hand fits"]
    times = race(partial(step, case.batch), ways, rounds=rounds)
    lines = [
        f"{case.name}: {budget / 2**20:.1f} MiB, {share:.0%} of the activations",
        f"  began with {began}",
    ]
    lines.append(
        f"  settled on {str(step.plan).splitlines()[0]}; step {times[0].least * 1e3:.1f} ms"
    )
    for name, taken in sorted(zip(names, times[1:], strict=True), key=lambda one: one[1].ratio):
        lines.append(f"  {name:52}{taken.least * 1e3:8.1f} ms{taken.ratio:8.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{one_thread()}; torch {torch.__version__}; CPU seconds, ratios to fit's step")
    warnings.simplefilter("ignore")
    for make in CASES:
        if options.only in make.__name__:
            torch.manual_seed(0)
            print("\n".join(beside(*make(), rounds=options.rounds)), flush=True)


if __name__ == "__main__":
    main()
