"""What is known of a loss: how it adds up over the parts of a batch, whether it says a count, and
whether what it was divided by can be read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from gradfit._torch_compile import is_compiled
from gradfit.batches.additivity import has_count
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, as_written
from gradfit.batches.snapshot import untouched
from gradfit.batches.weights import BatchWeights
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.profiling.measure import additivity_within
from gradfit.profiling.meter import Meter
from gradfit.profiling.room_for_rows import RoomForRows

_LOSS_IS_COMPILED = (
    "The loss is made inside of a compiled function, which does not say what it was divided by: so"
    " that micro-batches can be weighed, compiled functions are run as they were written. To run"
    " them compiled, return gf.Loss(sum=…, count=…) from loss_fn, or use gf.losses (causal_lm and"
    " others), or compute the loss outside of what is compiled."
)


class MeasuredLoss:
    """What was measured of a step's loss so far."""

    def __init__(self, step: StepToPlan) -> None:
        self._step = step
        self.additivity: Additivity | None = None
        """How the parts of a batch make the whole; None before it was measured."""
        self._has_count: bool | None = None  # of one row; None before it was asked
        self._is_as_written = False  # compiled functions are not run compiled

    @property
    def may_be_in_parts(self) -> bool:
        """Whether, as far as was measured, a batch may be cut."""
        return not self._step.exact or self.additivity is None or self.additivity.adds_up

    @property
    def runs_parts(self) -> bool:
        """Whether fewer rows can be run, so that `exact=False` would cut the batch."""
        return self.additivity is None or self.additivity.runs_parts

    @property
    def why_whole(self) -> str:
        """Why a batch is not cut."""
        additivity = self.additivity
        if additivity is None or additivity.adds_up:
            return "micro_batch='whole'"
        return f"relative error {additivity.error:.2g} on a few rows; {additivity.reason}"

    def weights_of(self, batch_size: int) -> BatchWeights:
        """What weighs the parts of a batch of so many rows."""
        return BatchWeights(self.additivity, batch_size, exact=self._step.exact)

    def measure_additivity(
        self, batch: Any, memory_bytes: int, meter: Callable[..., Meter]
    ) -> None:
        """As measuring a profile does, too, on as many rows as there is memory for; `meter` counts
        bytes, and may refuse to let them pass a limit.
        """
        step = self._step
        there = meter(step.model, step.optimizer, batch, device=step.device)
        with untouched(step.model) as before, there:
            of_what = (step.model, step.runner.loss_fn, batch, step.runner.split)
            room = RoomForRows(*of_what, memory_bytes, optimizer=step.optimizer)
            self.additivity = additivity_within(*of_what, room, before.rewind)

    def has_count(self, batch: Any, loss_fn: LossFunction) -> bool:
        """Whether the loss of one row says a count; `loss_fn` is the step's, in tiles perhaps."""
        if self._has_count is None:
            with untouched(self._step.model):
                self._has_count = has_count(self._step.model, loss_fn, batch)
        return self._has_count

    def run_as_written(self) -> bool:
        """From now on compiled functions are run as they were written, where a loss that is made
        inside of one does not say what it was divided by; whether they were not before.
        """
        if self._is_as_written:
            return False
        self._is_as_written = True
        runner = self._step.runner
        runner.loss_fn = as_written(runner.loss_fn)
        if is_compiled(self._step.model, runner.loss_fn):
            warnings.warn(_LOSS_IS_COMPILED, stacklevel=2)
        return True
