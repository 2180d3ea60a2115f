"""The accumulator: any optimizer, any micro-batches, one exact update per window."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate import accumulator_options as options
from gradfit.accumulate import accumulator_state as state
from gradfit.accumulate.accumulation_context import AccumulationContext
from gradfit.accumulate.auto_weight import WindowCoefficients, read_auto_weight
from gradfit.accumulate.counted_micro_batches import end_micro_batch, end_settled_micro_batch
from gradfit.accumulate.identities import without
from gradfit.accumulate.loss_arguments import check_loss, read_weight
from gradfit.accumulate.optimizer_access import AnyOptimizer
from gradfit.accumulate.plain_admission import finalise_by_itself
from gradfit.accumulate.processes import SingleProcess
from gradfit.accumulate.single_pass import SinglePass
from gradfit.accumulate.step_result import StepResult
from gradfit.accumulate.strategy import FixedStepCount, Strategy
from gradfit.accumulate.update import Update
from gradfit.accumulate.weighted_backward import Backpropagator
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_begin import begin, notice_use
from gradfit.accumulate.window_end import finalise
from gradfit.accumulate.window_marks import require_usable
from gradfit.accumulate.window_members import follow_optimizer, register_all
from gradfit.accumulate.window_state import Phase
from gradfit.arguments import Number, read_callable, read_choice, read_count, read_flag
from gradfit.errors import MisuseError
from gradfit.not_copied import NotCopied


class GradientAccumulator(NotCopied):
    """Makes many micro-batches one update, equal to that of the full batch, whatever their sizes.

    A mean of means is not the mean: `weight` says how many items each loss is about, and the
    window's gradient is the sum of all items' gradients over the number of all items. Nothing is
    looked at ahead of time, the last window may be partial (`flush`), and clipping, loss scaling
    and the non-finite check happen once per window in their right order.

    Args:
        optimizer: stepped at the end of each window, with gradients that are the mean over all
            items; its parameters are those that accumulate. None: the update is the caller's. A
            whole number is taken for `steps`.
        steps: micro-batches in one window, that is in one update; 1 by default.
        parameters: the tensors that accumulate, if not all of the optimizer's.
        strategy: says when a window is full, in the place of `steps`.
        dtype: the type in which gradients add up, `torch.float32` for bfloat16 parameters for one;
            None: that of the parameters.
        scaler: a `torch.amp.GradScaler` or a `LossScaler`: unscales, skips and updates once per
            window.
        clip: the largest norm of the window's gradient, or a `GradientClipper`; None does not clip.
        on_nonfinite: what a NaN or an infinity does: "raise" stops with the window as it is, "skip"
            leaves the window out, or with `isolate` the micro-batch.
        isolate: hold each micro-batch's gradients apart until it is complete, so that one that
            fails can be taken back; takes one more set of gradients.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> acc = GradientAccumulator(optimizer, steps=2)
    >>> for micro in (torch.randn(5, 3), torch.randn(2, 3), torch.randn(4, 3)):
    ...     acc.backward(model(micro).mean(), weight=len(micro))
    ...     print(acc.step().reason)
    accumulating
    stepped
    accumulating
    >>> acc.flush().weight
    4
    """

    _instead_of_copy = (
        "Make one for the copied parameters; its load_state_dict() takes this state_dict()."
    )

    _window_kind: type[Window] = AccumulationContext

    def __init__(
        self,
        optimizer: AnyOptimizer | int | None = None,
        steps: int = 1,
        *,
        parameters: Iterable[Tensor] | None = None,
        strategy: Strategy | None = None,
        dtype: torch.dtype | None = None,
        scaler: Any = None,
        clip: Any = None,
        on_nonfinite: str = "raise",
        isolate: bool = False,
    ) -> None:
        stepper, steps = options.read_optimizer_or_steps(optimizer, steps)
        options.check(stepper, steps, strategy, dtype, scaler, clip, on_nonfinite, isolate)
        self._optimizer: AnyOptimizer | None = stepper
        self._scaler, self._dtype = scaler, dtype
        tensors = options.choose_parameters(stepper, parameters)
        self.window = self._window_kind(
            steps, strategy=strategy, optimizer=stepper, scaler=scaler, dtype=dtype
        )
        skip = on_nonfinite == "skip"
        self._coefficients = WindowCoefficients()
        self._passes = Backpropagator(
            self.window, scaler=scaler, dtype=dtype, isolate=isolate, skip_nonfinite=skip
        )
        self._update = Update(
            self.window,
            stepper,
            scaler=scaler,
            clip=clip,
            skip_nonfinite=skip,
            widens=dtype is not None,
        )
        self._closed = False
        if tensors is not None:
            register_all(self.window, tensors, "optimizer" if parameters is None else "parameters")
        self.window.follows_optimizer = parameters is None and stepper is not None

    # -- state ------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> AnyOptimizer | None:
        """Steps when the window is full; None if that is the caller's business."""
        return self._optimizer

    @property
    def scaler(self) -> Any:
        """Scales the losses; None if nobody does."""
        return self._scaler

    @property
    def dtype(self) -> torch.dtype | None:
        """What the gradients add up in, if it is wider than the parameters' own type."""
        return self._dtype

    @property
    def accumulation_count(self) -> int:
        """How many micro-batches make one update; settable between two windows."""
        return self.window.target_steps

    @accumulation_count.setter
    def accumulation_count(self, steps: int) -> None:
        now = self.window.strategy
        is_same = type(now) is FixedStepCount and type(steps) is int and now.steps == steps
        new = now if is_same else FixedStepCount(read_count(steps, "accumulation_count"))
        self.window.require_outside_micro_batch("accumulation_count")
        if self.window.accumulation_steps:
            raise MisuseError(
                f"accumulation_count={steps} in the middle of a window ({self.current_step} of "
                f"{self.accumulation_count}). Call flush() or reset() first."
            )
        self.window.strategy = new

    @property
    def current_step(self) -> int:
        """How many micro-batches the open window holds, skipped ones included."""
        notice_use(self.window)
        return self.window.accumulation_steps

    @property
    def is_full(self) -> bool:
        """Whether the window holds enough; looking changes nothing."""
        notice_use(self.window)
        return self.window.is_full if self.enabled else bool(self.window.tensors)

    @property
    def is_ready(self) -> bool:
        """Whether the window is full; reading it then makes the gradients final, for an optimizer
        stepped by hand.
        """
        return self.window.is_ready if self.enabled else bool(self.window.tensors)

    @property
    def windows(self) -> int:
        """How many windows are over, stepped or dropped."""
        notice_use(self.window)
        return self.window.state.updates

    @property
    def progress(self) -> float:
        """How full the window is, from 0 to 1."""
        return (
            self.window.strategy.progress(self.current_step, self.window.weight)
            if self.current_step
            else 0.0
        )

    @property
    def enabled(self) -> bool:
        """False: as if there were no accumulator. Nothing is counted or scaled, and every `step()`
        steps.
        """
        return self.window.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._require_open()
        self.window.require_outside_micro_batch("enabled")
        if read_flag(value, "enabled") != self.enabled and self.window.accumulation_steps:
            raise MisuseError(
                f"enabled={value!r} in the middle of a window. Call flush() or reset() first."
            )
        self.window.settled = self.window.next_way = None
        self.window.enabled = value

    def __repr__(self) -> str:
        return (
            f"GradientAccumulator(steps={self.accumulation_count},"
            f" current_step={self.current_step}, parameters={len(self.window.tensors)})"
        )

    @property
    def ranks(self) -> SingleProcess:
        """Who fills a window: this process alone, or a group of them."""
        return self.window.ranks

    @property
    def notes(self) -> dict[str, float]:
        """What `window.notes` held at the end of the last window, added up over all processes."""
        return self._update.notes

    def close(self) -> None:
        """Let all parameters go, for good. What is in an open window goes with it: call `flush()`
        before.

        `with GradientAccumulator(…) as accumulator:` does it at the end of the block.
        """
        if not self._closed:
            self.disable_accumulation()
            self._closed = True

    dispose = close

    def __enter__(self) -> GradientAccumulator:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise MisuseError(
                "This accumulator is closed. Make another one: GradientAccumulator(optimizer,"
                " steps=4)."
            )

    # -- membership -------------------------------------------------------------------------------

    def enable_accumulation(self, parameters: Iterable[Tensor]) -> None:
        """Accumulate into these parameters too; those that are there already stay.

        Args:
            parameters: leaf tensors of floating point type; with an optimizer, some of its own.
        """
        self._require_open()
        tensors = options.read_parameters(parameters)
        if self.optimizer is not None:
            options.require_members(self.optimizer, tensors)
        self.window.require_outside_micro_batch("enable_accumulation()")
        register_all(self.window, without(tensors, self.window.ids), "parameters")
        self.window.follows_optimizer = False
        self.window.enabled = True

    def disable_accumulation(self) -> None:
        """Let all parameters go, until `enable_accumulation`; an open window is dropped, its
        gradients with it.
        """
        self.window.reset()
        self.window.close()
        self.window.follows_optimizer = False
        self.window.enabled = False

    # -- backward ---------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor | None = None,
        weight: Number | Tensor | str = 1,
        reduction: str = "mean",
        *,
        terms: Mapping[str, tuple[Tensor, Number | Tensor]] | None = None,
    ) -> None:
        """Backpropagate one micro-batch's loss: the mean over `weight` items, or their sum
        (`reduction="sum"`).

        `terms` are several losses of one forward pass, each a sum with its own number of items,
        each normalised by its own total over the window. A weight of 0 contributes nothing, even if
        the loss is NaN. `weight="auto"` reads from the loss's graph what it was divided by: the
        targets that a cross-entropy did not ignore, for one.

        Args:
            loss: a tensor of one element, the mean (or the sum) over `weight` items. None if there
                are `terms`.
            weight: how many items the loss is about, 1 by default: a number, a tensor of one
                element, or "auto".
            reduction: "mean" or "sum": what the loss is of its items.
            terms: `{name: (loss_sum, count)}`, in the place of `loss` and `weight`.
        """
        way = self.window.settled or self.window.next_way
        if way is not None and terms is None and self._backward_usual(loss, weight, reduction):
            return
        coefficients: tuple[float, ...] = ()
        if isinstance(weight, str):
            weight, coefficients = read_auto_weight(weight, loss, reduction)
        if terms is not None:
            self._backward_terms(options.read_terms(terms, loss, weight, reduction))
        else:
            self._backward_one(loss, weight, reduction, coefficients)

    def _backward_usual(self, loss: Any, weight: Any, reduction: str) -> bool:
        """The short way; False if anything about this pass, or its window, is not usual."""
        if type(weight) is not int or not 0 < weight < _USUAL_WEIGHT or reduction != "mean":
            return False
        if type(loss) is not Tensor or not loss.requires_grad:
            return False
        window = self.window
        with window.turn:
            way = window.settled or window.next_way
            return way is not None and way.backward(window, loss, weight)

    def _backward_one(
        self,
        loss: Tensor | None,
        weight: Number | Tensor,
        reduction: str,
        coefficients: tuple[float, ...],
    ) -> None:
        read_choice(reduction, "reduction", ("mean", "sum"))
        number = read_weight(weight)
        loss = check_loss(loss) if number else loss
        if not self.window.enabled:
            self._require_open()
            if loss is not None:
                _plain_backward(self.scaler, loss)
            return
        with self.window.turn:
            self._begin()
            self._coefficients.require_same(coefficients, self.window.state)
            self._passes.backward(loss, number, reduction)
            finalise_by_itself(self.window)

    def _backward_terms(self, terms: dict[str, tuple[Tensor, Number]]) -> None:
        if not self.window.enabled:
            self._require_open()
            means = [loss / number for loss, number in terms.values() if number]
            if means:
                _plain_backward(self.scaler, torch.stack(means).sum())
            return
        with self.window.turn:
            self._begin()
            self._passes.backward_terms(terms)

    def _begin(self) -> None:
        if not self.window.tensors:
            raise MisuseError(_NO_PARAMETERS)
        self._update.narrow_again()
        begin(self.window)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Passes inside are trials: they do not count, and nobody communicates their gradients."""
        enabled, self.enabled = self.enabled, False
        try:
            with self.ranks.trial():
                yield
        except Exception as error:
            self.ranks.failed(error)
            raise
        finally:
            self.window.plain.abandon()  # trials that died half-way
            self.enabled = enabled

    rehearsal = trial  # as it was called in 0.1

    # -- transactions -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro_batch(self, weight: Number | Tensor | None = None) -> Iterator[None]:
        """Everything inside is one micro-batch, and comes in whole or not at all.

        An exception (out of memory, too) leaves the window as it was, bit for bit, and goes on to
        the caller; a NaN or an infinity does the same quietly under `on_nonfinite="skip"` or a loss
        scaler. Needs `isolate=True` or a `dtype`, since the micro-batch's gradients are held apart
        from the sums. Without `weight`, the backwards inside say it.

        Args:
            weight: how many items the micro-batch is about; None: the backwards inside say it.
        """
        if not self._passes.can_take_back:
            raise MisuseError(
                "micro_batch needs gradients of its own to be able to take them back. Pass"
                " isolate=True or dtype=…."
            )
        number = None if weight is None else read_weight(weight)
        if not self.enabled:
            self._require_open()
            yield
            return
        with self.window.turn:
            self._require_no_micro_batch()
            self._begin()
            with self._passes.transact(number, block=True):
                yield

    def _require_no_micro_batch(self) -> None:
        if self.window.transaction is not None:
            raise MisuseError(
                "micro_batch inside micro_batch: a micro-batch is one thing. Leave the inner"
                " one out."
            )

    # -- ending a window --------------------------------------------------------------------------

    def step(self) -> StepResult:
        """End a micro-batch; when the window is full, normalise, clip, step and clear. True if it
        really stepped.
        """
        window = self.window
        if not window.enabled:
            self._require_open()
            return self._update.finish()
        if not window.tensors:
            raise MisuseError(_NO_PARAMETERS)
        if window.settled is not None and window.turn.acquire(blocking=False):
            try:
                full = end_settled_micro_batch(window)
                if full is False:
                    return self._accumulating()
                if full:
                    return self._finish_settled()
            finally:
                window.turn.release()
        return self._step_unsettled()

    def _step_unsettled(self) -> StepResult:
        """The long way: everything is asked."""
        window = self.window
        with window.alone("step()"):
            self._require_intact_unless_met()
            follow_optimizer(window)
            return self._update.finish() if end_micro_batch(window) else self._accumulating()

    def _require_intact_unless_met(self) -> None:
        """Several processes learn from their meeting that one's window is broken."""
        if self.window.ranks.size == 1:
            self.window.require_intact()

    def _accumulating(self) -> StepResult:
        window, state = self.window, self.window.state
        taken = state.micro_batches - state.skipped
        return StepResult(False, "accumulating", None, window.weight, taken, state.skipped)

    def _finish_settled(self) -> StepResult:
        """Update with a full window that is as its last pass left it: there is nothing more to
        ask.
        """
        window = self.window
        way, window.settled = window.settled, None
        window.set_apart("step()")
        try:
            result = self._update.finish()
        finally:
            window.apart = None
        if way is not None and result.stepped:
            way.end_window(window)
        return result

    def flush(self) -> StepResult:
        """Update with what there is: the partial last window, divided by what it really holds.

        Over several processes, `flush` says that this one has no more data: it takes part in the
        windows of those that have, until all of them flush. Call it on each, once, also where there
        was nothing to accumulate.
        """
        window = self.window
        self._require_open()
        with window.alone("flush()"):
            self._require_intact_unless_met()
            if not window.accumulation_steps and (window.ranks.size == 1 or not self.enabled):
                return StepResult(False, "empty window", None, 0, 0, 0)
            follow_optimizer(window)
            if window.state.phase is Phase.FILLING:
                require_usable(window, may_be_cleared=False)
            return self._finish_until_all_flush()

    def may_step_unread(self) -> bool:
        """Whether an update can be launched before its numbers are read, by who can take it back.

        For `fit`'s steps, which have a copy of what the optimizer changes.
        """
        return self._update.may_step_unread()

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def clips_by_norm(self) -> bool:
        """Whether an update clips by the norm of all gradients."""
        return self._update.max_norm is not None

    def _finish_until_all_flush(self) -> StepResult:
        result = self._update.finish(flushing=True)
        while not self._update.all_flushing:
            later = self._update.finish(flushing=True, joined=True)
            result = later if result.reason == "empty window" else result
        return result

    def reset(self) -> None:
        """Drop the open window, its gradients included, without an update."""
        with self.window.alone_after_failure("reset()"):
            self._update.narrow_again()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            self._update.forget_unscaled()
            self.window.drop()

    def reset_gradients(self) -> None:
        """Drop the open window and its gradients: `reset`, under the name it has beside
        `apply_gradients`.
        """
        self.reset()

    def apply_gradients(self, fn: Callable[[Tensor], Any]) -> None:
        """Call `fn(parameter)` for each parameter with a gradient, once it is the mean over the
        window.

        For updates written by hand. The gradients stay until `reset_gradients()` or the next window
        begins.

        Args:
            fn: called as `fn(parameter)`; `parameter.grad` is the mean over the window's items.
        """
        read_callable(fn, "fn", "a function of one parameter", arguments=1)
        window = self.window
        with window.alone("apply_gradients()"):
            window.require_intact()
            follow_optimizer(window)
            self._require_full()
            finalise(window)
            window.in_doubt = True  # half of the parameters may be updated when `fn` fails
            for tensor in filter(_has_gradient, window.tensors):
                fn(tensor)
            window.state.applied, window.in_doubt = True, False

    def _require_full(self) -> None:
        if not self.window.is_full and not self.window.is_final:
            raise MisuseError(
                f"The window holds {self.current_step} of {self.accumulation_count}"
                " micro-batches. Call apply_gradients when is_ready, or flush() before it if"
                " this is the last one."
            )

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole window: {"tensors": gradients by name, "window": plain numbers}, for
        safetensors and JSON.

        Over several processes it is the window of all, taken by all together:
        `torch.distributed.checkpoint` can write it, and any number of processes can load it.
        """
        with self.window.alone("state_dict()"):
            follow_optimizer(self.window)
            if not self.ranks.reduces:
                return state.save(self)
            from gradfit.distributed.state import share

            return share(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of the window that `state_dict` was taken in, bit for bit.

        Args:
            state_dict: what `state_dict()` of an accumulator with as many parameters, of the same
                shapes, returned.
        """
        with self.window.alone_after_failure("load_state_dict()"):
            follow_optimizer(self.window)
            if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("window"), str):
                state.load(self, state_dict)
                return
            from gradfit.distributed.state import restore

            restore(self, state_dict)


