"""One rule for passes that fail, in a step and for other trainers: the batch is repeated whole,
from where it began.

Memory that ran out asks for a plan that takes less. A forward that was not the plan's gets a plan
of its own, or is evicted online from then on; a compiled loss function that does not say what it
divided by is run as it was written; parts whose divisors may be no counts are counted first, and
parts without items on an accelerator are read one by one.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gradfit._torch import is_out_of_memory
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.late_weights import ReadEach
from gradfit.batches.loss import PartLoss
from gradfit.batches.runner import LossFunction, Mode, Part
from gradfit.batches.shares import PartCounter, PartShare
from gradfit.batches.snapshot import Snapshot, trials_end
from gradfit.batches.weights import CountFirst, UnreadableLoss, must_count
from gradfit.devices import forget_failed_passes, free_cached_memory
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.modes import WithinLimit
from gradfit.fitting.planner import Planner
from gradfit.fitting.sequences import Sequences
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.recompute.follow_plan import Diverged

# Of what the plan needed, what it may need each time that memory runs out again. What a cap on the
# process, or a neighbour on the device, leaves free is not known, so it soon becomes much less.
_SHARES = (0.9, 0.9, 0.8, 0.7, 0.5)
_Result = TypeVar("_Result")
Trial = Callable[[], contextlib.AbstractContextManager[object]]


class _Cure(NamedTuple):
    """What the next attempt goes by."""

    replan: Callable[[TestedPlan, Any], TestedPlan] | None
    """Makes its plan; None: the same plan, or one that takes less."""


class Recovery:
    """Runs micro-batches as planned, and remembers what failures have taught.

    Args:
        plans: the tested plans.
        trial: what new plans are tried out in.
    """

    def __init__(self, plans: Planner, trial: Trial = contextlib.nullcontext) -> None:
        self._plans, self._trial = plans, trial
        self._sequences = Sequences(plans)
        self._counts_first = False
        self.reads_each = False
        """Each part's weight is to be read when it comes, also from a device."""
        self.online = ""
        """Why a micro-batch of this batch did not follow a plan; empty if all did."""

    @property
    def saved_bytes(self) -> int:
        """The most that autograd saved of a micro-batch of this step that kept everything."""
        return self._sequences.saved_bytes

    def repeat(
        self,
        tested: TestedPlan,
        batch: Any,
        attempt: Callable[[TestedPlan, int], _Result],
        take_back: Callable[[], bool],
        give_up: Callable[[BaseException], object] = lambda error: None,
    ) -> _Result:
        """Run `attempt(plan, number)` until it succeeds or nothing can be mended.

        Args:
            tested: the plan to begin with.
            batch: what is run.
            attempt: all passes of the batch.
            take_back: makes everything as it was before the attempt; False if it has happened after
                all.
            give_up: told of the error that ends it.
        """
        self._sequences.begin()
        self.reads_each, self.online = False, ""
        shares, number = self._shares_to_try(), 0
        while True:
            number += 1
            try:
                return attempt(tested, number)
            except BaseException as error:
                if not take_back():
                    raise  # interrupted when all was done
                cure = self._cure(error, tested)
                if cure is None or not shares:
                    forget_failed_passes()
                    give_up(error)
                    raise
                failure: BaseException = error
            # Outside of the handler: the traceback holds every tensor of the failed attempt.
            _forget(failure, is_short=cure.replan is None)
            del failure
            share = shares.pop(0)
            if cure.replan is not None:
                with trials_end(), self._trial():
                    tested = cure.replan(tested, batch)
            elif share < 1.0:
                tested = self._plans.tighter(tested, share)

    def _shares_to_try(self) -> list[float]:
        """On an accelerator, all of it first: the allocator may say that memory has run out while a
        block that would do waits for an event, and the same step succeeds a moment later
        (https://github.com/pytorch/pytorch/issues/189504).
        """
        return list(_SHARES) if self._plans.step.device is None else [1.0, *_SHARES]

    def _cure(self, error: BaseException, tested: TestedPlan) -> _Cure | None:
        """How the next attempt may succeed; None if it cannot."""
        is_learnt = self._learn(error)
        if tested.by_size and isinstance(error, BudgetInfeasible):
            return _Cure(self._plans.outgrown)
        if is_learnt:
            return _Cure(self._sequences.recover)
        is_short = isinstance(error, BudgetInfeasible) or is_out_of_memory(error)
        return _Cure(None) if is_short else None

    def _learn(self, error: BaseException) -> bool:
        """Whether the same plan can succeed, or another one for the same memory, by what this error
        says.
        """
        self.reads_each = isinstance(error, ReadEach)
        self._counts_first = self._counts_first or isinstance(error, CountFirst)
        if isinstance(error, UnreadableLoss):
            return self._plans.loss.run_as_written()
        return isinstance(error, Diverged | ReadEach | CountFirst)

    def run(
        self,
        tested: TestedPlan,
        part: Part,
        batch: Any,
        backward: Callable[[PartLoss], object],
    ) -> None:
        """Both passes of one part.

        Args:
            tested: the plan.
            part: which part.
            batch: all of it, which is there, too.
            backward: gets the part's loss.
        """
        mode = self._mode(tested, part, batch)
        self._plans.step.runner.run(part, mode, backward)

    def _mode(self, tested: TestedPlan, part: Part, batch: Any) -> Mode:
        reason = self._sequences.runs_online(part.content)
        if tested.steady and not reason:
            return _ByOneOf(self._sequences, tested, part)
        self.online = reason or tested.plan.online
        step = self._plans.step
        resident = (step.model, step.optimizer, batch)
        return WithinLimit(tested, step.limit_bytes, *resident, device=step.device)

    def count(
        self, tested: TestedPlan, parts: list[Part], before: Snapshot, first: int = 0
    ) -> list[PartShare] | None:
        """Each part's share in the batch, where one weight for a part cannot be right: found by
        forwards alone.

        Args:
            tested: the plan, for its tiles.
            parts: of the batch.
            before: what the model was before; it is so again afterwards.
            first: the part that is run first.
        """
        additivity = self._plans.loss.additivity
        if additivity is None or not self._must_count(additivity, len(parts)):
            return None
        runner = self._plans.step.runner
        counter = PartCounter(
            runner.model, tested.tiled(runner.loss_fn), runner.split, additivity.roles
        )
        shares = counter.shares([part.content for part in parts], first)
        before.restore(thread=False)  # there may be a meter around it
        return shares

    def _must_count(self, additivity: Additivity, parts: int) -> bool:
        return parts > 1 and (self._counts_first or must_count(additivity, parts))


class _ByOneOf(Mode):
    """By the plan that this micro-batch follows, of all that there are for its shape.

    Args:
        plans: all of them.
        tested: the plan of its batch.
        part: which part.
    """

    def __init__(self, plans: Sequences, tested: TestedPlan, part: Part) -> None:
        self._plans, self._tested, self._part = plans, tested, part

    def wrap(self, loss_fn: LossFunction) -> LossFunction:
        return self._tested.tiled(loss_fn)

    def around_forward(self) -> contextlib.AbstractContextManager[object]:
        return self._plans.following(self._tested, self._part.content, self._part.position)


def _forget(failure: BaseException, *, is_short: bool) -> None:
    """Let go of all that the failed attempt has made. Cycles are looked for everywhere only where
    memory ran out: that takes as long as several short steps.
    """
    traceback.clear_frames(failure.__traceback__)
    failure.__traceback__ = None
    failure.__context__ = failure.__cause__ = None
    if is_short:
        free_cached_memory()
    else:
        forget_failed_passes()
        gc.collect(1)  # what is younger
