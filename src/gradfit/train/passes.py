"""The passes of a batch under a budget, for loops whose update is somebody else's: trainers of other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from gradfit.batches.snapshot import Snapshot
from gradfit.errors import MisuseError
from gradfit.planning.record import Plan
from gradfit.profiling.measure import LossFunction, check_model, run_loss
from gradfit.recompute.evict import Online
from gradfit.recompute.planned import Diverged
from gradfit.train.fitted import Fitted, PartShape, part_shape
from gradfit.train.planner import Planner
from gradfit.units import parse_bytes


class Passes:
    """Forward and backward of any batch in micro-batches, so that all tensors of a step stay below a budget.

    Gradients add up in `.grad`. `loss_fn(model, part)` is as for `fit`, but returns one scalar.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> passes = Passes(model, optimizer, lambda m, x: m(x).square().mean(), memory="1 MiB")
    >>> total = passes.run(torch.ones(32, 8), lambda loss, part: (loss * (len(part) / 32)).backward())
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: LossFunction,
        memory: int | float | str,
        *,
        reserved_bytes: int = 0,
    ) -> None:
        check_model(model)
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._planner = Planner(model, optimizer, loss_fn, parse_bytes(memory), reserved_bytes=reserved_bytes)
        self._astray: set[PartShape] = set()  # parts that left their plan: what to drop is decided as it comes

    def plan(self, batch: Any) -> Plan:
        """The plan for batches like this one; the first such batch is profiled and tried out, which leaves no trace."""
        return self._fitted(batch).plan

    def run(self, batch: Any, backward: Callable[[torch.Tensor, Any], object]) -> torch.Tensor:
        """Run the passes: `backward(loss, part)` is called for each micro-batch. Returns the losses, added up."""
        fitted = self._fitted(batch)
        total: torch.Tensor | None = None
        for number, part in enumerate(self._planner.parts(batch, fitted.plan.micro_batch)):
            with contextlib.ExitStack() as around:
                loss = self._forward(fitted, part, batch, around, first=not number)
                scaled = backward(loss, part)
                seen = scaled if isinstance(scaled, torch.Tensor) else loss
                total = seen.detach() if total is None else total + seen.detach()
                del loss, scaled, seen
        if total is None:
            raise MisuseError("The batch has no rows. Pass one with at least 1.")
        return total

    def _fitted(self, batch: Any) -> Fitted:
        return self._planner.fitted(batch, self._planner.rows(batch))

    def _forward(
        self, fitted: Fitted, part: Any, batch: Any, around: contextlib.ExitStack, *, first: bool
    ) -> torch.Tensor:
        if fitted.steady and not (self._astray and part_shape(part) in self._astray):
            before = Snapshot(self._model)
            try:
                with fitted.following(first=first):
                    return run_loss(self._loss_fn, self._model, part)[0]
            except Diverged:
                self._astray.add(part_shape(part))
            before.restore()  # the gradients are those of the parts before: no backward has begun
        online = around.enter_context(Online(self._planner.limit_bytes))
        online.evictor.watch(self._model, self._optimizer, batch)
        return run_loss(self._loss_fn, self._model, part)[0]
