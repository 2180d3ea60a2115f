"""The end of a window: unscale, check, normalise, clip, step, clear, each once and in this
order.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch, _torch_amp
from gradfit.accumulate.counted_micro_batches import close_all
from gradfit.accumulate.gradient_marks import drop_gradients
from gradfit.accumulate.list_writes import ListWrites, is_fused
from gradfit.accumulate.loss_scaling import (
    CarriedScale,
    UpdateScaling,
    make_scale,
    require_no_other_unscaled,
    scale_of,
)
from gradfit.accumulate.marks import belongs_to_another
from gradfit.accumulate.optimizer_access import (
    AnyOptimizer,
    can_be_taken_back,
    full_precision,
    stepper_of,
    watch_steps,
)
from gradfit.accumulate.processes import AllParts
from gradfit.accumulate.scaled_losses import times_unscaled
from gradfit.accumulate.scaling import gradients_of, nonfinite_gradient, scale_gradients
from gradfit.accumulate.step_result import StepResult
from gradfit.accumulate.unread_numbers import UnreadNumbers
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_begin import leave_gradients
from gradfit.accumulate.window_end import combine, finalise, meet
from gradfit.accumulate.window_marks import take_marks_of_tensors
from gradfit.accumulate.window_members import follow_optimizer, look_for_others
from gradfit.accumulate.window_state import Phase
from gradfit.batches.device_numbers import DeviceNumbers
from gradfit.batches.late_weights import ReadEach
from gradfit.errors import MisuseError, NonFiniteGradient
from gradfit.norms import total_norm

_NOTHING = contextlib.nullcontext()
_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class Update:
    """Turns a window into one step of the optimizer, or says why not. All of it needs the window
    for itself.
    """

    def __init__(
        self,
        window: Window,
        optimizer: AnyOptimizer | None,
        *,
        scaler: Any,
        clip: Any,
        skip_nonfinite: bool,
        widens: bool,
    ) -> None:
        self.window, self.optimizer, self.scaler = window, optimizer, scaler
        by_norm = isinstance(clip, int | float)
        self.max_norm, self.clipper = clip if by_norm else None, None if by_norm else clip
        self.skip_nonfinite, self.widens = skip_nonfinite, widens
        self._stepper = stepper_of(optimizer)
        if self._stepper is not None:
            watch_steps(self._stepper, self)
        # what was noted in the last window, added up over all processes
        self.notes: dict[str, float] = {}
        self.all_flushing = True  # in the last window: nobody has more to give
        self.stepping = False
        self._stepped = False  # the optimizer has updated the parameters, as its own hook says
        self._widened: contextlib.ExitStack | None = None
        self._scaling: UpdateScaling | None = None  # of an update that has begun
        # whether the scaler has found what is not finite; None if nobody else has read that
        self._found: bool | None = None

    def finish(self, *, flushing: bool = False, joined: bool = False) -> StepResult:
        """End the window, together with all processes that fill it.

        `flushing`: this one has no more to give; `joined`: it had none to begin with, and only
        keeps up.
        """
        window = self.window
        self.narrow_again()
        scaler = self._enabled_scaler()
        if not window.enabled:
            return self._finish_plain(scaler)
        if scaler is not None:
            require_no_other_unscaled(scaler, self.optimizer)
        close_all(window)
        look_for_others(window)
        whole = meet(
            window,
            flushing=flushing,
            joined=joined,
            scale=scaler.get_scale() if scaler is not None and window.ranks.reduces else 1.0,
        )
        window.require_intact()
        self.all_flushing, self.notes = whole.flushing or window.ranks.size == 1, whole.notes
        weight, skipped, taken = window.weight, whole.skipped, whole.micro_batches
        if not any(whole.weights.values()):
            self.end(None)
            reason = "no weight" if taken or skipped else "empty window"
            return StepResult(False, reason, None, 0, taken, skipped)
        window.ranks.share_options(self.optimizer, whole, joined)
        return self._apply(scaler, whole, StepResult(False, "", None, weight, taken, skipped))

    def _enabled_scaler(self) -> Any:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def _apply(self, scaler: Any, whole: AllParts, result: StepResult) -> StepResult:
        """Unscale, check, normalise and clip the gradients, then step with them."""
        window = self.window
        if window.unread is not None:
            return self._apply_unread(window.unread, result)
        if scaler is not None:
            factor, norm = self._unscale(scaler, whole)
            result = result._replace(weight=window.weight)
        else:
            factor = combine(window)
            norm = self._norm(gradients_of(window.tensors))
        norm *= factor
        if not math.isfinite(norm):
            return self._refuse_nonfinite(scaler, factor, result._replace(grad_norm=norm))
        window.in_doubt = True
        scale_gradients(window.tensors, factor * self._clipping(norm))
        if self.clipper is not None:
            self._clip_or_keep(self.clipper, scaler)
        if self.optimizer is None:
            self._hand_out()
            return result._replace(reason="no optimizer", grad_norm=norm)
        stepped = self.step_or_keep(self.optimizer, scaler, norm)
        self.end(norm * norm)
        return result._replace(stepped=stepped, reason=_reason(stepped, scaler), grad_norm=norm)

    def _apply_unread(self, unread: UnreadNumbers, result: StepResult) -> StepResult:
        """Step first, and then read whether that is right: if not, `unread.read` raises, for who
        takes the step back.
        """
        window, optimizer = self.window, self.optimizer
        assert optimizer is not None
        window.in_doubt = True
        unread.make_mean(gradients_of(window.tensors), self.max_norm)
        stepped = self.step_or_keep(optimizer, None, None)
        norm = unread.read() * window.state.main.factor
        weight = window.weight
        self.end(norm * norm)
        return result._replace(
            stepped=stepped, reason=_reason(stepped, None), grad_norm=norm, weight=weight
        )

    def may_step_unread(self) -> bool:
        """Whether the optimizer may step before anybody has read whether it should, by those that
        can put back what torch's own optimizers change.
        """
        alone = self.scaler is None and self.clipper is None and self.window.ranks.size == 1
        return alone and can_be_taken_back(self.optimizer)

    def _norm(self, gradients: list[Tensor]) -> float:
        """Of the sums, unless somebody has read it already."""
        ahead = self.window.norm_ahead
        return self.window.ranks.norm(gradients) if ahead is None else ahead

    def _clipping(self, norm: float) -> float:
        """What brings gradients of that norm down to the largest one that is allowed."""
        return self.max_norm / norm if self.max_norm is not None and norm > self.max_norm else 1.0

    def _clip_or_keep(self, clipper: Any, scaler: Any) -> None:
        """Clip; if that fails, leave the gradients so that the caller can try again."""
        try:
            clipper.clip_grads(self.window.tensors)
        except BaseException:
            self._keep(scaler)
            raise

    def _unscale(self, scaler: Any, whole: AllParts) -> tuple[float, float]:
        """Divide the gradients by the loss scale, once; gives the factor that is left to do, and
        the norm. What is on an accelerator for that, the weights of late parts among it, is read
        at once.
        """
        window, read_late = self.window, self.window.read_late
        factor = combine(window) if read_late is None else 1.0
        gradients = gradients_of(window.tensors)
        make_scale(scaler, gradients)
        if window.ranks.reduces and scaler.get_scale() != whole.scale:
            scaler.update(whole.scale)
        window.ranks.spread_nonfinite(gradients)
        found = self._unscale_once(scaler)
        flags = [] if window.ranks.reduces else found  # which the scaler has for this rank alone
        window.in_doubt = True
        norms = self._norm_on_device(gradients)
        scales = [window.state.carried.value, scale_of(scaler)]
        then, now, *others = (read_late or _read_at_once)([*scales, *flags, *norms])
        window.state.carried = CarriedScale(then)
        self._found = any(others[: len(flags)]) if flags else None
        norm = others[-1] if norms else math.nan
        norm = norm if math.isfinite(norm) else self._norm(gradients)
        if read_late is not None:
            factor = window.state.main.factor
            if not math.isfinite(norm) and window.state.main.lacks_room(0):
                raise ReadEach  # a later part weighed too much for the first one's divisor
        return factor * (now / then), norm

    def _norm_on_device(self, gradients: list[Tensor]) -> list[Tensor]:
        """The norm of all, where it waits to be read and no other process has a part in it."""
        is_alone = not self.window.ranks.reduces
        on_device = is_alone and any(not gradient.is_cpu for gradient in gradients)
        return [total_norm(gradients)] if on_device else []

    def _unscale_once(self, scaler: Any) -> list[Tensor]:
        """Gives what `UpdateScaling.unscale` does."""
        self._scaling = UpdateScaling(scaler, self.optimizer)
        try:
            return self._scaling.unscale()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MisuseError(
                "scaler.unscale_(optimizer) was called by hand, and step() unscales by itself."
                " Leave it out and pass clip=, or go on by hand with scaler.step(optimizer);"
                " scaler.update(); optimizer.zero_grad()."
            ) from error

    def _refuse_nonfinite(self, scaler: Any, factor: float, result: StepResult) -> StepResult:
        """NaN or Inf: drop the window, or stop and leave its mean there to look at."""
        window = self.window
        if scaler is not None:
            self._step_scaled(scaler)  # which leaves it out, and remembers why
        elif not self.skip_nonfinite:
            scale_gradients(window.tensors, factor)
            self._hand_out()
            raise self._nonfinite()
        self.end(None)
        skipped = result.micro_batches + result.skipped
        return result._replace(reason="non-finite gradient", skipped=skipped)

    def _nonfinite(self) -> NonFiniteGradient:
        window = self.window
        if window.bare:  # a step's: it has taken the batch back, and has no reset()
            remedy, what = "on_nonfinite='skip' leaves such a batch out.", "the batch"
        else:
            remedy, what = "reset() drops it, on_nonfinite='skip' always.", "the window"
        return nonfinite_gradient(window.tensors, what, remedy)

    def _finish_plain(self, scaler: Any) -> StepResult:
        """A step while the accumulator is disabled: clip and step with what is in `.grad`."""
        window, optimizer = self.window, self.optimizer
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = window.ranks.norm(gradients_of(window.tensors))
        scale_gradients(window.tensors, self._clipping(norm))
        if self.clipper is not None:
            self.clipper.clip_grads(window.tensors)
        if optimizer is None:
            return StepResult(False, "no optimizer", norm, window.weight, 0, 0)
        stepped = self._step(optimizer, scaler)
        self.end(norm * norm)
        return StepResult(stepped, _reason(stepped, scaler), norm, 0, 0, 0)

    def step_or_keep(self, optimizer: AnyOptimizer, scaler: Any, norm: float | None) -> bool:
        """Step; if that fails, leave things so that the caller can try again, or says that nobody
        can.
        """
        tensors = self.window.tensors
        before = [*map(_torch.version_of, tensors)]
        uncounted = ListWrites() if is_fused(self._stepper) else None
        try:
            with uncounted or _NOTHING:
                return self._step(optimizer, scaler)
        except BaseException:
            counted = map(operator.ne, map(_torch.version_of, tensors), before)
            reached = () if uncounted is None else uncounted.reached
            changed = sum(
                wrote or id(one) in reached for one, wrote in zip(tensors, counted, strict=False)
            )
            self._leave_failed(scaler, norm, changed, of=len(before))
            raise

    def _leave_failed(self, scaler: Any, norm: float | None, changed: int, *, of: int) -> None:
        """A step has failed when it had written to so many of the parameters."""
        if self._stepped:  # only what came after the update has failed, somebody's hook, say
            self.forget_unscaled()
            self.end(None if norm is None else norm * norm)
        elif changed:
            self.forget_unscaled()
            self.window.break_off(
                f"The optimizer failed when it had changed {changed} of {of}"
                " parameters. Restore them from a saved state."
            )
        else:
            self._keep(scaler)

    def _step(self, optimizer: AnyOptimizer, scaler: Any) -> bool:
        """Step, and say whether that really happened: a scaler looks at parameters that are not
        ours, too.
        """
        self.stepping, self._stepped = True, False
        try:
            with full_precision(optimizer, self.window.tensors) if self.widens else _NOTHING:
                if scaler is None:
                    optimizer.step()
                else:
                    self._step_scaled(scaler)
        finally:
            self.stepping = False
        return self._stepped or self._stepper is None

    def _step_scaled(self, scaler: Any) -> None:
        scaling = self._scaling or UpdateScaling(scaler, self.optimizer)
        scaling.step(self._found)
        self._scaling = self._found = None

    def forget_unscaled(self) -> None:
        """The window is dropped, perhaps in the middle of its update: the scaler may unscale the
        next one's gradients.
        """
        scaling, self._scaling, self._found = self._scaling, None, None
        if scaling is not None:
            scaling.forget()

    def _keep(self, scaler: Any) -> None:
        """The update has failed, out of memory, say: leave the gradients so that the caller can try
        again.
        """
        window = self.window
        if scaler is not None:  # it would refuse to unscale them a second time
            scale = scaler.get_scale()
            window.state.carried = CarriedScale(scale)
            scaler.update(scale)
            scale_gradients(window.tensors, scale)
            self._scaling = self._found = None
        self._hand_out()

    def _hand_out(self) -> None:
        """The gradients are the mean, and whoever wants can use them."""
        window = self.window
        window.state.phase, window.in_doubt = Phase.FINAL, False
        take_marks_of_tensors(window)

    def end(self, squared_norm: float | None) -> None:
        """The window is over: its gradients go, and it begins anew."""
        optimizer = self.optimizer
        if optimizer is None:  # and nothing was handed to the user
            drop_gradients(self.window.tensors)
        elif getattr(optimizer.zero_grad, "__func__", None) is _TORCH_ZERO_GRAD:
            # The same without the profiler's record around it, which takes longer than all the rest
            # here.
            for group in optimizer.param_groups:  # type: ignore[attr-defined]
                drop_gradients(group["params"])
        else:
            optimizer.zero_grad()
        self.window.count_update(squared_norm)

    # -- an optimizer stepped by hand -------------------------------------------------------------

    def before_step(self) -> None:
        """The optimizer is about to step: if it was not us, the window's gradients become final
        now.
        """
        window = self.window
        if self.stepping or not window.enabled or belongs_to_another(window, window.tensors):
            return
        self.narrow_again()
        if window.in_use or window.ranks.size > 1 or window.block is not None:
            self._finalise_for_step()
        if self.widens:
            self._widen()

    def after_closure(self) -> None:
        """What a step's closure has put into the window becomes final for that step. A mean is it
        already.
        """
        window = self.window
        if self.stepping or not window.enabled or belongs_to_another(window, window.tensors):
            return
        if window.in_use and not window.holds_one_mean:
            self._finalise_for_step()

    def _widen(self) -> None:
        """Until `narrow_again`."""
        self._widened = contextlib.ExitStack()
        self._widened.enter_context(full_precision(self._stepper, self.window.tensors))

    def _finalise_for_step(self) -> None:
        window = self.window
        with window.alone("optimizer.step()"):
            window.require_intact()
            follow_optimizer(window)
            self._require_unscaled()
            finalise(window, by_hand=True)

    def _require_unscaled(self) -> None:
        """Refuse a step by hand with gradients that still carry the loss scale."""
        state = self.window.state
        if self._enabled_scaler() is None or state.loss_scale == 1.0 or state.is_empty:
            return
        if state.phase is not Phase.FINAL:
            raise MisuseError(
                f"optimizer.step() with sums that carry the loss scale of {state.loss_scale:g}."
                " Call step() of the accumulator, or read is_ready before scaler.step(optimizer)."
            )
        before = state.unscaled_before
        is_told = before is not None and not _torch_amp.unscales_in_step(self.optimizer)
        if is_told and times_unscaled(self.scaler, self.optimizer) == before:
            raise MisuseError(
                "optimizer.step() with gradients that carry the loss scale of"
                f" {state.loss_scale:g}. Call step() of the accumulator, or scaler.step(optimizer)."
            )

    def after_step(self) -> None:
        """It has stepped: the window is over. Clearing the gradients is up to whoever stepped."""
        if self.stepping:
            self._stepped = True
        elif self.window.enabled:
            self.narrow_again()
            self.window.count_update(None)
            leave_gradients(self.window)

    def after_add_param_group(self) -> None:
        """Take new parameters up at once, unless another thread is at work, which will."""
        window = self.window
        if window.turn.acquire(blocking=False):
            try:
                follow_optimizer(window)
            finally:
                window.turn.release()

    @property
    def is_widened(self) -> bool:
        """Whether a step by hand has left the optimizer's state wide."""
        return self._widened is not None

    def narrow_again(self) -> None:
        """Take back the widening of a step by hand, also one that failed."""
        if self._widened is not None:
            self._widened.close()
            self._widened = None


def _read_at_once(numbers: Sequence[float | Tensor]) -> list[float]:
    on_device = DeviceNumbers()
    places = on_device.add_together(numbers)
    on_device.read()
    return [*map(on_device.of, places)]


def _reason(stepped: bool, scaler: Any) -> str:
    if stepped:
        return "stepped"
    return "left out by the optimizer" if scaler is None else "non-finite gradient"
