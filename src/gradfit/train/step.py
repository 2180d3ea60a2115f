"""One exact full-batch update under a budget: split, forward (tape), backward (replay), accumulate, update.

A step either happens as a whole or not at all. What an attempt changes before the optimizer steps (gradients, buffers,
random generators) is put back if it fails, or is interrupted; the optimizer's own step is covered by a copy of the
parameters and its state where the budget has room for one, which it usually has: all activations are gone by then.
Where it has not, Ctrl-C waits until the optimizer has stepped.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gradfit._torch import is_out_of_memory
from gradfit._torch_fsdp import drop_gradients
from gradfit._torch_listen import unseen
from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.batches.snapshot import Snapshot
from gradfit.errors import BudgetInfeasible, MisuseError, StateError
from gradfit.interrupts import uninterrupted
from gradfit.planning.record import Plan
from gradfit.profiling.measure import LossFunction, run_loss
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.record import Profile
from gradfit.recompute.evict import Online
from gradfit.recompute.planned import Diverged
from gradfit.train.fitted import Fitted, PartShape, part_shape
from gradfit.train.planner import Planner
from gradfit.train.rollback import UpdateSnapshot

_MOST_ATTEMPTS = 6


class TrainResult(NamedTuple):
    """What one step did."""

    loss: float
    """The mean over all items of the batch."""
    stepped: bool
    grad_norm: float | None
    peak_bytes: int
    """Of all tensors, measured: in this step if it is one of the first two with its plan, else in the second."""
    micro_batches: int
    weight: int | float
    reason: str
    attempts: int
    """More than 1 if memory ran out and the step was repeated with a tighter plan."""

    def __bool__(self) -> bool:
        return self.stepped


class Progress(NamedTuple):
    """How far a step has come, between two of its micro-batches; with the accumulator's state it can go on."""

    done: int
    """Micro-batches that are accumulated."""
    micro_batch: int
    total: float
    items: float
    window: Mapping[str, Any] | None = None
    """The accumulator's `state_dict()`, which whoever saves this puts here."""
    buffers: Mapping[str, torch.Tensor] = {}
    """Running statistics as they were when the step began."""


AfterMicroBatch = Callable[[Progress], object]


