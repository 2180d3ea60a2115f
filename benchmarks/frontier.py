"""Memory against time: gradfit's plans beside plain PyTorch and its checkpointing, interleaved in one run.

`python benchmarks/frontier.py [--quick] [--full]` prints a table, writes benchmarks/results/frontier.txt and draws
docs/images/frontier.svg. Memory is the peak of everything that the two passes allocate beside parameters, gradients
and the batch (gradients exist before, as when accumulating), read by `gf.meter` in a run of its own. Seconds are CPU
seconds of one thread, the least of several interleaved rounds, without the meter: another process changes them less
than it changes the clock on the wall. Points of gradfit are plans for a budget, not tuned by hand; beside their time
stands what the plan predicted.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frontier_models import Case, cases, language
from frontier_plot import draw
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import gradfit as gf

ROOT = Path(__file__).parents[1]
SHARES = (0.8, 0.65, 0.5, 0.42, 0.35, 0.25, 0.15, 0.1)
_KEPT = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product")


@dataclass
class Point:
    """One way of running the passes: what it takes, and how long."""

    peer: str
    setting: str
    run: Callable[[], None]
    peak_bytes: int = 0
    seconds: float = float("inf")
    predicted: float | None = None


def keep_products(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(name in str(func) for name in _KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def first_blocks(count: int, blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if number < count else block(x)
    return x


def selective(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


def in_segments(count: int, blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(blocks, count, x, use_reentrant=False)


def passes(case: Case, runner: Any, plan: gf.Plan | None = None) -> None:
    case.model.runner = runner
    if plan is None:
        loss = case.loss(case.model, case.batch)
    else:
        with gf.apply(case.model, plan):
            loss = case.loss(case.model, case.batch)
    loss.backward()


def plainly(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return blocks(x)


def points(case: Case, *, full: bool) -> Iterator[Point]:
    count = len(case.model.blocks)
    yield Point("plain", "", partial(passes, case, plainly))
    chosen = range(1, count + 1) if full else sorted({count // 4, count // 2, 3 * count // 4, count})
    for number in chosen:
        yield Point("checkpoint", f"{number} of {count} blocks", partial(passes, case, partial(first_blocks, number)))
    for number in (2, 3, 4, 6) if full else (2, 4):
        yield Point("checkpoint_sequential", f"{number} segments", partial(passes, case, partial(in_segments, number)))
    yield Point("selective", "keep products", partial(passes, case, selective))


def plans(case: Case, plain_bytes: int) -> Iterator[Point]:
    rows = case.batch["x"].size(0)
    case.model.runner = plainly
    found = gf.profile(case.model, case.loss, case.batch)
    static = found.at(rows, rows=rows).static_bytes
    for share in SHARES:
        budget = static + int(plain_bytes * share)
        try:
            # One of two micro-batches: gradients are there before, as for everyone else here.
            plan = gf.plan(found, memory=budget, batch_size=2 * rows, micro_batch=rows)
        except gf.BudgetInfeasible as error:
            plan = gf.plan(found, memory=error.min_bytes, batch_size=2 * rows, micro_batch=rows)
            yield Point("gradfit", "the least", partial(passes, case, plainly, plan), predicted=plan.extra_fraction)
            return
        run = partial(passes, case, plainly, plan)
        yield Point("gradfit", f"{share:.0%} budget", run, predicted=plan.extra_fraction)


def measure(case: Case, *, rounds: int, full: bool) -> list[Point]:
    """Every point's peak, in a run of its own; then its seconds, one run of each per round."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = list(points(case, full=full))
    found[0].peak_bytes = peak_of(case, found[0])
    found += plans(case, found[0].peak_bytes)
    for point in found[1:]:
        point.peak_bytes = peak_of(case, point)
    for _ in range(rounds):
        for point in found:
            started = time.process_time()
            point.run()
            point.seconds = min(point.seconds, time.process_time() - started)
    return found


def peak_of(case: Case, point: Point) -> int:
    with gf.meter(case.model, case.batch) as live:
        static = live.current_bytes
        point.run()
    return live.peak_bytes - static


def ahead(found: list[Point]) -> list[str]:
    """Peers' points at which gradfit has none that is at most as large and faster by clear measurement."""
    mine = [point for point in found if point.peer == "gradfit"]
    return [
        f"{peer.peer} {peer.setting}"
        for peer in found
        if peer.peer not in ("gradfit", "plain")
        and not any(p.peak_bytes <= peer.peak_bytes * 1.01 and p.seconds <= peer.seconds * 1.01 for p in mine)
    ]


