"""One exact full-batch update under a budget: split, forward (tape), backward (replay), accumulate,
update.

A step either happens as a whole or not at all. What an attempt changes before the optimizer steps
(gradients, buffers, random generators) is put back if it fails, or is interrupted; the optimizer's
own step is covered by a copy of the parameters and its state where the budget has room for one,
which it usually has: all activations are gone by then. Where it has not, Ctrl-C waits until the
optimizer has stepped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gradfit._torch import have_no_gradient, is_out_of_memory
from gradfit._torch_fsdp import drop_gradients
from gradfit._torch_listen import unseen
from gradfit.accumulate.accumulator import BareAccumulator
from gradfit.accumulate.step_result import StepResult
from gradfit.arguments import read_callable, read_instance, read_mapping
from gradfit.batches.model_tree import ModelTree, joined
from gradfit.batches.runner import LossFunction
from gradfit.batches.shares import PartShare
from gradfit.batches.snapshot import Snapshot, trials_end
from gradfit.batches.totals import LossTotals, logs_of, means_of
from gradfit.batches.weights import BatchWeights
from gradfit.devices import free_cached_memory
from gradfit.errors import MisuseError, StateError
from gradfit.fitting.batch_rows import BatchRows
from gradfit.fitting.cut_warning import warn_about_cutting
from gradfit.fitting.grouped_step import GroupedStep
from gradfit.fitting.measured_models import MeasuredModels
from gradfit.fitting.plan_state import read_plan, write_plan
from gradfit.fitting.planner import Planner
from gradfit.fitting.recovery import Recovery
from gradfit.fitting.tensor_copies import CopyLayout
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.fitting.trained_optimizer import count_step
from gradfit.fitting.update_rollback import UpdateSnapshot
from gradfit.fitting.weighed_parts import WeighedParts
from gradfit.interrupts import uninterrupted
from gradfit.not_copied import NotCopied
from gradfit.planning.plan import Plan
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import Meter
from gradfit.profiling.profile import Profile
from gradfit.recompute.evict import Evictor
from gradfit.tree import leaves, size_of_batch

_VERSION = 1  # of the state's format
_NOTHING = contextlib.nullcontext()


class TrainResult(NamedTuple):
    """What one step did."""

    loss: float
    """The mean over all items of the batch."""
    stepped: bool
    """Whether the optimizer was stepped; `bool(result)` says the same."""
    grad_norm: float | None
    """Norm of the whole batch's gradient, before clipping; None if it was not computed."""
    peak_bytes: int
    """Of all tensors, measured: in this step if it is one of the first two with its plan or its
    batch is larger than those were, else the largest that was measured with its plan.
    """
    micro_batches: int
    """How many parts the batch was run in."""
    weight: int | float
    """Items of the batch: what the gradients were divided by."""
    reason: str
    """"stepped", or why not, as in `StepResult`."""
    attempts: int
    """More than 1 if memory ran out and the step was repeated with a tighter plan."""
    logs: Mapping[str, float] = {}
    """What `loss_fn` returned to be logged, each the mean over all items of the batch; of counts,
    which were measured to add up over parts, the sum.
    """
    online: str = ""
    """Why some micro-batches of this step did not follow a plan, and which operation differed;
    empty if all did.
    """

    def __bool__(self) -> bool:
        return self.stepped


class Progress(NamedTuple):
    """How far a step has come, between two of its micro-batches; with the accumulator's state it
    can go on.
    """

    done: int
    """Micro-batches that are accumulated."""
    micro_batch: int
    total: float
    items: float
    logs: Mapping[str, float] = {}
    """What was returned to be logged so far, times its items."""
    window: Mapping[str, Any] | None = None
    """The accumulator's `state_dict()`, which whoever saves this puts here."""
    buffers: Mapping[str, torch.Tensor] = {}
    """Running statistics as they were when the step began."""


AfterMicroBatch = Callable[[Progress], object]


class _Call(NamedTuple):
    """One call of a step."""

    batch: Any
    rows: BatchRows
    before: Snapshot
    progress: Progress | None
    after: AfterMicroBatch | None

    @property
    def first(self) -> int:
        """Position of the part that is run first."""
        return 0 if self.progress is None else self.progress.done


