"""A plan that was tried out, as steps go by it: with what it may grow by, and with a copy to go
back to while the optimizer steps, where the budget has room.
"""

from __future__ import annotations

import dataclasses

from gradfit.devices import wait_for
from gradfit.fitting.families import with_slack
from gradfit.fitting.step_to_plan import StepToPlan, has_sparse_gradients, local_bytes, trained
from gradfit.fitting.tested_plan import TestedPlan, with_update_copy
from gradfit.fitting.trial import state_bytes
from gradfit.fitting.update_rollback import UpdateSnapshot
from gradfit.profiling.clock import seconds_now


class PlanFinisher:
    """Finishes the plans of a step."""

    def __init__(self, step: StepToPlan) -> None:
        self._step = step
        self._copy_pace = 0.0  # seconds for a byte of the copy, once it was made

    def finish(self, tested: TestedPlan) -> TestedPlan:
        """A plan that was tried out, as a step goes by it."""
        step = self._step
        tested = with_slack(
            dataclasses.replace(tested, tested_bytes=max(tested.peak_bytes, tested.tested_bytes)),
            step.limit_bytes,
        )
        tested = self.with_copy(tested, step.limit_bytes)
        return dataclasses.replace(
            tested, plan=dataclasses.replace(tested.plan, budget_bytes=step.budget_bytes)
        )

    def with_copy(self, tested: TestedPlan, limit_bytes: int) -> TestedPlan:
        """With a copy of what the optimizer changes, if this limit has room for one."""
        if not self._step.is_ours:
            return tested
        changed = local_bytes(trained(self._step.model))
        copied = changed + tested.profile.optimizer_bytes
        # what sparse gradients take beside the update is not in the profile, only in the trial
        if has_sparse_gradients(self._step.model) and tested.peak_bytes + copied > limit_bytes:
            return tested
        with_copy = with_update_copy(tested, copied, limit_bytes)
        # else steps tell the seconds
        if not with_copy.copied or not changed or not self._step.compares_ahead:
            return with_copy
        seconds = copied * self._seconds_per_byte(changed)
        return dataclasses.replace(with_copy, plan=with_copy.plan.with_extra_seconds(seconds))

    def _seconds_per_byte(self, changed: int) -> float:
        """As measured once; `changed` is how many bytes of parameters are copied."""
        if not self._copy_pace:
            seconds = min(self._copy_seconds() for _ in range(2))
            self._copy_pace = seconds / (changed + state_bytes(self._step.optimizer))
        return self._copy_pace

    def _copy_seconds(self) -> float:
        step = self._step
        wait_for(step.devices)
        started = seconds_now()
        with UpdateSnapshot(step.model.parameters(), step.optimizer, taken=True):
            wait_for(step.devices)
            return seconds_now() - started
