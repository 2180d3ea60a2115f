"""Memory against time: gradfit's plans beside plain PyTorch and its checkpointing, interleaved in
one run.

`python benchmarks/frontier.py [--quick] [--full] [--wide] [--compile] [--only GPT-2]` prints a
table, writes benchmarks/results/frontier.txt (with --full, frontier_every_k.txt; with --wide,
frontier_wide.txt) and draws docs/images/frontier.svg (not of the wide one). Memory is the peak of
everything that the two passes allocate beside parameters, gradients and the batch (gradients exist
before, as when accumulating), read by `gf.meter` in a run of its own. Times are CPU seconds of one
thread without the meter, as ratios to plain PyTorch's next to them: the median over the rounds, and
the ratio of the least of each. Points of gradfit are plans for a budget, not tuned by hand; beside
their time stands what the plan predicted, and below which no choice of values to keep can come, by
the operations' measured seconds. "gradfit, split" may also cut the batch, as `gf.fit` does; beside
it stands plain PyTorch in as many pieces by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fair import Times, one_thread, race
from frontier_compiled import compiled_points
from frontier_joint import joint
from frontier_models import Case, cases
from frontier_plot import draw, read
from least_seconds import least_seconds
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import gradfit as gf

ROOT = Path(__file__).parents[1]
SPLIT_SHARES = (0.5, 0.35, 0.15)
SHARES = (0.97, 0.95, 0.9, 0.8, 0.65, 0.5, 0.42, 0.35, 0.25, 0.15, 0.1)
_MORE = 3  # times as many rounds for who seems to be ahead, and for gradfit's point at that memory
_KEPT = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product")


@dataclass
class Point:
    """One way of running the passes: what it takes, and how long."""

    peer: str
    setting: str
    run: Callable[[], None]
    peak_bytes: int = 0
    times: Times = field(default_factory=Times)
    predicted: float | None = None
    bound: float | None = None


def keep_products(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(name in str(func) for name in _KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def first_blocks(count: int, blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if number < count else block(x)
    return x


def selective(count: int, blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    for number, block in enumerate(blocks):
        x = (
            checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            if number < count
            else block(x)
        )
    return x


def in_segments(count: int, blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(blocks, count, x, use_reentrant=False)


def plainly(blocks: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return blocks(x)


def passes(case: Case, runner: Any, plan: gf.Plan | None = None) -> None:
    case.model.runner = runner
    if plan is None:
        loss = case.loss(case.model, case.batch)
    else:
        with gf.apply(case.model, plan):
            loss = case.loss(case.model, case.batch)
    loss.backward()


def in_pieces(case: Case, size: int, plan: gf.Plan | None = None) -> None:
    """Both passes, so many rows at a time."""
    case.model.runner = plainly
    rows = case.batch["x"].size(0)
    for start in range(0, rows, size):
        part = {name: tensor[start : start + size] for name, tensor in case.batch.items()}
        with gf.apply(case.model, plan) if plan is not None else contextlib.nullcontext():
            loss = case.loss(case.model, part)
        (loss * (part["x"].size(0) / rows)).backward()
        del loss


def points(case: Case, *, full: bool) -> Iterator[Point]:
    count = len(case.model.blocks)
    yield Point("plain", "", partial(passes, case, plainly))
    chosen = (
        range(1, count + 1) if full else sorted({count // 4, count // 2, 3 * count // 4, count})
    )
    for number in chosen:
        yield Point(
            "checkpoint",
            f"{number} of {count} blocks",
            partial(passes, case, partial(first_blocks, number)),
        )
    for number in range(2, count // 2 + 1) if full else (2, 4):
        yield Point(
            "checkpoint_sequential",
            f"{number} segments",
            partial(passes, case, partial(in_segments, number)),
        )
    for number in chosen if full else (count,):
        run = partial(passes, case, partial(selective, number))
        yield Point("selective", f"products, {number} of {count}", run)


def plans(case: Case, plain_bytes: int) -> Iterator[Point]:
    rows = case.batch["x"].size(0)
    case.model.runner = plainly
    found = gf.profile(case.model, case.loss, case.batch)
    graph = found.at(rows, rows=rows)
    for share in [*SHARES, 0.0]:
        budget = graph.static_bytes + int(plain_bytes * share)
        setting = f"{share:.0%} budget"
        try:
            # One of two micro-batches: gradients are there before, as for everyone else here.
            plan = gf.plan(found, memory=budget, batch_size=2 * rows, micro_batch=rows)
        except gf.BudgetInfeasible as error:
            setting, budget = "the least", error.min_bytes
            plan = gf.plan(found, memory=budget, batch_size=2 * rows, micro_batch=rows)
        bound = least_seconds(graph, budget) / graph.plain_seconds
        run = partial(passes, case, plainly, plan)
        yield Point("gradfit", setting, run, predicted=plan.extra_fraction, bound=bound)
        if setting == "the least":
            break
    if any(isinstance(module, nn.BatchNorm2d) for module in case.model.modules()):
        return  # in pieces its statistics are others
    by_hand: set[int] = set()
    for share in SPLIT_SHARES:
        plan = gf.plan(found, memory=graph.static_bytes + int(plain_bytes * share), batch_size=rows)
        if plan.micro_batch < rows:
            name = f"{share:.0%}, {plan.micro_batch} rows"
            run = partial(in_pieces, case, plan.micro_batch, plan)
            yield Point(
                "gradfit, split", name, run, predicted=plan.step_seconds / graph.plain_seconds - 1
            )
        if plan.micro_batch not in {rows, *by_hand}:
            by_hand.add(plan.micro_batch)
            yield Point(
                "split by hand",
                f"{plan.micro_batch} rows",
                partial(in_pieces, case, plan.micro_batch),
            )


def measure(case: Case, *, rounds: int, full: bool, compiled: bool) -> list[Point]:
    """Every point's peak, in a run of its own; then its seconds, one run of each per round."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = list(points(case, full=full))
    found[0].peak_bytes = peak_of(case, found[0])
    found += plans(case, found[0].peak_bytes)
    for point in found[1:]:
        point.peak_bytes = peak_of(case, point)
    if compiled:
        case.model.runner = plainly
        found += [Point("compile", name, run, peak) for name, run, peak in compiled_points(case)]
    for point, times in zip(
        found, race(found[0].run, [p.run for p in found[1:]], rounds=rounds), strict=True
    ):
        point.times = times
    for peer in behind(found):  # by noise, or indeed: the two run on, beside plain
        rival = min(
            (p for p in mine(found) if fits(p, peer)), key=lambda p: p.times.ratio, default=None
        )
        if rival is not None:
            again = race(found[0].run, [peer.run, rival.run], rounds=_MORE * rounds)[1:]
            for point, times in zip((peer, rival), again, strict=True):
                point.times.seconds += times.seconds
                point.times.ratios += times.ratios
    return found