class BareAccumulator(GradientAccumulator):
    """The same for a step that owns its window: plain `loss.backward()` calls are nobody's
    micro-batches.
    """

    _window_kind = Window

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._single = SinglePass(self.window, self._passes, self._update)

    def backward_one(self, loss: Tensor, weight: Number | Tensor, reduction: str) -> None:
        """As `backward`, in few calls where this pass alone fills the window."""
        if not self._single.backward(loss, weight, reduction):
            self.backward(loss, weight, reduction)

    def flush(self) -> StepResult:
        """As ever, in few calls where one pass has filled the window."""
        result = self._single.finish()
        return super().flush() if result is None else result

    def backward_times(self, times: Tensor, loss: Tensor, weight: Number) -> None:
        """As `backward(times * loss, weight, "sum")`, for a number on the loss's device: its
        gradient begins with that number, so that nothing is multiplied forth and back.
        """
        with self.window.turn:
            self._begin()
            self._passes.backward(loss, weight, "sum", times)
            finalise_by_itself(self.window)


_USUAL_WEIGHT = 2**53  # whole numbers below it need no second look
_NO_PARAMETERS = "There are no parameters. Call enable_accumulation(model.parameters()) first."


def _plain_backward(scaler: Any, loss: Any) -> None:
    (loss if scaler is None else scaler.scale(loss)).backward()


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.grad is not None
