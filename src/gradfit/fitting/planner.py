"""Plans for the batches that come: the one that serves a batch, made before or new, and what steps
have taught about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from gradfit import _torch_distributed as distributed
from gradfit.batches.additivity_record import Additivity
from gradfit.fitting.batch_rows import BatchRows
from gradfit.fitting.batch_shapes import Shape
from gradfit.fitting.families import PlanningTime, may_be_slow
from gradfit.fitting.known_plans import KnownPlans
from gradfit.fitting.larger_parts import LargerParts
from gradfit.fitting.plan_finisher import PlanFinisher
from gradfit.fitting.plan_improvement import PlanImprovement
from gradfit.fitting.plan_of_part import plan_like_part
from gradfit.fitting.plan_search import search_plan
from gradfit.fitting.plan_tools import tools_for
from gradfit.fitting.plans_on_paper import cut_smaller, tighter_plan
from gradfit.fitting.progress import OnProgress, ProgressReport
from gradfit.fitting.reserved import ReservedMemory
from gradfit.fitting.step_to_plan import PlanRequest, StepToPlan
from gradfit.fitting.tested_plan import TestedPlan, keeps_whole_batch
from gradfit.fitting.trial import state_bytes
from gradfit.planning.api import with_alternatives
from gradfit.planning.plan import Plan


class _Served(NamedTuple):
    """Which plan serves a batch, as long as there are no others."""

    plans: list[TestedPlan]
    additivity: Additivity
    batch_size: int
    shape: Shape
    served: TestedPlan


class Planner:
    """Profiles, plans and tries out, per input shape; remembers what it found.

    Args:
        step: what plans are made for.
        known: plans of an earlier step.
        planning_share: of the time trained so far, what plans that are not necessary may take.
        on_progress: told when something begins; None shows it on a terminal.
    """

    def __init__(
        self,
        step: StepToPlan,
        *,
        known: Iterable[TestedPlan] = (),
        planning_share: float = 0.05,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.step = step
        self.reserved = ReservedMemory(step.devices)
        self.time = PlanningTime(planning_share)
        self._progress = ProgressReport(on_progress)
        self._tools = tools_for(step, self.reserved, self._progress)
        self.loss, self.rows = self._tools.loss, self._tools.rows
        self._finisher = PlanFinisher(step)
        self._known = KnownPlans(step, self.loss)
        self._improvement = PlanImprovement(self._tools, self._known, self._finisher, self.time)
        self._larger_parts = LargerParts(step, self.rows)
        self._states: int | None = None  # of the optimizer, after the last measured step
        self._last_served: _Served | None = None
        self._described: tuple[Plan, Plan] | None = None  # the last plan that was asked for
        self.take_up(known)

    @property
    def known(self) -> tuple[TestedPlan, ...]:
        """Every plan that is gone by so far, in the order in which they are tried for a batch."""
        return tuple(self._known.all)

    def take_up(self, plans: Iterable[TestedPlan]) -> None:
        """Go by these plans from now on, and by what was measured of the loss when they were
        made.
        """
        self._improvement.forget_all_but(())
        self._known.take_up(plans)

    def described(self, tested: TestedPlan) -> Plan:
        """The plan with the next ones for less memory and for more, and whether it may change."""
        if self._described is None or self._described[0] is not tested.plan:
            self._described = (tested.plan, with_alternatives(tested.profile, tested.plan))
        plan = self._described[1]
        others = [one.plan for one in self._improvement.rivals_in_turn(tested)]
        if not others:
            return plan
        said = " and ".join(f"micro-batch {one.split_text}, {one.kept_text}" for one in others)
        return dataclasses.replace(plan, comparing=said)

    # -- the plan of a batch ----------------------------------------------------------------------

    def rows_at_most(self, rows: BatchRows) -> int:
        """The rows of a batch; or, where they would have to be counted and a plan serves it, no
        more than that one is for.
        """
        if rows.is_counted:
            return rows.exact
        larger = self._known.for_any_rows(self._shape(rows.batch))
        return rows.at_most(None if larger is None else larger.plan)

    def serving(self, batch: Any, batch_size: int) -> TestedPlan | None:
        """The plan that `tested_plan` would give, if it was made before and nothing need be
        measured.
        """
        shape, additivity, plans = self._shape(batch), self.loss.additivity, self._known.all
        last = self._last_served
        if (
            last is not None
            and last.plans is plans
            and last.additivity is additivity
            and last.batch_size == batch_size
            and last.shape == shape
        ):
            return self._known.mark_used(last.served)
        request = PlanRequest(batch, batch_size, shape, is_first=not plans)
        larger = self._known.for_larger(request)
        if additivity is None or larger is None or self._wants_own(larger, request):
            return None
        if self._improvement.is_due(larger, request) or self._may_be_kept(larger, request):
            return None
        # else it depends on the time there is, or other plans are still compared
        if not may_be_slow(larger, shape, batch_size) and self._improvement.is_done(larger):
            self._last_served = _Served(plans, additivity, batch_size, shape, larger)
        return self._known.mark_used(self._improvement.in_turn(larger, request))

    def tested_plan(self, batch: Any, batch_size: int) -> TestedPlan:
        """A plan for batches of this shape: one made before for this shape or a larger one, or a
        new one.
        """
        request = self._request(batch, batch_size)
        self._measure_missing_additivity(request)
        tested = self._find(request)
        if tested is None:
            tested = self._new_plan(request)
        elif self._improvement.is_due(tested, request):
            with self.time.planning(), self._progress.running():
                self._improvement.look_for_faster(tested, request)
        return self._known.mark_used(self._improvement.in_turn(tested, request))

    def _request(self, batch: Any, batch_size: int) -> PlanRequest:
        return PlanRequest(batch, batch_size, self._shape(batch), is_first=not self._known.all)

    def _shape(self, batch: Any) -> Shape:
        """By which a batch's plans are found."""
        return self.rows.shape(batch)

    def _measure_missing_additivity(self, request: PlanRequest) -> None:
        """Of plans of single rows, or from a version that did not measure it."""
        if not self._known.all or self.loss.additivity is not None:
            return
        if request.batch_size > 1 or self.rows.count(request.batch) > 1:
            self._tools.profiles.measure_additivity(request.batch)

    def _find(self, request: PlanRequest) -> TestedPlan | None:
        """A plan made before for this shape or a larger one, or what arithmetic makes of one."""
        larger = self._known.for_larger(request)
        if larger is not None:
            if self._wants_own(larger, request):
                return None
            return self._kept_where_smaller(larger, request) or larger
        if distributed.is_running():  # where ranks run forwards, and so plan, together
            return None
        grown = self._known.grown(request)
        return self._plan_in_parts(request) if grown is None else self._remember(grown)

    def _may_be_kept(self, larger: TestedPlan, request: PlanRequest) -> bool:
        """Whether it is to be looked at, where ranks need not plan together."""
        return not distributed.is_running() and self._known.may_be_kept(larger, request)

    def _kept_where_smaller(self, larger: TestedPlan, request: PlanRequest) -> TestedPlan | None:
        """As `KnownPlans.kept_where_smaller`, and remembered."""
        if distributed.is_running():
            return None
        kept = self._known.kept_where_smaller(larger, request)
        return None if kept is None else self._remember(kept)

    def _wants_own(self, larger: TestedPlan, request: PlanRequest) -> bool:
        """Whether batches of this shape should have a plan of their own, and there is time to make
        it.
        """
        return (
            not self.step.reproducible
            and not distributed.is_running()
            and may_be_slow(larger, request.shape, request.batch_size)
            and self.time.has_room_for(self.time.plan_seconds)
        )

    def _plan_in_parts(self, request: PlanRequest, below: int | None = None) -> TestedPlan | None:
        """As `KnownPlans.in_parts`, and remembered."""
        parts = self._known.in_parts(request, below)
        return None if parts is None else self._remember(parts)

    def _new_plan(self, request: PlanRequest) -> TestedPlan:
        """A new plan, which may still be improved."""
        with self.time.timing_a_plan(is_counted=bool(self._known.all)):
            with self._progress.running():
                found = search_plan(self._tools, request)
            tested = self._remember(self._finisher.finish(found))
        self._improvement.begin(tested)
        return tested

    def _remember(self, tested: TestedPlan) -> TestedPlan:
        self._known.remember(tested)
        self._improvement.forget_all_but({one.shape for one in self._known.all})
        return tested

    # -- what steps teach -------------------------------------------------------------------------

    def is_compared(self, tested: TestedPlan) -> bool:
        """Whether it matters how long a step by this plan takes."""
        return self._improvement.is_compared(tested)

    def took(self, tested: TestedPlan, batch: Any, seconds: float) -> TestedPlan:
        """A whole step by this plan has taken so long, and nothing beside it was measured; gives
        the plan that is gone by now.
        """
        if not self._improvement.is_compared(tested):
            return tested
        rows = self.rows.of_step
        is_counted = rows is None or rows.is_counted
        if not is_counted and keeps_whole_batch(tested.plan):
            return tested  # none is faster
        if self._shape(batch) != tested.shape:  # which has in it all sizes, where `split=` cuts
            return tested
        if is_counted and self.rows.count(batch) != tested.plan.batch_size:
            return tested
        return self._improvement.took(tested, seconds)

    def settle(self, tested: TestedPlan | None = None) -> None:
        """Compare no more plans, or none of those that this one is compared with: the one that is
        the fastest, as far as is known, stays.
        """
        self._improvement.settle(tested)

    def optimizer_bytes(self) -> int:
        """What the optimizer's state takes by now."""
        return state_bytes(self.step.optimizer)

    def must_be_measured(self, tested: TestedPlan, batch_bytes: int) -> bool:
        """Whether a step with a batch of so many bytes must be measured: its peak is not known yet,
        or tells what else would hold.
        """
        if not (tested.seen and tested.steady and batch_bytes <= tested.seen_bytes):
            return True
        # a parameter gets its state with its first gradient, and some never have one
        if self._states not in (None, self._number_of_states()):
            return True
        return self._larger_parts.are_to_be_measured(tested)

    def stepped(
        self,
        tested: TestedPlan,
        peak_bytes: int,
        saved_bytes: int,
        *,
        held_bytes: int,
        seen_bytes: int,
        passes_bytes: int,
    ) -> TestedPlan:
        """Remember what a measured step has taught: its peak, and how much autograd saved of a
        micro-batch. A plan that arithmetic has found may save as much more as there is room for.

        Args:
            tested: the plan.
            peak_bytes: of the step.
            saved_bytes: by autograd, of a micro-batch.
            held_bytes: by the optimizer's state before the step. What has come in it was no part of
                its passes, and comes on top in the next one.
            seen_bytes: of the largest batch so far.
            passes_bytes: the peak of this step before its update.
        """
        held_all = held_bytes >= min(self.optimizer_bytes(), tested.profile.optimizer_bytes)
        changes: dict[str, Any] = {"seen": held_all, "seen_bytes": seen_bytes}
        self._note_states(tested)
        if tested.by_size and tested.saved_bytes is None and tested.plan.keeps_everything:
            changes["saved_bytes"] = saved_bytes + max(0, self.step.limit_bytes - peak_bytes)
        larger = self._larger_parts.after_step(tested, passes_bytes) if held_all else None
        if larger is not None:
            self._remember(larger)
        return self.replace(tested, peak_bytes=peak_bytes, **changes)

    def _note_states(self, tested: TestedPlan) -> None:
        """Where there are more states than there were, other plans' peaks are measured again."""
        known, self._states = self._states, self._number_of_states()
        if known is not None and known != self._states:
            for other in self.known:
                if other is not tested and other.seen:
                    self.replace(other, seen=False)

    def _number_of_states(self) -> int:
        return len(getattr(self.step.optimizer, "state", ()))

    def replace(self, old: TestedPlan, **changes: Any) -> TestedPlan:
        """Remember what a step has taught about a plan."""
        return self._put(old, dataclasses.replace(old, **changes))

    def _put(self, old: TestedPlan, new: TestedPlan) -> TestedPlan:
        """Go by the new one where the old one was gone by."""
        self._improvement.replaced(old, new)
        return self._known.exchange(old, new)

    # -- what failures ask for --------------------------------------------------------------------

    def tighter(self, tested: TestedPlan, share: float = 0.9) -> TestedPlan:
        """A plan that needs less than this one did, at the same micro-batch while there is one.

        Where this one is the smallest there is, it is that one again: memory may have run out for
        another's sake.

        Args:
            tested: the plan that memory ran out with.
            share: of what it needed.
        """
        if not tested.steady:
            return self.replace(tested, plan=cut_smaller(self._tools, tested), seen=False)
        limit = int(min(tested.peak_bytes, self.step.limit_bytes) * share)
        plan = tighter_plan(self._tools, tested, limit)
        untested = dataclasses.replace(
            tested, plan=plan, peak_bytes=plan.peak_bytes, saved_bytes=None, seen=False,
            copied=False, slack=1.0, tested_bytes=0, reserved_bytes=0, copied_reserved_bytes=0,
        )  # fmt: skip
        return self._put(tested, self._finisher.with_copy(untested, limit))

    def outgrown(self, tested: TestedPlan, batch: Any) -> TestedPlan:
        """A plan of its own for a batch that is too large for one that arithmetic had found for
        it.
        """
        self._known.forget(tested)
        request = self._request(batch, self.rows.count(batch))
        if self._known.is_kept_where_smaller(tested):
            larger = self._known.for_larger(request)
            if larger is not None:
                return larger
        self._larger_parts.did_not_hold(request.shape, tested.plan.micro_batch)
        smaller = self._plan_in_parts(request, below=tested.plan.micro_batch)
        return self._new_plan(request) if smaller is None else smaller

    def kept_meanwhile(self, tested: TestedPlan, batch: Any) -> TestedPlan | None:
        """Everything kept in smaller micro-batches, which holds whatever the operations are, for
        batches whose forward leaves this plan; None if there is time for a plan of their own, or
        that cannot be.
        """
        if self.step.reproducible or self.time.has_room_for(self.time.plan_seconds):
            return None
        rows = self.rows.count(batch)
        request = PlanRequest(batch, rows, tested.shape, is_first=False)
        held = self._known.held_in_parts(request, tested.plan.micro_batch)
        return self._plan_in_parts(request) if held is None else self._known.mark_used(held)

    def plan_of_part(self, part: Any, tested: TestedPlan) -> TestedPlan | None:
        """A plan for what this micro-batch does, where another one of its size was planned for;
        None if there is none. One of fewer rows than those that were planned for has a plan for
        such alone, which is not remembered here.

        Raises:
            BudgetInfeasible: only a smaller micro-batch could do that.
        """
        with self._progress.running():
            found = plan_like_part(self._tools, self._request(part, 0), tested)
        if found is None:
            return None
        finished = self._finisher.finish(found)
        is_smaller = self.rows.count(part) < tested.plan.micro_batch
        return finished if is_smaller else self._remember(finished)
