"""A plan for each sequence of operations that the micro-batches of one shape run.

A forward may do different things for batches of one shape: a mask that is all ones is dropped, a
branch is taken. Each such sequence gets a plan of its own the first time it is met. A forward
begins with the plan of the one before; where it leaves that, it goes on by another one that has
come as far in the same way, and else the step is repeated with the right one. What fits no plan,
because the data decide it anew each time, runs online, and that is said.

The last micro-batch of a batch may have fewer rows than the others, and a single row may run other
operations than several: then it has a plan of its own, found by its shape.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Any

from gradfit import _torch_distributed as distributed
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.batch_shapes import PartShape, part_shape
from gradfit.fitting.families import covering
from gradfit.fitting.planner import Planner
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.recompute.follow_plan import Diverged, Unrecorded, recording

_MOST_SHAPES = 256  # of which something is remembered
_MOST_SMALL = 16  # shapes of last, smaller micro-batches that have a plan of their own
_MOST = 6  # sequences of one shape: what does another thing in each step would have a plan for each
_MOST_REPEATS = 3  # of one step, for the sake of its plans


@dataclasses.dataclass
class _Left:
    """A micro-batch that left its plan."""

    position: int
    shape: PartShape
    plan: TestedPlan
    error: Diverged


class Sequences:
    """Which plan each micro-batch of a step follows."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        # by shape and size: the operations of the last one
        self._last: dict[tuple[Any, int], tuple[str, ...]] = {}
        self._learnt: dict[PartShape, int] = {}
        self._small: dict[PartShape, TestedPlan] = {}  # of micro-batches smaller than planned for
        self._tried: dict[
            int, list[TestedPlan]
        ] = {}  # in this step, by position: plans that were left
        self._left: _Left | None = None
        self._repeats = 0
        self._now = ""  # why this step is run online, if it was repeated too often
        self.saved_bytes = 0
        """The most that autograd saved of a micro-batch of this step that kept everything."""
        self.online: dict[PartShape, str] = {}  # micro-batches that no plan is for, and why

    def begin(self) -> None:
        """A new step."""
        self._tried.clear()
        self._left, self._repeats, self._now = None, 0, ""
        self.saved_bytes = 0
        for memory in (self._last, self._learnt, self.online):
            _forget_oldest(memory)
        _forget_oldest(self._small, _MOST_SMALL)

    def runs_online(self, part: Any) -> str:
        """Why micro-batches like this one are not run by a plan; empty if they are."""
        return self._now or (self.online.get(part_shape(part), "") if self.online else "")

    def following(
        self, tested: TestedPlan, part: Any, position: int
    ) -> AbstractContextManager[object]:
        """Around a forward: the plan that is most likely its own, and the others to go on with."""
        tried = self._tried.get(position)
        small = self._small_plan(tested, part) if self._small else None
        if small is not None and not (tried and small in tried):
            plans = [small]
        else:
            plans = self._plans(tested)
            if tried:
                plans = [plan for plan in plans if plan not in tried] or plans[:1]
        return _ForwardByPlans(self, tested, plans, part, position)

    def end_forward(
        self, forward: _ForwardByPlans, error: BaseException | None, followed: TestedPlan
    ) -> None:
        """A forward has ended, by an error perhaps, with the plan that it followed last."""
        if isinstance(error, Diverged):
            self._left = _Left(forward.position, part_shape(forward.part), followed, error)
        elif error is None:
            self.saved_bytes = max(self.saved_bytes, forward.saved_bytes)
            if len(forward.plans) > 1:
                self._last[self._key(forward.tested)] = followed.plan.operations

    def _small_plan(self, tested: TestedPlan, part: Any) -> TestedPlan | None:
        """A plan for micro-batches of this shape alone, if they are smaller than planned for."""
        own = self._small.get(part_shape(part))
        return own if own is not None and _cuts_smaller(own, tested) else None

    def _plans(self, tested: TestedPlan) -> list[TestedPlan]:
        """All that may be this batch's, in the order in which they are tried."""
        others = self._planner.known
        if len(others) == 1:
            return _IdentityList([tested])
        plans = [tested, *(other for other in others if _is_another_sequence(other, tested))]
        last = self._last.get(self._key(tested))
        return _IdentityList(sorted(plans, key=lambda plan: plan.plan.operations != last))

    @staticmethod
    def _key(tested: TestedPlan) -> tuple[Any, int]:
        return tested.shape, tested.plan.micro_batch

    def recover(self, tested: TestedPlan, batch: Any) -> TestedPlan:
        """After a micro-batch has left its plan: the plan with which the step is repeated."""
        left, self._left = self._left, None
        if left is None:
            return tested
        if tested.by_size:
            return self._planner.outgrown(tested, batch)
        self._repeats += 1
        self._tried.setdefault(left.position, _IdentityList()).append(left.plan)
        if self._repeats > _MOST_REPEATS:
            self._now = str(left.error)
            return tested
        if self._has_untried(tested, left):
            return tested
        meanwhile = self._planner.kept_meanwhile(tested, batch)
        if meanwhile is not None:
            return meanwhile
        learnt = self._learn(tested, batch, left)
        if learnt is None:
            return self._say(tested, left)
        if _cuts_smaller(learnt, tested):
            self._small[left.shape] = learnt
            return tested
        self._last[self._key(tested)] = learnt.plan.operations
        return learnt if learnt.plan.operations == tested.plan.operations else tested

    def _has_untried(self, tested: TestedPlan, left: _Left) -> bool:
        """Whether there is a plan that may be this micro-batch's, and was not tried in this
        step.
        """
        tried = self._tried[left.position]
        return any(_may_be(plan, left) for plan in self._plans(tested) if plan not in tried)

    def _say(self, tested: TestedPlan, left: _Left) -> TestedPlan:
        """These micro-batches run online from now on: once as a warning, and in the plan's text."""
        if not self.online:
            warnings.warn(
                f"Some micro-batches follow no plan: {left.error}. What is dropped of them is"
                " decided while they run, so that the budget holds and gradients are the same, but"
                " more slowly. Pad or sort batches so that the forward does the same for all, or"
                " raise `memory`.",
                stacklevel=4,
            )
        self.online[left.shape] = str(left.error)
        return self._planner.replace(
            tested, plan=dataclasses.replace(tested.plan, online=str(left.error))
        )

    def _learn(self, tested: TestedPlan, batch: Any, left: _Left) -> TestedPlan | None:
        """A plan for what this micro-batch does; None if there is none, or not even a trial follows
        it, or there are too many already.
        """
        count = self._learnt[left.shape] = self._learnt.get(left.shape, 0) + 1
        if count > _MOST or distributed.is_running():
            return None
        planner = self._planner
        parts = planner.step.runner.cut(batch, tested.plan.micro_batch)
        part = next(islice(parts, left.position, None))
        with planner.time.planning():
            try:
                return planner.plan_of_part(part, tested)
            except BudgetInfeasible:
                return None


