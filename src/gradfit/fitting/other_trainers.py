"""The passes of a batch under a budget, for loops whose update is somebody else's: trainers of other libraries."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit.arguments import read_count
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.loss import PartLoss
from gradfit.batches.shares import PartCounter, PartShare
from gradfit.batches.snapshot import Snapshot, untouched
from gradfit.batches.weights import BatchWeights, Weight, may_count
from gradfit.fitting.cut_warning import warn_about_cutting
from gradfit.fitting.plan_search import Planner
from gradfit.fitting.tested_plan import Fitted, PartShape, part_shape
from gradfit.planning.plan import Plan
from gradfit.profiling.measure import LossFunction, check_model, run_part
from gradfit.recompute.evict import Online
from gradfit.recompute.planned import Diverged
from gradfit.units import parse_bytes


class Passes:
    """Forward and backward of any batch in micro-batches, so that all tensors of a step stay below a budget.

    What each micro-batch weighs is what its loss was divided by, as for `fit`; what does not add up is not cut.

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
        self._model, self._optimizer, self._loss_fn, self._exact = model, optimizer, loss_fn, exact
        self._planner = Planner(
            model,
            optimizer,
            loss_fn,
            parse_bytes(memory),
            reserved_bytes=reserved_bytes,
            micro_batch=None if micro_batch in (None, "whole") else read_count(micro_batch, "micro_batch"),
            whole=micro_batch == "whole",
            exact=exact,
            tile=tile,
        )
        self._off_plan: set[PartShape] = set()  # parts that left their plan: what to drop is decided as it comes
        self._has_warned = False

    def plan(self, batch: Any) -> Plan:
        """The plan for batches like this one; the first such batch is profiled and tried out, which leaves no trace."""
        return self._fitted(batch).plan

    @property
    def additivity(self) -> Additivity | None:
        """How the parts of a batch make the whole, as measured with the first plan; None before it."""
        return self._planner.additivity

    def run(self, batch: Any, backward: Callable[[PartLoss, Weight], object]) -> None:
        """Run the passes: `backward(loss, weight)` is called for each micro-batch.

        Raises:
            MisuseError: The batch has no rows, or its parts are divided by numbers that do not go together.
        """
        fitted = self._fitted(batch)
        rows = self._planner.rows(batch)
        parts = list(self._planner.parts(batch, fitted.plan.micro_batch))
        weights = BatchWeights(self.additivity, rows, exact=self._exact, shares=self._count(fitted, parts))
        for number, part in enumerate(parts):
            with contextlib.ExitStack() as around:
                found = self._forward(fitted, part, batch, around, first=not number)
                found = weights.shared(found, number)
                backward(found, weights.of(found))
                del found

    def _count(self, fitted: Fitted, parts: list[Any]) -> list[PartShare] | None:
        """Each part's share in the batch, where one weight for a part cannot be right. No pass is repeated here, so
        that is found out before the first."""
        additivity = self.additivity
        if additivity is None or not may_count(additivity, len(parts)):
            return None
        with untouched(self._model):
            return PartCounter(self._model, fitted.tiled(self._loss_fn), None, additivity.roles).shares(parts)

    def _fitted(self, batch: Any) -> Fitted:
        fitted = self._planner.fitted(batch, self._planner.rows(batch))
        if not self._has_warned:
            self._has_warned = True
            warn_about_cutting(fitted, self.additivity, exact=self._exact)
        return fitted

    def _forward(self, fitted: Fitted, part: Any, batch: Any, around: contextlib.ExitStack, *, first: bool) -> PartLoss:
        rows = self._planner.rows(part)
        if fitted.steady and not (self._off_plan and part_shape(part) in self._off_plan):
            before = Snapshot(self._model)
            try:
                with fitted.following(first=first):
                    return run_part(fitted.tiled(self._loss_fn), self._model, part, rows)
            except Diverged:
                self._off_plan.add(part_shape(part))
            before.restore()  # the gradients are those of the parts before: no backward has begun
        online = around.enter_context(Online(self._planner.limit_bytes, device=self._planner.device))
        online.evictor.watch(self._model, self._optimizer, batch)
        return run_part(fitted.tiled(self._loss_fn), self._model, part, rows)


class MeanInProgress:
    """The mean over all items of parts that come one after the other: their losses, and their gradients in `.grad`.

    How many items there will be is known only at the end. So gradients are divided by as many as there would be if all
    parts had as many as the first, and `finish` corrects them by how many there were.
    """

    def __init__(self) -> None:
        self._unit = 0.0  # the items that gradients are divided by until the end
        self._items = 0.0
        self._sum: torch.Tensor | float = 0.0

    @property
    def mean(self) -> torch.Tensor | float:
        """Of the losses so far; NaN if there were no items, as torch has it."""
        return self._sum / self._items if self._items else math.nan

    def add(self, loss: torch.Tensor, weight: Weight, *, parts: float = 1.0) -> torch.Tensor | None:
        """Take in a part: what to call `backward` on; None for a part without items, which contributes nothing.

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
