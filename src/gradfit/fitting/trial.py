"""Trials of plans: micro-batches run as a step would run them, measured, and nothing of it stays.

A plan of several micro-batches is tried out by one of them, into gradients that are there, which is
what most of a step is and takes the most: all before it have less of the gradients. Where not every
parameter gets one of such a micro-batch, or gradients are another's, the first two are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory
from gradfit._torch_compile import is_compiled
from gradfit._torch_distributed import local_part
from gradfit._torch_fsdp import drop_gradients
from gradfit.accumulate.loss_scaling import CarriedScale, scale_of
from gradfit.batches.device_numbers import MOST_WAITING
from gradfit.batches.late_weights import LATE_TYPES, LateWeights
from gradfit.batches.loss import PartLoss
from gradfit.batches.runner import Part
from gradfit.batches.snapshot import Snapshot, untouched
from gradfit.batches.totals import LossTotals
from gradfit.batches.weights import BatchWeights, CountFirst
from gradfit.devices import forget_failed_passes, free_cached_memory
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.made_rows import runner_of_rows
from gradfit.fitting.measured_loss import MeasuredLoss
from gradfit.fitting.modes import Planned, WithinLimit
from gradfit.fitting.progress import ProgressReport
from gradfit.fitting.reserved import ReservedMemory, TrialRecord
from gradfit.fitting.step_to_plan import StepToPlan, has_sparse_gradients
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.fitting.update_requests import DeviceUpdates, make_numbers
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.resident_bytes import whole_gradient_bytes
from gradfit.recompute.evict import LimitGuard, LimitRefusal
from gradfit.recompute.follow_plan import Diverged, LooksAtData
from gradfit.tape.storage import sparse_parts
from gradfit.tree import repeat_rows

# on a device whose allocator is followed: of the parts, while they wait to be read, and of the norm
_NUMBERS_AT_ONCE, _NUMBER_BYTES = MOST_WAITING + 16, 8


class NeedsMore(Exception):
    """A limit of so many bytes does not suffice."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


class PastLimit(NeedsMore):
    """What was tried out could not stay below its limit; at some operation it needed so many
    bytes.
    """