def table(case: Case, found: list[Point]) -> list[str]:
    plain = found[0]
    lines = [
        f"{case.name}: plain {plain.peak_bytes / 1e6:.1f} MB, {plain.seconds:.3f} s",
        f"  {'':24}{'':20}{'MB':>8}{'memory':>9}{'time':>9}{'predicted':>11}",
    ]
    for point in sorted(found, key=lambda p: (p.peer != "plain", p.peer, -p.peak_bytes)):
        memory, seconds = point.peak_bytes / plain.peak_bytes, point.seconds / plain.seconds - 1
        line = f"  {point.peer:24}{point.setting:20}{point.peak_bytes / 1e6:8.1f}{memory:9.1%}{seconds:+9.1%}"
        lines.append(line + (f"{point.predicted:+11.1%}" if point.predicted is not None else ""))
    behind = ahead(found)
    lines.append("  gradfit is below every peer" if not behind else f"  not below: {', '.join(behind)}")
    return lines


def joint(*, quick: bool) -> list[str]:
    """One budget, effective batch 256: the plan's micro-batch against the best that can be had by hand."""
    torch.manual_seed(0)
    rows = 64 if quick else 256
    case = language("GPT-2", layers=12, width=128, rows=rows, length=32, causal=True)
    static = 2 * sum(p.nbytes for p in case.model.parameters()) + sum(t.nbytes for t in case.batch.values())
    budget = static + (16 << 20)
    model = copy.deepcopy(case.model)
    step = gf.fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), case.loss, case.batch, memory=budget)
    steps: dict[str, Callable[[], Any]] = {f"gradfit, micro-batch {step.plan.micro_batch}": partial(step, case.batch)}
    for name, runner in (("no recomputation", plainly), ("every block checkpointed", partial(first_blocks, 12))):
        other = Case(name, copy.deepcopy(case.model), case.batch)
        size = rows
        while size > 1 and by_hand(other, runner, size, measured=True) > budget:
            size -= max(1, size // 16)
        steps[f"{name}, micro-batch {size}"] = partial(by_hand, other, runner, size)
    seconds = dict.fromkeys(steps, float("inf"))
    for _ in range(2 if quick else 3):
        for name, run in steps.items():
            started = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - started)
    lines = [f"Joint: one budget of {budget / 1e6:.1f} MB, {rows} rows per update"]
    return lines + [f"  {name:44}{value:8.3f} s" for name, value in seconds.items()]


def by_hand(case: Case, runner: Any, size: int, *, measured: bool = False) -> int:
    """One update in micro-batches of `size`; with `measured`, the peak of its first two."""
    case.model.runner = runner
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-3)
    total = case.batch["x"].size(0)
    live = gf.meter(case.model, case.batch) if measured else None
    if live is not None:
        live.__enter__()
    for start in range(0, min(total, 2 * size) if measured else total, size):
        part = {name: tensor[start : start + size] for name, tensor in case.batch.items()}
        loss = case.loss(case.model, part) * (part["x"].size(0) / total)
        loss.backward()
        del loss
    if live is not None:
        live.__exit__(None, None, None)
    else:
        optimizer.step()
    optimizer.zero_grad()
    return live.peak_bytes if live is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, nothing is written")
    parser.add_argument("--full", action="store_true", help="checkpoint on k of n blocks for every k")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"frontier, {datetime.date.today()}, torch {torch.__version__}, gradfit {gf.__version__}, one thread, "
        f"least CPU seconds of {1 if options.quick else 4} interleaved rounds",
        "torch.compile with activation_memory_budget: not run, it needs minutes of compiling for each point here",
    ]
    print("\n".join(lines), flush=True)
    drawn = {}
    for case in cases(quick=options.quick):
        found = measure(case, rounds=1 if options.quick else 4, full=options.full)
        drawn[case.name] = [(p.peer, p.peak_bytes / found[0].peak_bytes, p.seconds / found[0].seconds) for p in found]
        lines += (now := table(case, found))
        print("\n".join(now), flush=True)
    lines += (now := joint(quick=options.quick))
    print("\n".join(now))
    if not options.quick:
        (ROOT / "benchmarks" / "results" / "frontier.txt").write_text("\n".join(lines) + "\n")
        (ROOT / "docs" / "images" / "frontier.svg").write_text(draw(drawn))


if __name__ == "__main__":
    main()
