"""A plan that was measured to hold, and for which batches it does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradfit.fitting.batch_shapes import Shape
from gradfit.planning.api import with_update_groups
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.recompute.follow_plan import Script, Unrecorded, UnrecordedRest, recording
from gradfit.tiling.tile import with_tiles


@dataclass(frozen=True)
class TestedPlan:
    """A plan that was measured to hold, the profile it comes from, and the peak that was
    measured.
    """

    plan: Plan
    profile: Profile
    shape: Shape
    peak_bytes: int
    steady: bool  # the same operations whatever the data: what was measured once holds again
    seen: bool = False  # the peak is that of a real step, not of a trial
    seen_bytes: int = 0  # of the largest batch of such a step: a larger one is measured again
    # by autograd, in the trial, of what need not be listened to; None before it
    saved_bytes: int | None = None
    asked: int = 0  # after so many of these saves, in the trial, nothing was saved that is rebuilt
    reads_data: bool = True  # the forward looks at the data, which may so decide what it does
    # what the optimizer changes is copied before, so that its step can be taken back
    copied: bool = False
    by_size: bool = False  # it was tested with smaller batches, and is by arithmetic one for these
    # the peak that was measured in the trial, with the gradients that it left out
    tested_bytes: int = 0
    # all values may be so many times as large as in the profile, and the budget still holds
    slack: float = 1.0
    # what the device's allocator will have reserved, by the sequence of the trial; 0 where it does
    # not say, and then with a copy beside the update
    reserved_bytes: int = 0
    copied_reserved_bytes: int = 0

    @cached_property
    def script(self) -> Script:
        """The plan with the bytes that it reckons with for each value: more, and it is another
        computation.
        """
        rows = self.plan.micro_batch
        return Script(
            self.plan, [round(value.nbytes.at(rows) * self.slack) for value in self.profile.values]
        )

    @property
    def saved_limit(self) -> float:
        """Bytes that autograd may save, of what need not be listened to, and the budget holds.

        Only what the forward has made may grow: parameters and inputs are saved, too, and are there
        anyway.
        """
        if self.saved_bytes is None:
            return math.inf
        grows = min(self.saved_bytes, self._unrecorded_bytes)
        return self.saved_bytes + grows * (self.slack - 1.0)

    @cached_property
    def _unrecorded_bytes(self) -> int:
        """What the profile has of values that are kept without being listened to."""
        if self.plan.keeps_everything:
            return self.plan.kept_bytes
        rows, script = self.plan.micro_batch, self.script
        made = [v for v, act in enumerate(self.plan.actions) if act != "external"]
        rest = made[script.last + 1 :]
        return round(sum(self.profile.values[value].nbytes.at(rows) for value in rest))

    @property
    def tail(self) -> UnrecordedRest | None:
        """What is known of the forward's rest, after the plan's last decision; None if it must be
        heard.
        """
        if self.reads_data or self.saved_bytes is None:
            return None
        return UnrecordedRest(int(self.saved_limit), last_rebuilt=self.asked)

    def tiled(
        self, loss_fn: Callable[[torch.nn.Module, Any], Any]
    ) -> Callable[[torch.nn.Module, Any], Any]:
        """`loss_fn` in the plan's tiles, if it has any."""
        return with_tiles(loss_fn, self.plan.tiles)

    def following(self) -> Any:
        """What a forward runs in, to follow the plan; `Diverged` if it does not.

        Nothing need be recorded where all is kept, or after the last that is not; but what autograd
        saves of that is added up in every micro-batch: a model may do another thing in each call,
        by Python's own randomness.
        """
        if not self.plan.keeps_everything:
            return recording(self.script, self.tail)[0]
        return Unrecorded(self.saved_limit)


def not_tried(plan: Plan, profile: Profile, shape: Shape) -> TestedPlan:
    """A plan that is yet to be tried out."""
    return TestedPlan(plan, profile, shape, 0, steady=True)


def keeps_whole_batch(plan: Plan) -> bool:
    """Whether a step is one plain pass."""
    return plan.keeps_everything and plan.steps == 1


def with_update_copy(tested: TestedPlan, copy_bytes: int, limit_bytes: int) -> TestedPlan:
    """With so large a copy beside the optimizer's step, where there is room, if need be with its
    parameters updated in more groups; that may be the peak of all.
    """
    for updating in tested.profile.updating(tested.plan.update_groups).smaller_updates():
        with_copy = _with_copy(tested, updating, copy_bytes, limit_bytes)
        if with_copy is not None:
            return with_copy
    return tested


def _with_copy(
    tested: TestedPlan, updating: Profile, copy_bytes: int, limit_bytes: int
) -> TestedPlan | None:
    """Where the update is run as this profile says; None if there is no room."""
    plan, graph = tested.plan, updating.at(1, rows=tested.plan.batch_size)
    parts = {"optimizer step": graph.optimizer_burst_bytes, "copy to go back to": copy_bytes}
    peak = graph.static_bytes + sum(parts.values())
    reserved = tested.copied_reserved_bytes
    if max(peak, reserved) > limit_bytes:
        return None
    if plan.update_groups != updating.update_groups:
        plan = with_update_groups(updating, plan, updating.update_groups)
    if peak > plan.peak_bytes:
        where = "in the optimizer's step, beside a copy to go back to"
        plan = dataclasses.replace(
            plan, peak_bytes=peak, peak_at=where, breakdown={**graph.static_breakdown, **parts}
        )
    return dataclasses.replace(
        tested,
        plan=dataclasses.replace(plan, reserved_bytes=max(reserved, plan.reserved_bytes)),
        peak_bytes=max(peak, reserved, tested.peak_bytes),
        reserved_bytes=max(reserved, tested.reserved_bytes),
        copied=True,
    )


def smaller(plan: Plan, min_batch: int) -> Plan:
    """The same plan at half the micro-batch, or the smallest that the model can run."""
    micro = max(min_batch, plan.micro_batch // 2)
    return dataclasses.replace(plan, micro_batch=micro, steps=-(-plan.batch_size // micro))