class Trials:
    """Tries plans out.

    Args:
        step: runs the micro-batches, and says what they may take.
        loss: what weighs the parts of a batch.
        reserved: the allocators of the model's devices.
        progress: is told that a trial begins.
    """

    def __init__(
        self,
        step: StepToPlan,
        loss: MeasuredLoss,
        reserved: ReservedMemory,
        progress: ProgressReport,
    ) -> None:
        self.left = ""
        """Where the last trial left its plan."""
        self._step, self._loss, self._reserved, self._progress = step, loss, reserved, progress
        # where gradients are added up in a wider type a copy of the scaler would get narrow ones
        scaler = step.scaler if step.wide is None else None
        self._updates = DeviceUpdates(
            step.model, step.optimizer, reserved.devices, step.limit_bytes, scaler
        )

    def within_limit(self, untested: TestedPlan, batch: Any) -> TestedPlan | None:
        """As `try_out`; None if it does not hold the budget, too."""
        limit = self._step.limit_bytes
        tried = self.try_out(untested, batch, most_bytes=limit)
        return None if tried is None or tried.peak_bytes > limit else tried

    def try_out(
        self,
        untested: TestedPlan,
        batch: Any,
        *,
        online_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> TestedPlan | None:
        """Run micro-batches as planned, or each of them online: with the peak of the whole step, or
        None if it left the plan or memory ran out.

        Args:
            untested: the plan.
            batch: its micro-batches are run.
            online_bytes: evict as memory fills up, below this limit; a peak above it is what was
                needed, at least, where it did not suffice.
            most_bytes: no operation is begun that would pass so many bytes; the same of its peak.
        """
        step = self._step
        self._progress.begin(f"trying out a plan, micro-batch {untested.plan.micro_batch}")
        with untouched(step.model) as before:
            record = TrialRecord(self._reserved)
            trial = _Trial(step, untested, batch, before, record)
            try:
                with record:
                    if online_bytes is not None:
                        trial.run_online(online_bytes)
                    else:
                        weights = self._loss.weights_of(untested.plan.batch_size)
                        trial.run_planned(most_bytes, weights)
                    trial.read_losses()
                return trial.tested(self._updates)
            except Exception as error:
                if not _is_answer(error):
                    raise
                peak = self._peak_told_by(error, online_bytes)
                traceback.clear_frames(error.__traceback__)  # they hold every tensor of the trial
            finally:
                drop_gradients(step.model)
            free_cached_memory()
            return dataclasses.replace(untested, peak_bytes=peak) if peak else None

    def _peak_told_by(self, error: Exception, online_bytes: int | None) -> int:
        """Bytes that a trial would have taken at least; 0 if its end does not say."""
        if isinstance(error, Diverged):
            self.left = str(error)
        if isinstance(error, PastLimit):
            return error.needed_bytes
        # Where memory ran out before the budget did: as if the trial had taken a tenth more than
        # there is.
        is_short = online_bytes is None and is_out_of_memory(error)
        return self._step.limit_bytes * 11 // 10 if is_short else 0


class _Trial:
    """One of them, and what it has shown so far."""

    def __init__(
        self,
        step: StepToPlan,
        untested: TestedPlan,
        batch: Any,
        before: Snapshot,
        record: TrialRecord,
    ) -> None:
        self._model, self._optimizer = step.model, step.optimizer
        self._runner = runner_of_rows(step.runner, batch, untested.plan.micro_batch)
        self._is_compiled = is_compiled(step.model, step.runner.loss_fn)
        self._scaler = step.scaler if step.scaler is not None and step.scaler.is_enabled() else None
        self._untested = dataclasses.replace(untested, saved_bytes=None)  # of another plan, perhaps
        self._plan, self._batch, self._before, self._record = untested.plan, batch, before, record
        self._device = step.device
        profile = untested.profile
        self._burst_bytes = profile.updating(self._plan.update_groups).optimizer_burst_bytes
        # what its first step will allocate
        self._waiting_bytes = max(0, profile.optimizer_bytes - state_bytes(step.optimizer))
        self._batch_bytes = int(self._plan.batch_size * profile.batch_bytes.per_item)
        self._passes_bytes = self._update_bytes = self._saved_bytes = self._asked = 0
        self._rest_bytes = 0  # of the batch, which a trial does not hold
        self._left_out_bytes = 0  # of parameters that its passes gave no gradient
        # which a step holds until it has read them
        self._numbers: list[Any] = []
        self._carried: CarriedScale | None = None
        self._data_reads = LooksAtData()

    # -- which micro-batches ----------------------------------------------------------------------

    def run_online(self, limit_bytes: int) -> None:
        """Each micro-batch, evicting as memory fills up."""
        for cut in self._runner.cut(self._batch, self._plan.micro_batch):
            self._run(cut, None, lambda part, beside: self._evict(part, limit_bytes, beside))

    def run_planned(self, most_bytes: int | None, weights: BatchWeights) -> None:
        """As most of a step's micro-batches are; or the first two; or all, where each leaves larger
        gradients than the one before.
        """

        def follow(part: Part, beside: int) -> None:
            self._follow(part, weights)

        number = self._plan.steps if has_sparse_gradients(self._model) else 2
        first, *others = self._full_parts(number)
        if others and self._may_have_gradients():
            with _gradients_there(self._model) as gradients:
                self._run(others[-1], most_bytes, follow)
                if gradients.all_were_added_to():
                    return
            # with gradients that a step does not have; and what was saved goes with the peak
            self._passes_bytes = self._saved_bytes = self._asked = 0
        for part in (first, *others):
            self._run(part, most_bytes, follow)

    def _full_parts(self, number: int) -> Iterator[Any]:
        """So many parts, if there are; the first again where another has fewer rows, which would
        have to be repeated in memory that no step takes.
        """
        size = self._plan.micro_batch
        first, *others = islice(self._runner.cut(self._batch, size), number)
        yield first
        for other in others:
            is_full = self._runner.split is not None or self._runner.rows(other) == size
            yield other if is_full else first

    def _may_have_gradients(self) -> bool:
        """Whether gradients may be put there before: the ranks' are moved about, sparse ones are as
        large as the passes make them, and an allocator is followed from the first pass on.
        """
        sparse = has_sparse_gradients(self._model)
        return not (distributed.is_running() or sparse or self._record.is_followed)

    # -- running one ------------------------------------------------------------------------------

    def _run(
        self, cut: Any, most_bytes: int | None, both_passes: Callable[[Part, int], object]
    ) -> None:
        """Both passes of a micro-batch, measured; `both_passes` also gets how many bytes are taken
        by what is not there yet.
        """
        size = self._plan.micro_batch
        content = repeat_rows(cut, size) if self._runner.split is None else cut
        resident = (self._model, self._optimizer, content)
        # A part is a view: it holds the whole batch it was cut from, which may still be less than a
        # step's.
        held = meter(content, device=self._device).current_bytes
        rest = max(0, self._batch_bytes - held)
        if not self._record.begun:  # a step, too, has copies of the buffers to go back to
            if self._scaler is not None and self._record.is_followed:
                make_numbers(self._scaler, self._model)
            beside_trial = _beside_trial(rest, self._plan.steps)
            self._record.begin(*resident, self._before.buffers, beside=beside_trial)
        beside = self._waiting_bytes + rest
        limit = None if most_bytes is None else most_bytes - beside
        live = meter_below(limit)(*resident, device=self._device)
        live.events = self._record.events
        with refusing(beside), live:
            both_passes(Part(0, size, content), beside)
        self._rest_bytes, self._left_out_bytes = rest, _left_out_bytes(self._model)
        self._passes_bytes = max(self._passes_bytes, live.peak_bytes + rest)
        burst = max(self._burst_bytes, _largest_sparse_bytes(self._model))
        self._update_bytes = live.current_bytes + rest + burst

    def _follow(self, part: Part, weights: BatchWeights) -> None:
        """Both passes of one micro-batch by the plan.

        Raises:
            UnreadableLoss: it is one of several, and cannot be weighed.
        """
        mode = Planned(self._untested, inside=self._data_reads)
        part_loss = self._runner.forward(part, mode)
        if self._is_compiled:  # else it is as it was measured
            weights.of(part_loss)
        loss, times = self._held_to_be_read(part_loss, weights)
        del part_loss
        unrecorded = mode.followed.rest
        torch.autograd.backward(loss, times)
        self._saved_bytes = max(self._saved_bytes, unrecorded.saved_bytes)
        self._asked = max(self._asked, unrecorded.last_rebuilt)

    def _held_to_be_read(
        self, part_loss: PartLoss, weights: BatchWeights
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What to backpropagate, and what its gradient begins with, if not with 1. The numbers of
        an accelerator's losses are held, as a step does.
        """
        loss, times = part_loss.loss, None
        is_scaled = self._scaler is not None
        if not (loss.is_cpu or loss.dtype not in LATE_TYPES):
            late = LateWeights(weights, whole=self._plan.steps == 1, is_scaled=is_scaled)
            loss, *_, times = late.take(part_loss)
            self._numbers.append(late)
        elif is_scaled:  # a step reads at once what the loss weighs
            totals = LossTotals()
            with contextlib.suppress(CountFirst):  # a step counts its parts before, and not here
                totals.add(part_loss, weights.of(part_loss))
            self._numbers.append(totals)
        else:
            self._numbers.append(loss.detach())
        if self._scaler is not None:
            if self._carried is None:
                self._carried = CarriedScale(scale_of(self._scaler))
            loss = self._scaler.scale(loss)
        return loss, None if times is None else times.to(loss.dtype).reshape(loss.shape)

    def _evict(self, part: Part, limit_bytes: int, beside: int) -> None:
        resident = (self._model, self._optimizer, part.content)
        mode = WithinLimit(self._untested, limit_bytes - beside, *resident, device=self._device)
        try:
            self._runner.run(part, mode, lambda part_loss: torch.autograd.backward(part_loss.loss))
        except BudgetInfeasible as refusal:
            raise PastLimit(max(limit_bytes + 1, refusal.min_bytes + beside)) from refusal

    # -- what it has shown ------------------------------------------------------------------------

    def read_losses(self) -> None:
        """The passes are over, and a step has launched its update."""
        self._record.reading()
        for one in self._numbers:
            if isinstance(one, LossTotals):
                one.read()
        self._numbers.clear()
        self._carried = None

    def tested(self, updates: DeviceUpdates) -> TestedPlan:
        """The plan, with what it took; `updates` says what comes after the passes."""
        reserved, copied = self._reserved_bytes(updates)
        peak = max(self._passes_bytes, self._update_bytes) + self._waiting_bytes
        return dataclasses.replace(
            self._untested,
            plan=dataclasses.replace(self._plan, reserved_bytes=reserved),
            peak_bytes=max(peak, reserved),
            tested_bytes=max(peak, reserved) + self._left_out_bytes,
            reserved_bytes=reserved,
            copied_reserved_bytes=copied,
            saved_bytes=self._saved_bytes,
            asked=self._asked,
            reads_data=self._data_reads.reads_data,
        )

    def _reserved_bytes(self, updates: DeviceUpdates) -> tuple[int, int]:
        """Without a copy to go back to, and with one; 0 where no allocator is followed."""
        if not self._record.events:
            return 0, 0
        drop_gradients(self._model)
        live = meter(self._model, self._optimizer, device=self._device).current_bytes
        update = updates.of(
            self._plan.update_groups,
            self._waiting_bytes,
            self._burst_bytes,
            live + self._rest_bytes,
        )
        record = self._record
        return record.reserved_bytes(update, copied=False), record.reserved_bytes(
            update, copied=True
        )


def _left_out_bytes(model: torch.nn.Module) -> int:
    """Of gradients that a step may have, and these passes have not made: of layers that were
    skipped. Where a group shards them, they are not where they would be looked for.
    """
    if distributed.is_running():
        return 0
    trained = (one for one in model.parameters() if one.requires_grad)
    return sum(whole_gradient_bytes(one) for one in trained if one.grad is None)


def _largest_sparse_bytes(model: torch.nn.Module) -> int:
    """Of one sparse gradient: in a copy, its rows are put together before it is scaled, or its norm
    is taken.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    sparse = [one for one in gradients if one is not None and one.is_sparse]
    return max(map(_allocated_bytes, sparse), default=0)


def _allocated_bytes(sparse: torch.Tensor) -> int:
    """More than its parts have where torch has put rows together: they lie in as much as before."""
    return sum(part.untyped_storage().nbytes() for part in sparse_parts(sparse))


class _GradientsThere:
    """Gradients of zeros, for all that is trained, of the types that gradients have."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._made = [(one, torch.zeros_like(one, dtype=one.grad_dtype)) for one in trained]
        for parameter, gradient in self._made:
            parameter.grad = gradient
        self._versions = [gradient._version for _, gradient in self._made]

    def all_were_added_to(self) -> bool:
        """Whether a step has all of them once its first micro-batch is over."""
        pairs = zip(self._made, self._versions, strict=True)
        return all(
            parameter.grad is gradient and gradient._version > version
            for (parameter, gradient), version in pairs
        )

    def drop(self) -> None:
        """Hold none of them any longer."""
        self._made.clear()


@contextlib.contextmanager
def _gradients_there(model: torch.nn.Module) -> Iterator[_GradientsThere]:
    """Inside, each trained parameter has a gradient; afterwards none has, and nobody holds one."""
    gradients = _GradientsThere(model)
    try:
        yield gradients
    finally:
        drop_gradients(model)
        gradients.drop()


def _beside_trial(batch_bytes: int, parts: int) -> list[int]:
    """Bytes of what a step holds and a trial does not: the batch's rest, and the numbers of its
    parts, if there are several.
    """
    return [batch_bytes, *[_NUMBER_BYTES] * (_NUMBERS_AT_ONCE if parts > 1 else 0)]


def _is_answer(error: Exception) -> bool:
    """Whether it says that the plan does not hold, and not that something is wrong."""
    return isinstance(error, Diverged | BudgetInfeasible | PastLimit) or is_out_of_memory(error)


def meter_below(most_bytes: int | None) -> Callable[..., Meter]:
    """`meter`, or one in which no operation is begun that would pass so many bytes."""
    # ranks run forwards together, whatever each one's budget is
    if most_bytes is None or distributed.is_running():
        return meter

    def guard(*watched: Any, device: torch.device | None = None) -> Meter:
        live = LimitGuard(most_bytes, device=device)
        live.watch(*watched)
        return live

    return guard


@contextlib.contextmanager
def refusing(beside: int) -> Iterator[None]:
    """What a guard refuses inside needs so many bytes more."""
    try:
        yield
    except LimitRefusal as refusal:
        traceback.clear_frames(refusal.__traceback__)  # they hold every tensor
        forget_failed_passes()
        raise PastLimit(refusal.needed_bytes + beside) from None


def state_bytes(optimizer: Any) -> int:
    """What an optimizer's state takes by now, on this rank."""
    states = getattr(optimizer, "state", {}).values()
    values = chain.from_iterable(state.values() for state in states if isinstance(state, dict))
    return sum(
        local_part(value).untyped_storage().nbytes()
        for value in values
        if isinstance(value, torch.Tensor)
    )
