"""The passes of a batch under a budget, for loops whose update is somebody else's: trainers of
other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from gradfit.arguments import check_model, read_count
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.loss import PartLoss
from gradfit.batches.model_tree import ModelTree
from gradfit.batches.runner import LossFunction, MicroBatchRunner
from gradfit.batches.snapshot import Snapshot
from gradfit.batches.weights import BatchWeights, Weight
from gradfit.fitting.cut_warning import warn_about_cutting
from gradfit.fitting.measured_models import MeasuredModels
from gradfit.fitting.planner import Planner
from gradfit.fitting.recovery import Recovery
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.plan import Plan
from gradfit.units import parse_bytes


class Passes:
    """Forward and backward of any batch in micro-batches, so that all tensors of a step stay below
    a budget.

    What each micro-batch weighs is what its loss was divided by, as for `fit`; what does not add up
    is not cut.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> passes = Passes(model, optimizer, lambda m, x: m(x).square().mean(), memory="1 MiB")
    >>> mean = MeanInProgress()
    >>> passes.run(torch.ones(32, 8), lambda part, weight: mean.add(part.loss, weight).backward())
    >>> loss = mean.finish(model.parameters())
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: LossFunction,
        memory: int | float | str,
        *,
        reserved_bytes: int = 0,
        micro_batch: int | str | None = None,
        exact: bool = True,
        tile: bool = True,
    ) -> None:
        check_model(model)
        self._model, self._exact = model, exact
        self._planner = Planner(
            StepToPlan(
                MicroBatchRunner(model, loss_fn),
                optimizer,
                parse_bytes(memory),
                reserved_bytes=reserved_bytes,
                micro_batch=(
                    None
                    if micro_batch in (None, "whole")
                    else read_count(micro_batch, "micro_batch")
                ),
                whole=micro_batch == "whole",
                exact=exact,
                tile=tile,
            )
        )
        self._recovery = Recovery(self._planner)
        self._tree = ModelTree(model)
        self._measured_models = MeasuredModels(self._tree, self._planner)
        self._has_warned = False

    def plan(self, batch: Any) -> Plan:
        """The plan for batches like this one; the first such batch is profiled and tried out, which
        leaves no trace.
        """
        return self._planner.described(self._tested(batch, self._planner.step.runner.rows(batch)))

    @property
    def additivity(self) -> Additivity | None:
        """How the parts of a batch make the whole, as measured with the first plan; None before
        it.
        """
        return self._planner.loss.additivity

    def run(
        self,
        batch: Any,
        backward: Callable[[PartLoss, Weight], object],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the passes of a batch, all of them or, if one fails for good, none.

        If memory runs out they are begun anew, with a plan that takes less. Gradients that were
        there are set aside, so that those of a failed attempt can be dropped, and added at the end.

        Args:
            batch: any number of rows.
            backward: `backward(loss, weight)` is called for each micro-batch.
            begin: called before the first of them, also when they are begun anew.

        Raises:
            MisuseError: The batch has no rows, or its parts are divided by numbers that do not go
                together.
        """
        runner = self._planner.step.runner
        rows = runner.rows(batch)
        tested = self._tested(batch, rows)
        before = Snapshot(self._model)

        def attempt(tested: TestedPlan, _: int) -> None:
            before.clear_gradients()
            begin()
            parts = runner.parts(batch, tested.plan.micro_batch, rows)
            shares = self._recovery.count(tested, parts, before)
            before.clear_gradients()
            weights = BatchWeights(
                self.additivity, rows, exact=self._exact, shares=shares, may_repeat=shares is None
            )
            for part in parts:
                weighed = partial(_weigh, weights, part.position, backward)
                self._recovery.run(tested, part, batch, weighed)

        def take_back() -> bool:
            before.restore()
            return True

        self._recovery.repeat(tested, batch, attempt, take_back)
        before.add_gradients()

    def _tested(self, batch: Any, rows: int) -> TestedPlan:
        self._tree.renew()
        if self._planner.known and not self._measured_models.has_plans_of_this():
            self._has_warned = False
        tested = self._planner.tested_plan(batch, rows)
        self._tree.renew()  # a first forward may make modules
        self._measured_models.are_measured()
        if not self._has_warned:
            self._has_warned = True
            warn_about_cutting(tested, self.additivity, exact=self._exact)
        return tested


def _weigh(
    weights: BatchWeights,
    position: int,
    backward: Callable[[PartLoss, Weight], object],
    part: PartLoss,
) -> None:
    part = weights.shared(part, position)
    backward(part, weights.of(part))


class MeanInProgress:
    """The mean over all items of parts that come one after the other: their losses, and their
    gradients in `.grad`.

    How many items there will be is known only at the end. So gradients are divided by as many as
    there would be if all parts had as many as the first, and `finish` corrects them by how many
    there were.
    """

    def __init__(self) -> None:
        self._unit = 0.0  # the items that gradients are divided by until the end
        self._items = 0.0
        self._sum: torch.Tensor | float = 0.0
        self._marked: tuple[float, float, torch.Tensor | float] = (0.0, 0.0, 0.0)

    @property
    def mean(self) -> torch.Tensor | float:
        """Of the losses so far; NaN if there were no items, as torch has it."""
        return self._sum / self._items if self._items else math.nan

    def mark(self) -> None:
        """A batch begins: `rewind` comes back to here."""
        self._marked = self._unit, self._items, self._sum

    def rewind(self) -> None:
        """The batch that was begun at the mark is begun anew."""
        self._unit, self._items, self._sum = self._marked

    def add(self, loss: torch.Tensor, weight: Weight, *, parts: float = 1.0) -> torch.Tensor | None:
        """Take in a part: what to call `backward` on; None for a part without items, which
        contributes nothing.

        Args:
            loss: The part's loss, a mean or a sum as `weight` says.
            weight: Of how many items.
            parts: About how many parts of this size there will be.
        """
        items = float(weight.number)
        if not items:
            return None
        if not self._unit:
            self._unit = items * parts
        total = loss * items if weight.reduction == "mean" else loss
        self._items += items
        self._sum = self._sum + total.detach()
        return loss * (items / self._unit) if weight.reduction == "mean" else loss / self._unit

    def finish(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor | float:
        """Make the gradients those of the mean over all items, which is returned."""
        if self._items and not math.isclose(self._items, self._unit, rel_tol=1e-12):
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._unit / self._items)
            self._unit = self._items
        return self.mean