def peak_of(case: Case, point: Point) -> int:
    with gf.meter(case.model, case.batch) as live:
        static = live.current_bytes
        point.run()
    return live.peak_bytes - static


def mine(found: list[Point]) -> list[Point]:
    return [point for point in found if point.peer in ("gradfit", "gradfit, split", "plain")]


def fits(point: Point, peer: Point) -> bool:
    return point.peak_bytes <= peer.peak_bytes * 1.01


def behind(found: list[Point]) -> list[Point]:
    """Eager peers' points at which gradfit has none that is as small and as fast."""
    return [
        peer
        for peer in found
        if peer.peer not in ("gradfit", "gradfit, split", "split by hand", "plain", "compile")
        and not any(fits(p, peer) and p.times.ratio <= peer.times.ratio * 1.01 for p in mine(found))
    ]


def table(case: Case, found: list[Point]) -> list[str]:
    plain = found[0]
    lines = [
        f"{case.name}: plain {plain.peak_bytes / 1e6:.1f} MB, {plain.times.least:.3f} s",
        (
            f"  {'':24}{'':20}{'MB':>8}{'memory':>9}{'time':>9}{'by least':>10}"
            f"{'predicted':>11}{'bound':>9}"
        ),
    ]
    for point in sorted(found, key=lambda p: (p.peer != "plain", p.peer, -p.peak_bytes)):
        memory, least = (
            point.peak_bytes / plain.peak_bytes,
            point.times.least / plain.times.least - 1,
        )
        line = f"  {point.peer:24}{point.setting:20}{point.peak_bytes / 1e6:8.1f}{memory:9.1%}"
        line += f"{point.times.ratio - 1:+9.1%}{least:+10.1%}"
        if point.predicted is not None:
            line += f"{point.predicted:+11.1%}"
        if point.bound is not None:
            line += f"{point.bound:+9.1%}"
        lines.append(line)
    slower = [f"{peer.peer} {peer.setting}" for peer in behind(found)]
    lines.append(
        "  gradfit is below every eager peer" if not slower else f"  not below: {', '.join(slower)}"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, nothing is written")
    parser.add_argument(
        "--full", action="store_true", help="every peer on k of n blocks for every k"
    )
    parser.add_argument(
        "--wide", action="store_true", help="GPT-2 as wide as it is in use, 2048 tokens"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile with activation_memory_budget too"
    )
    parser.add_argument("--rounds", type=int, help="of the race; 7 unless it is quick")
    parser.add_argument("--only", help="one model, nothing is written")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    ground = one_thread()
    lines = [
        (
            f"frontier, {datetime.date.today()}, torch {torch.__version__}, gradfit"
            f" {gf.__version__}, {ground}"
        ),
        (
            f"time: median over {rounds} rounds of the ratio to plain next to it; by least: ratio"
            " of the least CPU seconds"
        ),
        f"where a peer's point seemed ahead, it and gradfit's ran {_MORE * rounds} more",
        (
            "bound: no choice of values to keep and to rebuild takes less, at these operations'"
            " seconds and this memory"
        ),
    ]
    if not options.compile:
        lines.append(
            "torch.compile with activation_memory_budget: with --compile; it compiles a minute for"
            " each point"
        )
    print("\n".join(lines), flush=True)
    for case in cases(quick=options.quick, wide=options.wide):
        if options.only and case.name != options.only:
            continue
        found = measure(case, rounds=rounds, full=options.full, compiled=options.compile)
        lines += (now := table(case, found))
        print("\n".join(now), flush=True)
    if not (options.only or options.wide):
        lines += (now := joint(rows=64 if options.quick else 256, rounds=rounds))
        print("\n".join(now))
    if not (options.quick or options.only):
        name = (
            "frontier_wide" if options.wide else "frontier_every_k" if options.full else "frontier"
        )
        (ROOT / "benchmarks" / "results" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    if not (options.quick or options.only or options.wide):
        (ROOT / "docs" / "images" / "frontier.svg").write_text(draw(read("\n".join(lines))))


if __name__ == "__main__":
    main()