class TrainStep:
    """The step that `fit` returns: call it with a batch. `plan`, `profile` and `budget_bytes` say what it follows."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: LossFunction,
        accumulator: GradientAccumulator,
        planner: Planner,
        fitted: Fitted,
    ) -> None:
        self.model, self.optimizer, self.accumulator = model, optimizer, accumulator
        self._loss_fn, self._planner, self._fitted = loss_fn, planner, fitted
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._astray: set[PartShape] = set()  # parts that left their plan: what to drop is decided online
        self._changing: UpdateSnapshot | None = None  # while the optimizer steps

    @property
    def plan(self) -> Plan:
        return self._fitted.plan

    @property
    def profile(self) -> Profile:
        return self._fitted.profile

    @property
    def budget_bytes(self) -> int:
        return self._planner.budget_bytes

    @property
    def known(self) -> tuple[Fitted, ...]:
        """Every plan made so far, by input shape; `fit(..., known=step.known)` starts from them."""
        return self._planner.known

    def __repr__(self) -> str:
        return f"<step: {str(self.plan).splitlines()[0]}>"

    def __call__(
        self,
        batch: Any,
        *,
        progress: Progress | None = None,
        after_micro_batch: AfterMicroBatch | None = None,
    ) -> TrainResult:
        """One exact update with this batch, whatever its size and shape.

        `after_micro_batch` is called between two micro-batches; what it raises ends the step, with nothing changed.
        `progress` goes on with a step that was ended so: the same batch, the generators as they were then.
        Gradients that other passes have left in `.grad` are cleared first, as by `optimizer.zero_grad()`.
        """
        if self.accumulator.current_step:
            raise MisuseError("The accumulator is in the middle of a window. Call step.accumulator.flush() or reset().")
        if not self.model.training:
            raise MisuseError("The model is in evaluation mode. Call model.train() before step(batch).")
        self._clear_gradients()
        with self.accumulator.rehearsal():  # a new shape is profiled and tried out
            fitted = self._fitted = self._planner.fitted(batch, self._planner.rows(batch))
        before = Snapshot(self.model, self.accumulator.window.tensors)
        if after_micro_batch is not None:
            self._buffers = before.buffers if progress is None else progress.buffers
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            self._changing = None
            try:
                return self._attempt(batch, fitted, attempt, progress, after_micro_batch)
            except BaseException as error:
                if not self._take_back(before):
                    raise  # interrupted when all was done
                short = is_out_of_memory(error) or isinstance(error, BudgetInfeasible)
                astray = isinstance(error, Diverged)
                if not (short or astray) or attempt == _MOST_ATTEMPTS:
                    self.accumulator.ranks.failed(error)
                    raise
                failure: BaseException = error
            # Outside of the handler: the traceback holds every tensor of the failed attempt.
            _forget(failure)
            del failure
            if not astray:
                fitted = self._fitted = self._planner.tighter(self._fitted)
        raise AssertionError("unreachable")

    def _clear_gradients(self) -> None:
        """A step's gradients are those of its batch alone, and its budget has no room for others."""
        tensors = (*self.model.parameters(), *self.accumulator.window.tensors)
        if any(tensor.grad is not None for tensor in tensors):
            drop_gradients(self.model)
            for tensor in tensors:
                tensor.grad = None

    def _take_back(self, before: Snapshot) -> bool:
        """Make everything as it was before the attempt; False if the optimizer has stepped: then it has happened."""
        with uninterrupted():
            if self._changing is not None:
                if self._changing.done:
                    return False
                self._changing.undo()
            self.accumulator.reset()
            before.restore()
        return True

    def idle(self) -> TrainResult:
        """Take part in a step for which this rank has no rows."""
        self.accumulator.window.notes = {"loss": 0.0, "items": 0.0}
        result = self.accumulator.flush()
        total, items = self.accumulator.notes["loss"], self.accumulator.notes["items"]
        return TrainResult(
            loss=total / items if items else 0.0,
            stepped=result.stepped,
            grad_norm=result.grad_norm,
            peak_bytes=self._fitted.peak_bytes,
            micro_batches=result.micro_batches,
            weight=result.weight,
            reason=result.reason,
            attempts=1,
        )

    def _attempt(
        self, batch: Any, fitted: Fitted, attempt: int, progress: Progress | None, after: AfterMicroBatch | None
    ) -> TrainResult:
        if fitted.seen and fitted.steady:
            return self._update(batch, fitted, attempt, None, progress, after)
        whole = self._planner.has_optimizer_state(fitted)  # else it comes on top in the next step
        with meter(self.model, self.optimizer, batch) as live:
            result = self._update(batch, fitted, attempt, live, progress, after)
        self._fitted = self._planner.replace(self._fitted, peak_bytes=live.peak_bytes, seen=whole)
        return result

    def _update(
        self,
        batch: Any,
        fitted: Fitted,
        attempt: int,
        live: Meter | None,
        progress: Progress | None,
        after: AfterMicroBatch | None,
    ) -> TrainResult:
        accumulator, plan = self.accumulator, fitted.plan
        rows = self._planner.rows(batch)
        accumulator.accumulation_count = max(1, -(-rows // plan.micro_batch))
        done, total, items = self._go_on(progress, plan) if progress is not None else (0, 0.0, 0.0)
        for position, part in enumerate(self._planner.parts(batch, plan.micro_batch)):
            if position < done:
                continue
            if after is not None and position > done:
                with unseen():  # what a save copies is not the step's memory
                    after(Progress(position, plan.micro_batch, total, items, buffers=self._buffers))
            with contextlib.ExitStack() as around:
                if fitted.steady and not (self._astray and part_shape(part) in self._astray):
                    try:
                        with fitted.following(first=position == done):
                            loss, count = run_loss(self._loss_fn, self.model, part)
                    except Diverged:
                        self._astray.add(part_shape(part))
                        raise
                else:
                    online = around.enter_context(Online(self._planner.limit_bytes))
                    online.evictor.watch(self.model, self.optimizer, batch)
                    loss, count = run_loss(self._loss_fn, self.model, part)
                weight = count if count is not None else self._planner.rows(part)
                number = float(weight)
                total += float(loss.detach()) * (1.0 if count is not None else number)
                items += number
                accumulator.backward(loss, weight=weight, reduction="mean" if count is None else "sum")
                del loss
        self._changing = UpdateSnapshot(self.model, self.optimizer, taken=fitted.copied)
        alone = accumulator.ranks.size == 1  # else it may have to wait for another rank
        # Without a copy to go back to, the optimizer is not interrupted.
        with uninterrupted() if alone and not fitted.copied else contextlib.nullcontext(), self._changing:
            accumulator.window.notes = {"loss": total, "items": items}
            result = accumulator.flush()
        total, items = accumulator.notes["loss"], accumulator.notes["items"]
        return TrainResult(
            loss=total / items if items else 0.0,
            stepped=result.stepped,
            grad_norm=result.grad_norm,
            peak_bytes=(live.peak_bytes if live is not None else fitted.peak_bytes) + self._planner.reserved_bytes,
            micro_batches=result.micro_batches,
            weight=result.weight,
            reason=result.reason,
            attempts=attempt,
        )

    def _go_on(self, progress: Progress, plan: Plan) -> tuple[int, float, float]:
        """Take up a window that was left in the middle."""
        if progress.micro_batch != plan.micro_batch:
            raise StateError(
                f"The step was left at micro-batches of {progress.micro_batch} rows, the plan has {plan.micro_batch}. "
                "Pass fit(..., known=) the plans it was begun with."
            )
        if progress.window is not None:
            self.accumulator.load_state_dict(progress.window)
        return progress.done, progress.total, progress.items


def _forget(failure: BaseException) -> None:
    failure.__traceback__ = None
    failure.__context__ = failure.__cause__ = None
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