class TrainStep(NotCopied):
    """The step that `fit` returns: call it with a batch. `plan`, `profile` and `budget_bytes` say
    what it follows.

    Args:
        model: the model that is trained.
        optimizer: its optimizer, unwrapped.
        loss_fn: `loss_fn(model, batch)`, as `fit` takes it.
        accumulator: adds up the parts' gradients and steps the optimizer.
        planner: makes plans for batches of other shapes.
        tested: the plan for the sample, tried out.
        given: the optimizer as it was handed to `fit`, if another library has wrapped it.
    """

    _instead_of_copy = "Call fit() for the copied model, with known=step.known."

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: LossFunction,
        accumulator: BareAccumulator,
        planner: Planner,
        tested: TestedPlan,
        *,
        given: Any = None,
    ) -> None:
        # the optimizer as it was given to `fit`, perhaps inside of another library's wrapper
        self._given = given
        self.model, self.optimizer, self.accumulator = model, optimizer, accumulator
        self._planner, self._tested = planner, tested
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._recovery = Recovery(planner, accumulator.trial)
        self._changing: UpdateSnapshot | None = None  # while the optimizer steps
        self._passes_bytes = 0  # the peak of the last measured step before its update
        self._grouped: GroupedStep | None = None  # the last step that was run in groups
        self._copy_layout = CopyLayout()  # of what the optimizer changes
        self._tree = ModelTree(model)
        self._parameters = self._tree.parameters
        self._measured_models = MeasuredModels(self._tree, planner)
        self._turn = threading.Lock()
        self._thread: int | None = None  # which has it

    @property
    def plan(self) -> Plan:
        return self._planner.described(self._tested)

    @property
    def profile(self) -> Profile:
        return self._tested.profile

    @property
    def budget_bytes(self) -> int:
        return self._planner.step.budget_bytes

    @property
    def known(self) -> tuple[TestedPlan, ...]:
        """Every plan made so far, by input shape; `fit(..., known=step.known)` starts from them.
        What was still compared is not any more: who starts from them adds in the same order.
        """
        self._settle()
        return self._planner.known

    def _settle(self) -> None:
        """Stay with the plans that are the fastest so far."""
        shape = self._tested.shape
        self._planner.settle()
        same = (tested for tested in self._planner.known if tested.shape == shape)
        self._tested = next(same, self._tested)

    def state_dict(self) -> dict[str, Any]:
        """The plans, with what was measured of them, and the window: text, numbers and tensors, no
        objects.

        It goes beside the model's and the optimizer's own: `torch.save` and default `torch.load`
        take it, and between two steps `json.dumps` does. A run that is resumed with it adds in the
        same order as one that was not stopped.
        """
        return {
            "version": _VERSION,
            "plans": [write_plan(tested, lambda record: record.to_json()) for tested in self.known],
            "accumulator": self.accumulator.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the plans and the window of `state_dict()`; batches of their shapes are not
        profiled again.

        Args:
            state: what `state_dict()` returned, perhaps in another process.

        Raises:
            StateError: it is something else, or damaged; nothing is changed.
        """
        read_mapping(state, "state", "what step.state_dict() gave")
        plans, window = _read_state(state)
        self.accumulator.load_state_dict(window)
        self._planner.take_up(plans)
        same = (tested for tested in self.known if tested.shape == self._tested.shape)
        self._tested = next(same, self._tested)

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

        The step owns its window. Gradients that other passes have left in `.grad` (an audit's, a
        generator's, one of your own) are no part of it, and are cleared first, as by
        `optimizer.zero_grad()`. Calls from several threads wait for each other.

        Args:
            batch: any number of rows; of the kind that `fit` was given. On one of several ranks it
                may have none: that is `idle()`.
            progress: goes on with a step that was ended by `after_micro_batch`: the same batch, the
                generators as they were then.
            after_micro_batch: called between two micro-batches; what it raises ends the step, with
                nothing changed.

        Raises:
            MisuseError: the model is in evaluation mode, or what this batch's loss was divided by
                does not go together with what was measured of the loss. Nothing is changed.
        """
        if progress is not None:
            read_instance(progress, "progress", Progress, "what after_micro_batch was given")
        if after_micro_batch is not None:
            read_callable(
                after_micro_batch, "after_micro_batch", "a function of a Progress", arguments=1
            )
        if self._thread == threading.get_ident():
            raise MisuseError(
                "step(batch) was called inside of step(batch), by the loss function or a hook,"
                " where the update before it has not happened. Call it after that has returned."
            )
        with self._turn:
            try:
                self._thread = threading.get_ident()
                return self._in_turn(batch, progress, after_micro_batch)
            finally:
                self._thread = None

    def _in_turn(
        self, batch: Any, progress: Progress | None, after_micro_batch: AfterMicroBatch | None
    ) -> TrainResult:
        if not self.model.training:
            raise MisuseError(
                "The model is in evaluation mode. Call model.train() before step(batch)."
            )
        planner = self._planner
        if self._may_be_idle(batch):
            return self.idle()
        begun = planner.time.begin_step()
        try:
            return self._run(batch, planner.rows.begin_step(batch), progress, after_micro_batch)
        finally:
            planner.rows.end_step()
            planner.time.end_step(begun)

    def _may_be_idle(self, batch: Any) -> bool:
        """Whether the batch has no rows, and other ranks may have some."""
        if self.accumulator.ranks.size == 1 or self._planner.step.runner.split is not None:
            return False
        return size_of_batch(batch) == 0

    def _run(
        self,
        batch: Any,
        rows: BatchRows,
        progress: Progress | None,
        after_micro_batch: AfterMicroBatch | None,
    ) -> TrainResult:
        """Attempt by attempt, until the step has happened as a whole."""
        tensors = self._tensors()
        self._require_trained()
        clear_gradients(self.model, tensors)
        is_whole = progress is None and after_micro_batch is None
        if not is_whole:  # whoever goes on with it goes on with its micro-batches
            self._settle()
        tested = self._tested = self._find_plan(batch, self._planner.rows_at_most(rows))
        is_timed = is_whole and tested.seen and self._planner.is_compared(tested)
        started = seconds_now() if is_timed else 0.0
        before = self._snapshot()
        if after_micro_batch is not None:
            self._buffers = before.buffers if progress is None else progress.buffers
        call = _Call(batch, rows, before, progress, after_micro_batch)

        def attempt(tested: TestedPlan, number: int) -> TrainResult:
            self._tested, self._changing = tested, None
            with self._open_window(before.tensors):
                return self._attempt(call, tested, number)

        def take_back() -> bool:
            return self._take_back(before)

        with self._planner.reserved.capped(
            self.budget_bytes,
            batch,
            lambda: (self.model, self.optimizer, before.buffers),
            final=tested.seen,
        ):
            result = self._recovery.repeat(
                tested, batch, attempt, take_back, self.accumulator.ranks.failed
            )
        if result.attempts > 1:
            self._planner.settle(self._tested)
        elif is_timed:
            self._tested = self._planner.took(tested, batch, seconds_now() - started)
        return result

    def _require_trained(self) -> None:
        """Refuse a model whose parameters were replaced since: the optimizer would train those that
        are gone.
        """
        now = self._tree.parameters
        if now is self._parameters:
            return
        trained, before = self.accumulator.window.ids, set(map(id, self._parameters))
        gone = (trained & before) - set(map(id, now))
        new = _trained_outside_of(trained | before, self.model)
        if gone and new:
            raise MisuseError(
                f"The model has new parameters ({new[0]!r} for one) in the place of those that the"
                " optimizer holds, as load_state_dict(assign=True) puts them in, so nothing was"
                " run. Call gf.fit again with an optimizer over the new parameters, or load before"
                " fit, or without assign=True."
            )
        self._parameters = now

    def _find_plan(self, batch: Any, rows: int) -> TestedPlan:
        """The plan that serves the batch; one of a new shape, or one that would cut it where the
        model is not the one that was measured, is profiled and tried out.
        """
        tested = self._planner.serving(batch, rows)
        if tested is not None and (
            tested.plan.micro_batch >= rows or self._measured_models.has_plans_of_this()
        ):
            return tested
        is_changed = tested is not None
        with trials_end(), self.accumulator.trial():
            tested = self._planner.tested_plan(batch, rows)
        self._tree.renew()  # a first forward may make modules
        self._measured_models.are_measured()
        if is_changed:
            warn_about_cutting(
                tested, self._planner.loss.additivity, exact=self._planner.step.exact
            )
        return tested

    def _snapshot(self) -> Snapshot:
        """What to go back to; copying the buffers may be what there is no memory for, until the
        cache is given back.
        """
        try:
            return Snapshot(self.model, self.accumulator.window.tensors, tree=self._tree)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_cached_memory()
        return Snapshot(self.model, self.accumulator.window.tensors, tree=self._tree)

    def _tensors(self) -> list[torch.Tensor]:
        """All that a backward pass of the model may leave a gradient in."""
        self._tree.renew()
        return joined(self._tree.parameters, self.accumulator.window.tensors)

    def _take_back(self, before: Snapshot) -> bool:
        """Make everything as it was before the attempt; False if the optimizer has stepped: then it
        has happened.
        """
        with uninterrupted():
            if self._grouped is not None:
                self._grouped.close()
            if self._changing is not None:
                if self._changing.done:
                    before.restore_settings()
                    return False
                self._changing.undo()
            self.accumulator.reset()
            before.restore()
        return True

    def idle(self) -> TrainResult:
        """Take part in a step for which this rank has no rows."""
        share = self._share_of_sum()
        with self._open_window(self._tensors()):
            self.accumulator.window.state.main.weight += share
            closed = self._close_window(LossTotals(items=share))
        return self._train_result(*closed, self._tested.peak_bytes)

    def _share_of_sum(self) -> float:
        """What a rank without rows weighs: of sums the weights of all ranks together are 1."""
        ranks, additivity = self.accumulator.ranks.size, self._planner.loss.additivity
        is_sum = ranks > 1 and additivity is not None and additivity.over == "sum"
        return 1 / ranks if is_sum else 0.0

    @contextlib.contextmanager
    def _open_window(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Only inside do DDP and FSDP2 wait with their communication, and is a step of the
        optimizer the window's.
        """
        window = self.accumulator.window
        window.enabled = True
        try:
            yield
            # of what the optimizer does not hold: they would pile up
            clear_gradients(self.model, tensors)
        finally:
            window.enabled = False

    def _close_window(self, totals: LossTotals) -> tuple[StepResult, float, Mapping[str, float]]:
        """Update; with the mean loss and logs over all processes."""
        window = self.accumulator.window
        is_read = window.unread is None and window.read_late is None
        if is_read:
            window.notes = totals.read()
        result = self.accumulator.flush()
        if result.stepped and self._given is not self.optimizer:
            count_step(self._given)
        notes = self.accumulator.notes if is_read else totals.read()
        return (result, *means_of(notes, self._summed_logs))

    @property
    def _summed_logs(self) -> tuple[str, ...]:
        """Logs that are counts."""
        additivity = self._planner.loss.additivity
        return () if additivity is None else additivity.summed_logs

    def _attempt(self, call: _Call, tested: TestedPlan, attempt: int) -> TrainResult:
        batch_bytes = sum(tensor.nbytes for tensor in leaves(call.batch))
        if not self._planner.must_be_measured(tested, batch_bytes):
            return self._update(call, tested, attempt, tested.peak_bytes)
        held_bytes = self._planner.optimizer_bytes()
        watching = self._meter_for(tested)
        watching.watch(self.model, self.optimizer, call.batch)
        with watching as live:
            result = self._update(call, tested, attempt, live)
        self._tested = self._planner.stepped(
            self._tested,
            _largest_peak(tested, live),
            self._recovery.saved_bytes,
            held_bytes=held_bytes,
            seen_bytes=max(batch_bytes, tested.seen_bytes),
            passes_bytes=self._passes_bytes,
        )
        return result

    def _meter_for(self, tested: TestedPlan) -> Meter:
        """What arithmetic has found may not even begin to pass the budget."""
        device = self._planner.step.device
        if tested.by_size:
            return Evictor(self._planner.step.limit_bytes, device=device)
        return Meter(device=device)

    def _update(
        self, call: _Call, tested: TestedPlan, attempt: int, peak: int | Meter
    ) -> TrainResult:
        """All passes and the update; `peak` is what was measured before, or measures it now."""
        totals, weighed = self._run_parts(call, tested)
        self._passes_bytes = peak.peak_bytes if isinstance(peak, Meter) else 0
        self._changing = UpdateSnapshot(
            call.before.tensors, self.optimizer, taken=tested.copied, layout=self._copy_layout
        )
        alone = self.accumulator.ranks.size == 1  # else it may have to wait for another rank
        # Without a copy to go back to, the optimizer is not interrupted.
        with (
            uninterrupted() if alone and not tested.copied else _NOTHING,
            self._changing,
        ):
            self._read_or_launch(weighed, tested)
            with self._stepping_in_groups(tested.plan.update_groups):
                closed = self._close_window(totals)
        peak_bytes = _peak_in_step(tested, peak) if isinstance(peak, Meter) else peak
        return self._train_result(
            *closed, peak_bytes, attempts=attempt, online=self._recovery.online
        )

    def _stepping_in_groups(self, groups: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Where the plan says so, the optimizer updates its parameters in these groups."""
        if not groups:
            return _NOTHING
        self._grouped = GroupedStep(self.optimizer, groups)
        return self._grouped

    def _read_or_launch(self, weighed: WeighedParts, tested: TestedPlan) -> None:
        """Read what is still on an accelerator; or, where the update can be taken back, let it be
        launched before, so that the device does not wait for the host: then what is read after it
        decides whether it has happened.
        """
        if tested.copied and weighed.is_late and self.accumulator.may_step_unread():
            self.accumulator.window.unread = weighed.unread()
        if weighed.is_late and self.accumulator.is_scaled:
            self.accumulator.window.read_late = weighed.weigh_with
        elif self.accumulator.window.unread is None:
            weighed.weigh()

    def _train_result(
        self,
        result: StepResult,
        loss: float,
        logs: Mapping[str, float],
        peak_bytes: int,
        *,
        attempts: int = 1,
        online: str = "",
    ) -> TrainResult:
        return TrainResult(
            loss=loss,
            stepped=result.stepped,
            grad_norm=result.grad_norm,
            peak_bytes=peak_bytes + self._planner.step.reserved_bytes,
            micro_batches=result.micro_batches,
            weight=result.weight,
            reason=result.reason,
            attempts=attempts,
            logs=logs,
            online=online,
        )

    def _run_parts(self, call: _Call, tested: TestedPlan) -> tuple[LossTotals, WeighedParts]:
        """Both passes of each micro-batch, into the window; with their weights, which may still be
        on an accelerator.
        """
        parts, first = call.rows.parts(tested.plan.micro_batch), call.first
        self.accumulator.accumulation_count = len(parts)
        shares = self._recovery.count(tested, parts, call.before, first)
        totals = self._begin_totals(call.progress, tested.plan)
        weighed = WeighedParts(
            self.accumulator,
            call.rows,
            parts,
            first,
            partial(self._weights_of, shares=shares),
            totals,
            may_wait=call.after is None and shares is None and not self._recovery.reads_each,
        )
        for part in parts[first:]:
            place = part.position
            if call.after is not None and place > first:
                self._pause(call.after, place, tested.plan.micro_batch, totals)
            backward = partial(weighed.backward, position=place)
            self._recovery.run(tested, part, call.batch, backward)
        return totals, weighed

    def _weights_of(self, rows: int, shares: Sequence[PartShare] | None) -> BatchWeights:
        return BatchWeights(
            self._planner.loss.additivity,
            rows,
            ranks=self.accumulator.ranks.size,
            exact=self._planner.step.exact,
            shares=shares,
            may_repeat=shares is None,
        )

    def _pause(self, after: AfterMicroBatch, position: int, size: int, totals: LossTotals) -> None:
        """Tell how far the step has come."""
        sums = totals.read()
        reached = Progress(
            position, size, sums["loss"], sums["items"], logs_of(sums), buffers=self._buffers
        )
        with unseen():  # what a save copies is not the step's memory
            after(reached)

    def _begin_totals(self, progress: Progress | None, plan: Plan) -> LossTotals:
        if progress is None:
            return LossTotals(summed=self._summed_logs)
        return self._go_on(progress, plan)

    def _go_on(self, progress: Progress, plan: Plan) -> LossTotals:
        """Take up a window that was left in the middle."""
        if progress.micro_batch != plan.micro_batch:
            raise StateError(
                f"The step was left at micro-batches of {progress.micro_batch} rows, the plan has"
                f" {plan.micro_batch}. Pass fit(..., known=) the plans it was begun with."
            )
        if progress.window is not None:
            self.accumulator.load_state_dict(progress.window)
        return LossTotals(progress.total, progress.items, progress.logs, self._summed_logs)


def clear_gradients(model: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """A step's gradients are those of its batch alone, and its budget has no room for others."""
    if not have_no_gradient(tensors):
        drop_gradients(model)
        for tensor in tensors:
            tensor.grad = None


def _read_state(state: Mapping[str, Any]) -> tuple[list[TestedPlan], Any]:
    """The plans of a state, and the window's own."""
    try:
        version, plans, window = (
            state["version"],
            [read_plan(one) for one in state["plans"]],
            state["accumulator"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"This is not the state of a step ({error!r}). Pass what step.state_dict() gave."
        ) from None
    if version != _VERSION:
        raise StateError(
            f"This state of a step has format {version!r}, not {_VERSION}. Call fit again"
            " without it."
        )
    return plans, window


def _trained_outside_of(ids: set[int], model: torch.nn.Module) -> list[str]:
    """Names of trained parameters that are none of these."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, parameter in trained if id(parameter) not in ids]


def _peak_in_step(tested: TestedPlan, live: Meter) -> int:
    return max(live.peak_bytes, tested.reserved_bytes)


def _largest_peak(tested: TestedPlan, live: Meter) -> int:
    """Of this step, and of those before with its plan."""
    peak = _peak_in_step(tested, live)
    return max(peak, tested.peak_bytes) if tested.seen else peak
