"""Memory over time, with and without the plan: measured where it fits, else predicted, which the
page then says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from gradfit.batches.runner import LossFunction, run_part
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.planning.plan import Plan
from gradfit.planning.simulate import KEEP, REBUILD, simulate
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.profile import Profile
from gradfit.profiling.step_graph import Graph
from gradfit.recompute.apply import apply
from gradfit.report.report_record import Curve
from gradfit.tree import split_batch


def plain_peak_bytes(profile: Profile, batch_size: int) -> int:
    """What plain PyTorch would need for the whole batch in one piece, by the profile."""
    graph = profile.at(batch_size, accumulates=False)
    return simulate(graph, _keeping_all(graph)).peak_bytes


def _keeping_all(graph: Graph) -> list[int]:
    return [KEEP if keepable else REBUILD for keepable in graph.keepable]


def predict_plain(profile: Profile, batch_size: int) -> Curve:
    """The curve of plain PyTorch on paper, for a batch that does not fit."""
    graph = profile.at(batch_size, accumulates=False)
    moments: list[tuple[str, int, int]] = []
    simulate(graph, _keeping_all(graph), timeline=moments)
    forward = _starts(graph.op_seconds, 0.0)
    backward = _starts([node.seconds.at(batch_size) for node in profile.nodes], forward[-1])
    # what comes after the last node, as the optimizer's step, is at the end
    starts = {"forward": forward, "sweep": backward, "backward": backward}
    last = len(backward) - 1
    return [
        (starts.get(phase, backward)[index if phase in starts else last], count)
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
            with contextlib.nullcontext() if plan is None else apply(model, plan):
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
    wanted = {0, len(curve) - 1}
    for stretch in _stretches(curve, max(1, most // 2)):
        wanted |= {
            min(stretch, key=lambda index: curve[index][1]),
            max(stretch, key=lambda index: curve[index][1]),
        }
    return [curve[index] for index in sorted(wanted)]


def _stretches(curve: Curve, count: int) -> Iterable[list[int]]:
    """The positions of points in each of so many stretches of the same time."""
    start, end = curve[0][0], curve[-1][0]
    width = (end - start) / count or 1.0
    stretches: dict[int, list[int]] = {}
    for index, (seconds, _) in enumerate(curve):
        stretches.setdefault(min(count - 1, int((seconds - start) / width)), []).append(index)
    return stretches.values()


def _starts(seconds: list[float], start: float) -> list[float]:
    """When each begins that takes so long, and when the last ends."""
    return list(accumulate(seconds, initial=start))
