"""How the cost of a profile, a plan, a recording and a step grows with operations, parameters and
entries of the batch.

CPU seconds at sizes that double; the exponent is the slope of a line through their logarithms, over
the largest half of the sizes (1.0: linear; a constant part makes it smaller). A profile is also
compared with what it may take: 20 plain steps plus 2 ms an operation. `python benchmarks/growth.py
[--quick] [--most 50000]`.

`--calls` counts work instead of seconds: calls of Python functions for each operation of the model
(or parameter, or entry of the batch), at sizes of 1 to 25, which a loaded machine does not change.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fair import one_thread
from torch import nn

import gradfit as gf

PLAIN_STEPS, SECONDS_PER_OPERATION = 20, 0.002  # what a profile may take


class Chain(nn.Module):
    """Short operations one after the other, half of them in a branch."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.rounds = operations // 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = 0.5 * (x + torch.sin(x * self.weight))
        return x + self.bias


class Layers(nn.Module):
    """As many small layers as asked for, each with two parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(parameters // 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch if isinstance(batch, torch.Tensor) else batch["x"]
    return model(x).square().mean()


@dataclass
class Case:
    name: str
    sizes: Sequence[int]
    make: Callable[[int], tuple[nn.Module, Any]]


def cases(most: int, quick: bool) -> Iterator[Case]:
    def sizes(largest: int, count: int) -> list[int]:
        return [largest >> n for n in reversed(range(count))]

    count = 3 if quick else 5
    yield Case("operations", sizes(most, count), lambda n: (Chain(n), torch.rand(8, 16)))
    # so many rows that activations take more than an update: else no plan is needed, or none holds
    yield Case("parameters", sizes(most // 10, count), lambda n: (Layers(n), torch.rand(64, 8)))
    yield Case(
        "strings in the batch", sizes(most * 4 // 5, count),
        lambda n: (nn.Linear(16, 16), {"x": torch.rand(n, 16), "text": ["word"] * n}),
    )  # fmt: skip
    yield Case(
        "tensors in the batch", sizes(most // 5, count), lambda n: (nn.Linear(16, 16), {"x":
        torch.rand(8, 16), "more": [torch.rand(8) for _ in range(n)]}),
    )  # fmt: skip
    yield Case(
        "dicts in the batch", sizes(most // 10, count), lambda n: (nn.Linear(16, 16), {"x":
        torch.rand(8, 16), "more": [{"a": torch.rand(8), "b": "word"} for _ in range(n)]}),
    )  # fmt: skip


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def plan_within(profile: gf.Profile, budget: int) -> gf.Plan | None:
    try:
        return gf.plan(profile, memory=budget)
    except gf.BudgetInfeasible:  # which also is found by planning
        return None


@dataclass
class Row:
    size: int
    operations: int
    plain: float
    profile: float
    plan: float
    record: float
    step: float
    is_refused: bool  # the budget of the plan


def measure(case: Case, size: int) -> Row:
    torch.manual_seed(0)
    model, batch = case.make(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plain = min(seconds(lambda: plain_step(model, optimizer, batch))[0] for _ in range(3))
    optimizer.zero_grad()
    profile_seconds, profile = seconds(lambda: gf.profile(model, loss_of, batch, optimizer))
    kept = gf.plan(profile, memory="100 GiB")
    budget = kept.peak_bytes - kept.kept_bytes // 2
    plan_seconds, plan = seconds(lambda: plan_within(profile, budget))
    refused, plan = plan is None, plan or kept

    def planned() -> None:
        with gf.apply(model, plan):
            loss = loss_of(model, batch)
        loss.backward()

    planned()  # the first forward is followed to its end
    record = min(seconds(planned)[0] for _ in range(2))
    optimizer.zero_grad()
    step = gf.fit(model, optimizer, loss_of, batch, memory="100 GiB")
    step(batch)
    taken = min(seconds(lambda: step(batch))[0] for _ in range(3))
    count = len(profile.operations)
    return Row(size, count, plain, profile_seconds, plan_seconds, record, taken, refused)


def exponent(sizes: Sequence[int], numbers: Sequence[float]) -> float:
    """The slope in logarithms, by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(number, 1e-6)) for number in numbers]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


COLUMNS = ("plain", "profile", "plan", "record", "step")


def calls_of(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many Python functions a run calls."""
    watch = cProfile.Profile(builtins=False)
    watch.enable()
    try:
        result = run()
    finally:
        watch.disable()
    return sum(entry.callcount for entry in watch.getstats()), result


def count(case: Case, size: int) -> None:
    """Print the calls for each operation, parameter or entry."""
    torch.manual_seed(0)
    model, batch = case.make(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: dict[str, int] = {}
    found["profile"], profile = calls_of(lambda: gf.profile(model, loss_of, batch, optimizer))
    kept = gf.plan(profile, memory="100 GiB")
    budget = kept.peak_bytes - kept.kept_bytes // 3
    try:
        found["plan"], _ = calls_of(lambda: gf.plan(profile, memory=budget))
    except gf.BudgetInfeasible as error:
        least = error.min_bytes
        found["plan"], _ = calls_of(lambda: gf.plan(profile, memory=least))
    found["fit"], step = calls_of(
        lambda: gf.fit(model, optimizer, loss_of, batch, memory="100 GiB")
    )
    for _ in range(3):
        step(batch)
    found["step"], _ = calls_of(lambda: step(batch))
    print(
        f"{size:>8} {len(profile.operations):>7} "
        + " ".join(f"{found[name] / size:>9.1f}" for name in COUNTED),
        flush=True,
    )


COUNTED = ("profile", "plan", "fit", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three sizes instead of five")
    parser.add_argument("--most", type=int, default=50_000, help="operations of the longest chain")
    parser.add_argument("--only", default="", help="the name of one case")
    parser.add_argument("--calls", action="store_true", help="calls for each operation, no seconds")
    options = parser.parse_args()
    unit = "Python calls for each of `size`" if options.calls else "CPU seconds"
    print(f"{one_thread()}; torch {torch.__version__}; {unit}")
    if options.calls:
        for case in cases(options.most, quick=True):
            if options.only in case.name:
                names = " ".join(f"{name:>9}" for name in COUNTED)
                print(f"\n{case.name}\n{'size':>8} {'ops':>7} {names}")
                for part in (25, 5, 1):
                    count(case, case.sizes[-1] // part)
        return
    for case in cases(options.most, options.quick):
        if options.only and options.only not in case.name:
            continue
        print(
            f"\n{case.name}\n{'size':>8} {'ops':>7} "
            + " ".join(f"{name:>9}" for name in COLUMNS)
            + "  profile's limit"
        )
        rows = []
        for size in case.sizes:
            row = measure(case, size)
            rows.append(row)
            limit = PLAIN_STEPS * row.plain + SECONDS_PER_OPERATION * row.operations
            print(
                f"{size:>8} {row.operations:>7} "
                + " ".join(f"{getattr(row, name):>9.3f}" for name in COLUMNS)
                + f"  {row.profile / limit:.2f} of {limit:.2f}"
                + ("  (its budget is refused)" if row.is_refused else ""),
                flush=True,
            )
        late = rows[-max(2, (len(rows) + 1) // 2) :]
        found = [
            exponent([row.size for row in late], [getattr(row, name) for row in late])
            for name in COLUMNS
        ]
        print(f"{'exponent':>16} " + " ".join(f"{each:>9.2f}" for each in found))


if __name__ == "__main__":
    main()
