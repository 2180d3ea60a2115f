"""Memory over time, with and without the plan: measured where it fits, else predicted, which the
page then says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit.batches.runner import LossFunction, run_part
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.planning.plan import Plan
from gradfit.planning.simulate import KEEP, REBUILD, simulate
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.profile import Profile
from gradfit.recompute.apply import apply
from gradfit.report.report_record import Curve
from gradfit.tree import split_batch


def plain_peak_bytes(profile: Profile, batch_size: int) -> int:
    """What plain PyTorch would need for the whole batch in one piece, by the profile."""
    graph = profile.at(batch_size, accumulates=False)
    return simulate(
        graph, [KEEP if keepable else REBUILD for keepable in graph.keepable]
    ).peak_bytes


def predict_plain(profile: Profile, batch_size: int) -> Curve:
    """The curve of plain PyTorch on paper, for a batch that does not fit."""
    graph = profile.at(batch_size, accumulates=False)
    moments: list[tuple[str, int, int]] = []
    simulate(
        graph, [KEEP if keepable else REBUILD for keepable in graph.keepable], timeline=moments
    )
    nodes = [node.seconds.at(batch_size) for node in profile.nodes]
    forward = sum(graph.op_seconds)
    starts = {"forward": _cumulated(graph.op_seconds, 0.0), "backward": _cumulated(nodes, forward)}
    starts["sweep"] = starts["backward"]
    end = forward + sum(nodes)
    return [
        (starts[phase][index] if phase in starts and index < len(starts[phase]) else end, count)
        for phase, index, count in moments
    ]


def measure_curve(
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    batch: Any,
    *,
    plan: Plan | None = None,
    split: Callable[[Any, int], Iterable[Any]] | None = None,
) -> Meter:
    """Run forward and backward over the batch, plainly in one piece or as planned, and leave no
    trace.

    Returns the meter, whose `timeline` is the curve. The optimizer does not step, so what it will
    allocate is missing.
    """
    parts = [batch] if plan is None else (split or split_batch)(batch, plan.micro_batch)
    live = meter(model, optimizer, batch, timeline=True)
    with trials_end(), untouched(model), live:
        for part in parts:
            if plan is None:
                loss = run_part(loss_fn, model, part).loss
            else:
                with apply(model, plan):
                    loss = run_part(loss_fn, model, part).loss
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    return live


def thin(curve: Curve, most: int = 400) -> Curve:
    """Fewer points with the same outline: of each stretch of time the lowest and the highest, in
    their order.

    >>> thin([(0.0, 1), (0.1, 9), (0.2, 3), (1.0, 2)], most=4)
    [(0.0, 1), (0.1, 9), (1.0, 2)]
    """
    if len(curve) <= 2:
        return curve
    bins = max(1, most // 2)
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / bins or 1.0
    kept: dict[int, list[int]] = {}
    for index, (seconds, count) in enumerate(curve):
        box = min(bins - 1, int((seconds - start) / width))
        low_high = kept.setdefault(box, [index, index])
        if count < curve[low_high[0]][1]:
            low_high[0] = index
        if count > curve[low_high[1]][1]:
            low_high[1] = index
    wanted = sorted({index for pair in kept.values() for index in pair} | {0, len(curve) - 1})
    return [curve[index] for index in wanted]


def _cumulated(seconds: list[float], start: float) -> list[float]:
    found = []
    for duration in seconds:
        found.append(start)
        start += duration
    return found
