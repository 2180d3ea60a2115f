"""The fastest of a few plans that hold, by the clock, before the first step: passes of each take
turns (`race.py`).
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory
from gradfit._torch_fsdp import drop_gradients
from gradfit.batches.runner import Part
from gradfit.batches.snapshot import untouched
from gradfit.devices import free_cached_memory, wait_for
from gradfit.fitting.modes import Planned
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.race import Race
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.profiling.clock import seconds_now
from gradfit.recompute.follow_plan import Diverged


def fastest(tools: PlanTools, ways: list[TestedPlan], batch: Any) -> TestedPlan:
    """By the clock, whose seconds it then has.

    Plans with and without recomputation are too unlike for a prediction: one pays for recording and
    replaying, the other for more passes.
    """
    step = tools.step
    ways = [one for one in ways if one.steady] or ways[:1]
    if not ways[0].steady or not step.compares_ahead:
        return ways[0]
    tools.progress.begin("timing a plan" if len(ways) == 1 else f"timing {len(ways)} plans")
    parts = [next(iter(step.runner.cut(batch, one.plan.micro_batch))) for one in ways]
    with untouched(step.model):
        try:
            timed = _timed(step, list(zip(ways, parts, strict=True)))
            return min(timed, key=lambda one: one.plan.step_seconds)
        except Exception as error:
            if not _is_left_to_the_step(error):
                raise
            traceback.clear_frames(error.__traceback__)
        drop_gradients(step.model)
    free_cached_memory()
    return ways[0]


def _is_left_to_the_step(error: Exception) -> bool:
    """Whether a plan is not steady after all, as its step will notice; or memory ran out, for which
    a step is repeated.
    """
    return isinstance(error, Diverged) or is_out_of_memory(error)


def _timed(step: StepToPlan, ways: Sequence[tuple[TestedPlan, Any]]) -> Iterator[TestedPlan]:
    """With the seconds that passes of these micro-batches take here and now, each in its turn: a
    machine that is slower for a while is so for all of them. What was measured before is only a
    hint.
    """
    race = _run_race(step, ways)
    drop_gradients(step.model)
    for place, (tested, _) in enumerate(ways):
        updating = tested.profile.updating(tested.plan.update_groups)
        seconds = race.step_seconds(place) + updating.optimizer_seconds
        yield dataclasses.replace(tested, plan=tested.plan.with_step_seconds(seconds))


def _run_race(step: StepToPlan, ways: Sequence[tuple[TestedPlan, Any]]) -> Race:
    passes = [tested.plan.batch_size / step.runner.rows(part) for tested, part in ways]
    race = Race(passes, together=distributed.is_running())
    while not race.is_over:
        for place in race.running:
            race.add(place, _pass_seconds(step, *ways[place]))
        race.drop_slow()
    return race


def _pass_seconds(step: StepToPlan, tested: TestedPlan, part: Any) -> float:
    """Of a pass as most of its step are: if it has several, not the first one, into gradients that
    are there.
    """
    if tested.plan.steps == 1:
        drop_gradients(step.model)
    started = seconds_now()
    loss = step.runner.forward(Part(0, 0, part), Planned(tested)).loss
    torch.autograd.backward(loss)
    wait_for(step.devices)
    return seconds_now() - started
