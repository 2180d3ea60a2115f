"""A plan for each sequence of operations that the micro-batches of one shape run.

A forward may do different things for batches of one shape: a mask that is all ones is dropped, a
branch is taken. Each such sequence gets a plan of its own the first time it is met. A forward
begins with the plan of the one before; where it leaves that, it goes on by another one that has
come as far in the same way, and else the step is repeated with the right one. What fits no plan,
because the data decide it anew each time, runs online, and that is said.

Looking at what autograd saves is a call of Python for each save, in both passes. Where the data
decide nothing, and a forward could save twice as much as it does below the budget, that is done in
the first steps of a plan and then in one of eight; in the others it is enough that the forward has
made as many of autograd's nodes as one that was watched.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from gradfit import _torch_distributed as distributed
from gradfit._torch import last_sequence_number
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.families import covering
from gradfit.fitting.plan_search import Planner
from gradfit.fitting.tested_plan import Fitted, PartShape, part_shape
from gradfit.recompute.follow_plan import Diverged, Unrecorded, Unsure, recording

_ROOM = 2  # times what a forward saves: as much must fit for it not to be watched
_EVERY = 8  # of so many steps with one plan, what autograd saves is looked at in one, whatever else
_MOST_COUNTS = 4  # of nodes, that one plan's forwards make: with more, each forward is watched
_MOST_SHAPES = 256  # of which something is remembered
_MOST = 6  # sequences of one shape: what does another thing in each step would have a plan for each
_MOST_REPEATS = 3  # of one step, for the sake of its plans


@dataclasses.dataclass
class _Left:
    """A micro-batch that left its plan."""

    position: int
    shape: PartShape
    plan: Fitted
    error: Diverged


@dataclasses.dataclass
class _Seen:
    """What the forwards of a plan did that were watched."""

    nodes: set[int] = dataclasses.field(default_factory=set)
    """How many of autograd's nodes they made."""
    saved_bytes: int = 0
    """The most that was saved after the plan's last decision."""

    def is_enough_for(self, fitted: Fitted) -> bool:
        """Whether later ones need not be watched."""
        return 0 < len(self.nodes) <= _MOST_COUNTS and (
            _ROOM * self.saved_bytes <= fitted.saved_limit
        )


