"""The end of a window: unscale, check, normalise, clip, step, clear, each once and in this order."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from gradfit.accumulate.optimizers import AnyOptimizer, full_precision, stepper_of
from gradfit.accumulate.result import StepResult
from gradfit.accumulate.scaling import nonfinite_gradient, scale_gradients
from gradfit.accumulate.window import Window

_NOTHING = contextlib.nullcontext()
_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class Update:
    """Turns a window into one step of the optimizer, or says why not."""

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
        self.windows = 0
        self.notes: dict[str, float] = {}  # what was noted in the last window, added up over all processes
        self.all_flushing = True  # in the last window: nobody has more to give
        self.stepping = self._stepped = False
        self._widened: contextlib.ExitStack | None = None

    def finish(self, *, flushing: bool = False, joined: bool = False) -> StepResult:
        """End the window, together with all processes that fill it.

        `flushing`: this one has no more to give; `joined`: it had none to begin with, and only keeps up.
        """
        window, optimizer, ranks = self.window, self.optimizer, self.window.ranks
        self.narrow_again()
        scaler = self.scaler
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        if not window.enabled:
            return self._finish_plain(scaler)
        whole = window.meet(flushing=flushing, joined=joined, scale=1.0 if scaler is None else scaler.get_scale())
        self.all_flushing, self.notes = whole.flushing, whole.notes
        weight, skipped, taken = window.weight, whole.skipped, whole.micro_batches
        if not any(whole.weights.values()):
            self._end(None)
            return StepResult(False, "no weight" if taken or skipped else "empty window", None, 0, taken, skipped)
        ranks.share_options(optimizer, whole, joined)
        factor = window.combine()
        gradients = [one for tensor in window.tensors if (one := tensor.grad) is not None]
        if scaler is not None:
            if ranks.size > 1:
                scaler.scale(torch.zeros((), device=gradients[0].device))  # else it has no scale where nothing was run
            if scaler.get_scale() != whole.scale:
                scaler.update(whole.scale)
            factor *= whole.scale / window.scale
            ranks.spread_nonfinite(gradients)
            scaler.unscale_(optimizer)
        norm = ranks.norm(gradients) * factor
        if not math.isfinite(norm):
            if scaler is not None:
                scaler.step(optimizer)  # which leaves it out, and remembers why
                scaler.update()
            elif not self.skip_nonfinite:
                raise nonfinite_gradient(window.tensors, "the window", "reset() drops it, on_nonfinite='skip' always.")
            self._end(None)
            return StepResult(False, "non-finite gradient", norm, weight, taken, taken + skipped)
        if self.max_norm is not None and norm > self.max_norm:
            factor *= self.max_norm / norm
        scale_gradients(window.tensors, factor)
        try:
            if self.clipper is not None:
                self.clipper.clip_grads(window.tensors)
            if optimizer is None:
                window.finalise(normalised=True)
                return StepResult(False, "no optimizer", norm, weight, taken, skipped)
            stepped = self._step(optimizer, scaler)
        except BaseException:
            self._keep(scaler)
            raise
        self._end(norm**2)
        return StepResult(stepped, _reason(stepped, scaler), norm, weight, taken, skipped)

    def _finish_plain(self, scaler: Any) -> StepResult:
        """A step while the accumulator is disabled: clip and step with what is in `.grad`."""
        window, optimizer = self.window, self.optimizer
        if scaler is not None:
            scaler.unscale_(optimizer)
        gradients = [one for tensor in window.tensors if (one := tensor.grad) is not None]
        norm = window.ranks.norm(gradients)
        if self.max_norm is not None and norm > self.max_norm:
            scale_gradients(window.tensors, self.max_norm / norm)
        if self.clipper is not None:
            self.clipper.clip_grads(window.tensors)
        if optimizer is None:
            window.finalise(normalised=True)
            return StepResult(False, "no optimizer", norm, window.weight, 0, 0)
        stepped = self._step(optimizer, scaler)
        self._end(norm**2)
        return StepResult(stepped, _reason(stepped, scaler), norm, 0, 0, 0)

    def _step(self, optimizer: AnyOptimizer, scaler: Any) -> bool:
        """Step, and say whether that really happened: a scaler looks at parameters that are not ours, too."""
        self.stepping, self._stepped = True, self._stepper is None
        try:
            with full_precision(optimizer, self.window.tensors) if self.widens else _NOTHING:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
        finally:
            self.stepping = False
        return self._stepped

    def _keep(self, scaler: Any) -> None:
        """The update has failed, out of memory, say: leave the gradients so that the caller can try again."""
        window = self.window
        if scaler is not None:  # it would refuse to unscale them a second time
            window.scale = scaler.get_scale()
            scaler.update(window.scale)
            scale_gradients(window.tensors, window.scale)
        window.finalise(normalised=True)

    def _end(self, squared_norm: float | None) -> None:
        optimizer = self.optimizer
        if optimizer is None:  # and nothing was handed to the user
            for tensor in self.window.tensors:
                tensor.grad = None
        elif getattr(optimizer.zero_grad, "__func__", None) is _TORCH_ZERO_GRAD:
            # The same without the profiler's record around it, which takes longer than all the rest here.
            for group in optimizer.param_groups:  # type: ignore[attr-defined]
                for tensor in group["params"]:
                    tensor.grad = None
        else:
            optimizer.zero_grad()
        self._count(squared_norm)

    def _count(self, squared_norm: float | None) -> None:
        whole = self.window.whole
        if self.window.accumulation_steps or (whole is not None and whole.micro_batches + whole.skipped):
            self.window.strategy.end_window(self.window.weight, squared_norm)
            self.windows += 1
        self.window.end()

    # -- an optimizer stepped by hand -----------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A torch optimizer is about to step: if it was not us, the window's gradients become final now."""
        if not self.window.enabled or not self._holds(optimizer):
            return
        self.narrow_again()
        if self.window.accumulation_steps or self.window.ranks.size > 1:
            self.window.finalise()
        if self.widens:
            self._widened = contextlib.ExitStack()
            self._widened.enter_context(full_precision(optimizer, self.window.tensors))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped: the window is over. Clearing the gradients is up to whoever stepped."""
        if self.stepping:
            self._stepped = self._stepped or optimizer is self._stepper
        elif self.window.enabled and self._holds(optimizer):
            self.narrow_again()
            self._count(None)

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer is self._stepper:
            return True
        mine = self.window.ids
        return any(not mine.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)

    def narrow_again(self) -> None:
        """Take back the widening of a step by hand, also one that failed."""
        if self._widened is not None:
            self._widened.close()
            self._widened = None


def _reason(stepped: bool, scaler: Any) -> str:
    if stepped:
        return "stepped"
    return "left out by the optimizer" if scaler is None else "non-finite gradient"