class _ForwardByPlans:
    """What a forward runs in that begins with the first of some plans."""

    def __init__(
        self,
        sequences: Sequences,
        tested: TestedPlan,
        plans: list[TestedPlan],
        part: Any,
        position: int,
    ) -> None:
        self._sequences, self.tested, self.plans = sequences, tested, plans
        self.part, self.position = part, position
        self._around, self._policy = _around_forward(plans)

    @property
    def saved_bytes(self) -> int:
        """By autograd, where everything is kept."""
        return self._around.rest.saved_bytes if isinstance(self._around, Unrecorded) else 0

    def __enter__(self) -> None:
        self._around.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._around.__exit__(kind, error, trace)
        except BaseException as raised:  # that it was another forward may be found out at its end
            error = raised
            raise
        finally:
            self._sequences.end_forward(self, error, _followed(self.plans, self._policy))


def _forget_oldest(memory: dict[Any, Any], most: int = _MOST_SHAPES) -> None:
    """Of more shapes than can come again soon."""
    while len(memory) > most:
        del memory[next(iter(memory))]


class _IdentityList(list[TestedPlan]):
    """Plans are compared by what they are, not by what is in them: there is much in them."""

    def __contains__(self, plan: object) -> bool:
        return any(plan is one for one in self)


def _around_forward(plans: list[TestedPlan]) -> tuple[Any, Any]:
    """What a forward runs in that begins with the first of these plans and may go over to the
    others; and what then says which one it has followed.
    """
    lead = plans[0]
    if len(plans) == 1:
        return lead.following(), None
    if lead.plan.keeps_everything:
        # Of those whose limit is known: what has none is watched by itself, in its first step.
        known = (one for one in plans[1:] if one.saved_bytes is not None)
        limits = [plan.saved_limit for plan in known if plan.plan.keeps_everything]
        return Unrecorded(max(lead.saved_limit, *limits, 0)), None
    others = [(plan.script, plan.tail) for plan in plans[1:]]
    return recording(lead.script, lead.tail, others=others)


def _is_another_sequence(other: TestedPlan, tested: TestedPlan) -> bool:
    """Whether a plan is for other operations of the same batches, cut in the same way."""
    if not other.steady or _way(other) != _way(tested):
        return False
    if other.plan.operations == tested.plan.operations:
        return False
    return bool(covering([other], tested.shape, tested.plan.batch_size))


def _way(tested: TestedPlan) -> tuple[Any, ...]:
    """How the batch is cut: what all plans of one step have in common."""
    return tested.plan.micro_batch, tested.plan.tiles


def _cuts_smaller(own: TestedPlan, tested: TestedPlan) -> bool:
    """Whether a plan is for smaller micro-batches than another one, in the same tiles."""
    mine, others = own.plan, tested.plan
    return mine.micro_batch < others.micro_batch and mine.tiles == others.tiles


def _followed(plans: list[TestedPlan], policy: Any) -> TestedPlan:
    """The plan that the forward has followed last."""
    if policy is None:
        return plans[0]
    return next((plan for plan in plans if plan.script is policy.script), plans[0])


def _may_be(plan: TestedPlan, left: _Left) -> bool:
    """Whether a forward that left its plan there may be this one's."""
    position, names, seen = left.error.operation, plan.plan.operations, left.plan.plan.operations
    if position is None:
        return not left.plan.plan.keeps_everything or not plan.plan.keeps_everything
    return names[:position] == seen[:position] and names[position : position + 1] == (
        left.error.name,
    )
