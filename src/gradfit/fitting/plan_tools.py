"""What the search for a plan works with, from its first measurement to its last trial."""

from __future__ import annotations

from typing import NamedTuple

from gradfit.fitting.batch_rows import RowCounter
from gradfit.fitting.measured_loss import MeasuredLoss
from gradfit.fitting.progress import ProgressReport
from gradfit.fitting.reserved import ReservedMemory
from gradfit.fitting.step_profiles import StepProfiles
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.fitting.token_tiles import TokenTiles
from gradfit.fitting.trial import Trials


class PlanTools(NamedTuple):
    """One of each for a step, and none knows who uses it."""

    step: StepToPlan
    loss: MeasuredLoss
    rows: RowCounter
    profiles: StepProfiles
    tiles: TokenTiles
    trials: Trials
    progress: ProgressReport


def tools_for(step: StepToPlan, reserved: ReservedMemory, progress: ProgressReport) -> PlanTools:
    """Those of a step of which nothing was measured; `reserved` is of its devices."""
    loss, rows = MeasuredLoss(step), RowCounter(step.runner)
    return PlanTools(
        step,
        loss,
        rows,
        StepProfiles(step, loss, rows, progress),
        TokenTiles(step, rows),
        Trials(step, loss, reserved, progress),
        progress,
    )