class Sequences:
    """Which plan each micro-batch of a step follows."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        # by shape and size: the operations of the last one
        self._last: dict[tuple[Any, int], tuple[str, ...]] = {}
        self._learnt: dict[PartShape, int] = {}
        self._tried: dict[int, list[Fitted]] = {}  # in this step, by position: plans that were left
        self._left: _Left | None = None
        self._repeats = 0
        self._now = ""  # why this step is run online, if it was repeated too often
        self._watches = False  # this step is repeated because somebody was not sure
        self._seen: dict[tuple[Any, int], _Seen] = {}  # by shape and size
        self._unwatched = 0  # steps since one was
        self.online: dict[PartShape, str] = {}  # micro-batches that no plan is for, and why

    def begin(self) -> None:
        """A new step."""
        self._tried.clear()
        self._left, self._repeats, self._now, self._watches = None, 0, "", False
        for memory in (self._last, self._learnt, self._seen, self.online):
            _forget_oldest(memory)

    def runs_online(self, part: Any) -> str:
        """Why micro-batches like this one are not run by a plan; empty if they are."""
        return self._now or (self.online.get(part_shape(part), "") if self.online else "")

    @contextmanager
    def following(
        self, fitted: Fitted, part: Any, position: int, *, first: bool, measured: bool
    ) -> Iterator[None]:
        """Around a forward: the plan that is most likely its own, and the others to go on with.

        Args:
            fitted: the plan of its batch.
            part: the micro-batch.
            position: its number in the batch.
            first: it is the first that is run of its batch.
            measured: the step's memory is; what is learnt then is true of steps that are not.
        """
        plans = self._plans(fitted)
        plans = [plan for plan in plans if plan not in self._tried.get(position, ())] or plans[:1]
        lead, policy = plans[0], None
        watch = self._watches or (first and self._must_watch(lead, measured=measured))
        if len(plans) == 1:
            around = lead.following(first=watch)
        elif lead.plan.keeps_everything:
            kept = [plan for plan in plans if plan.plan.keeps_everything]
            around = Unrecorded(max(plan.saved_limit for plan in kept))
        else:
            others = [(plan.script, plan.tail) for plan in plans[1:]]
            around, policy = recording(lead.script, lead.tail, watched=first, others=others)
        before = last_sequence_number()
        try:
            with around:
                yield
            if len(plans) == 1:
                count = last_sequence_number() - before
                self._compare_nodes(lead, count, around, watched=watch)
        except Diverged as error:
            self._left = _Left(position, part_shape(part), _followed(plans, policy), error)
            raise
        if len(plans) > 1:
            self._last[self._key(fitted)] = _followed(plans, policy).plan.operations

    def _must_watch(self, fitted: Fitted, *, measured: bool) -> bool:
        """Whether to look at what autograd saves in this step."""
        seen = self._seen.get(self._key(fitted))
        self._unwatched += 1
        if (
            seen is not None
            and seen.is_enough_for(fitted)
            and not measured
            and self._unwatched < _EVERY
        ):
            return False
        self._unwatched = 0
        return True

    def _compare_nodes(self, fitted: Fitted, count: int, around: Any, *, watched: bool) -> None:
        """Learn from a forward that was watched, or see that another one is like those."""
        if fitted.looks or distributed.is_running():
            return
        seen = self._seen.setdefault(self._key(fitted), _Seen())
        if watched:
            seen.nodes.add(count)
            seen.saved_bytes = max(seen.saved_bytes, around.rest.saved_bytes)
        elif count not in seen.nodes and seen.is_enough_for(fitted):
            known = ", ".join(map(str, sorted(seen.nodes)))
            raise Unsure(f"it makes {count} of autograd's nodes, where {known} were seen")

    def _plans(self, fitted: Fitted) -> list[Fitted]:
        """All that may be this batch's, in the order in which they are tried."""
        found, others = _IdentityList([fitted]), self._planner.known
        if len(others) == 1:
            return found
        for known in others:
            same = known.steady and _way(known) == _way(fitted)
            other = same and known.plan.operations != fitted.plan.operations
            if other and covering([known], fitted.shape, fitted.plan.batch_size):
                found.append(known)
        last = self._last.get(self._key(fitted))
        return _IdentityList(sorted(found, key=lambda plan: plan.plan.operations != last))

    @staticmethod
    def _key(fitted: Fitted) -> tuple[Any, int]:
        return fitted.shape, fitted.plan.micro_batch

    def recover(self, fitted: Fitted, batch: Any) -> Fitted:
        """After a micro-batch has left its plan: the plan with which the step is repeated."""
        left, self._left = self._left, None
        if left is None:
            return fitted
        if isinstance(left.error, Unsure):
            self._watches = True
            return fitted
        if fitted.by_size:
            return self._planner.outgrown(fitted, batch)
        self._repeats += 1
        tried = self._tried.setdefault(left.position, _IdentityList())
        tried.append(left.plan)
        if self._repeats > _MOST_REPEATS:
            self._now = str(left.error)
            return fitted
        if any(_may_be(plan, left) for plan in self._plans(fitted) if plan not in tried):
            return fitted
        learnt = self._learnt[left.shape] = self._learnt.get(left.shape, 0) + 1
        made = (
            None if learnt > _MOST or distributed.is_running() else self._learn(fitted, batch, left)
        )
        if made is None:
            return self._say(fitted, left)
        return made if made.plan.operations == fitted.plan.operations else fitted

    def _say(self, fitted: Fitted, left: _Left) -> Fitted:
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
            fitted, plan=dataclasses.replace(fitted.plan, online=str(left.error))
        )

    def _learn(self, fitted: Fitted, batch: Any, left: _Left) -> Fitted | None:
        """A plan for what this micro-batch does; None if there is none, or not even a trial follows
        it.
        """
        planner = self._planner
        part = next(islice(planner.parts(batch, fitted.plan.micro_batch), left.position, None))
        with planner.time.planning():
            try:
                made = planner.plan_of_part(part, fitted)
            except BudgetInfeasible:
                return None
        if made is not None:
            self._last[self._key(fitted)] = made.plan.operations
        return made


def _forget_oldest(memory: dict[Any, Any]) -> None:
    """Of more shapes than can come again soon."""
    while len(memory) > _MOST_SHAPES:
        del memory[next(iter(memory))]


class _IdentityList(list[Fitted]):
    """Plans are compared by what they are, not by what is in them: there is much in them."""

    def __contains__(self, plan: object) -> bool:
        return any(plan is one for one in self)


def _way(fitted: Fitted) -> tuple[Any, ...]:
    """How the batch is cut: what all plans of one step have in common."""
    return fitted.plan.micro_batch, fitted.plan.tiles


def _followed(plans: list[Fitted], policy: Any) -> Fitted:
    """The plan that the forward has followed last."""
    if policy is None:
        return plans[0]
    return next((plan for plan in plans if plan.script is policy.script), plans[0])


def _may_be(plan: Fitted, left: _Left) -> bool:
    """Whether a forward that left its plan there may be this one's."""
    position, names, seen = left.error.operation, plan.plan.operations, left.plan.plan.operations
    if position is None:
        return not left.plan.plan.keeps_everything or not plan.plan.keeps_everything
    return names[:position] == seen[:position] and names[position : position + 1] == (
        left.error.name,
    )
