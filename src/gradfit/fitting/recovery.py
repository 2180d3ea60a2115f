"""One rule for passes that fail, in a step and for other trainers: the batch is repeated whole, from where it began.

Memory that ran out asks for a plan that takes less. A forward that was not the plan's is evicted online from then on;
a compiled loss function that does not say what it divided by is run as it was written; parts whose divisors may be no
counts are counted first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradfit._torch import is_out_of_memory
from gradfit._torch_listen import eager_functions
from gradfit.batches.loss import PartLoss
from gradfit.batches.runner import Mode, Part
from gradfit.batches.shares import PartCounter, PartShare
from gradfit.batches.snapshot import Snapshot
from gradfit.batches.weights import CountFirst, UnreadableLoss, must_count
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.modes import Planned, WithinLimit
from gradfit.fitting.plan_search import Planner
from gradfit.fitting.tested_plan import Fitted, PartShape, part_shape
from gradfit.recompute.planned import Diverged

_MOST_ATTEMPTS = 6
_Result = TypeVar("_Result")


class Recovery:
    """Runs micro-batches as planned, and remembers what failures have taught.

    Args:
        plans: the tested plans.
    """

    def __init__(self, plans: Planner) -> None:
        self._plans = plans
        self._off_plan: set[PartShape] = set()  # shapes of parts that left their plan
        self._runs_eagerly = False  # compiled functions are run as they were written
        self._counts_first = False

    def repeat(
        self,
        tested: Fitted,
        attempt: Callable[[Fitted, int], _Result],
        take_back: Callable[[], bool],
        give_up: Callable[[BaseException], object] = lambda error: None,
    ) -> _Result:
        """Run `attempt(plan, number)` until it succeeds or nothing can be mended.

        Args:
            tested: the plan to begin with.
            attempt: all passes of the batch.
            take_back: makes everything as it was before the attempt; False if it has happened after all.
            give_up: told of the error that ends it.
        """
        for number in range(1, _MOST_ATTEMPTS + 1):
            try:
                return attempt(tested, number)
            except BaseException as error:
                if not take_back():
                    raise  # interrupted when all was done
                is_short = is_out_of_memory(error) or isinstance(error, BudgetInfeasible)
                if not (self._learn(error) or is_short) or number == _MOST_ATTEMPTS:
                    give_up(error)
                    raise
                failure: BaseException = error
            # Outside of the handler: the traceback holds every tensor of the failed attempt.
            _forget(failure)
            del failure
            if is_short:
                tested = self._plans.tighter(tested)
        raise AssertionError("unreachable")

    def _learn(self, error: BaseException) -> bool:
        """Whether the same plan can succeed, by what this error says."""
        if isinstance(error, UnreadableLoss) and not self._runs_eagerly:
            self._runs_eagerly = True
            return True
        self._counts_first = self._counts_first or isinstance(error, CountFirst)
        return isinstance(error, Diverged | CountFirst)

    def run(
        self, tested: Fitted, part: Part, batch: Any, backward: Callable[[PartLoss], object], *, first: bool
    ) -> None:
        """Both passes of one part.

        Args:
            tested: the plan.
            part: which part.
            batch: all of it, which is there, too.
            backward: gets the part's loss.
            first: the part is the first that is run of its batch.
        """
        runner = self._plans.runner
        try:
            if self._runs_eagerly:
                with eager_functions():
                    runner.run(part, self._mode(tested, part, batch, first=first), backward)
            else:
                runner.run(part, self._mode(tested, part, batch, first=first), backward)
        except Diverged:
            self._off_plan.add(part_shape(part.content))
            raise

    def _mode(self, tested: Fitted, part: Part, batch: Any, *, first: bool) -> Mode:
        if tested.steady and not (self._off_plan and part_shape(part.content) in self._off_plan):
            return Planned(tested, first=first)
        return WithinLimit(tested, self._plans.limit_bytes, *self._plans.resident, batch)

    def count(self, tested: Fitted, parts: list[Part], before: Snapshot, first: int = 0) -> list[PartShare] | None:
        """Each part's share in the batch, where one weight for a part cannot be right: found by forwards alone.

        Args:
            tested: the plan, for its tiles.
            parts: of the batch.
            before: what the model was before; it is so again afterwards.
            first: the part that is run first.
        """
        additivity = self._plans.additivity
        if additivity is None or len(parts) == 1 or not (must_count(additivity, len(parts)) or self._counts_first):
            return None
        runner = self._plans.runner
        counter = PartCounter(runner.model, tested.tiled(runner.loss_fn), runner.split, additivity.roles)
        shares = counter.shares([part.content for part in parts], first)
        before.restore(thread=False)  # there may be a meter around it
        return shares


def _forget(failure: BaseException) -> None:
    failure.__traceback__ = None
    failure.__context__ = failure.__cause__ = None
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
