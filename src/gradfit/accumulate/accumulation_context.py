"""The window that a user holds: it counts plain backward passes by itself."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradfit.accumulate.accumulator_options import check_scaler
from gradfit.accumulate.optimizer_access import check_optimizer
from gradfit.accumulate.plain_admission import admit_plain, finalise_by_itself, plain_factor
from gradfit.accumulate.plain_backwards import PlainBackwards, PlainPass
from gradfit.accumulate.scaled_losses import observe_scaler
from gradfit.accumulate.strategy import Strategy
from gradfit.accumulate.usual_plain_pass import UsualPlainPass, is_usual
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_marks import require_parameters_unwritten, take_marks
from gradfit.arguments import read_dtype, read_instance
from gradfit.not_copied import NotCopied


class AccumulationContext(Window, NotCopied):
    """An explicit window over some tensors: `target_steps` micro-batches become one gradient, their
    mean.

    `GradientAccumulator` does everything with one of these; alone it serves a hand-written update.
    Backward passes count by themselves. `step()` ends a micro-batch: passes since the last `step()`
    are then one, and without any pass it counts what was put into `.grad` by hand. Reading
    `is_ready` when the window is full makes its gradients final.

    >>> w = torch.zeros(2, requires_grad=True)
    >>> with AccumulationContext(2) as window:
    ...     window.register_tensor(w)
    ...     for x in (1.0, 3.0):
    ...         (w * x).sum().backward()
    ...     print(window.is_ready, w.grad)
    True tensor([2., 2.])

    Args:
        target_steps: how many micro-batches fill the window.
        strategy: decides in its place when the window is full.
        optimizer: steps with the gradients; None if somebody else's does.
        scaler: scales the losses.
        dtype: what the gradients add up in, if it is wider than the tensors' own type.

    Raises:
        MisuseError: `target_steps` is not a whole number of at least 1.
    """

    bare = False
    _instead_of_copy = "Make one for the copied tensors."

    def __init__(
        self,
        target_steps: int,
        *,
        strategy: Strategy | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if strategy is not None:
            read_instance(
                strategy, "strategy", Strategy, "FixedTargetBatch(n) or another gradfit strategy"
            )
        if optimizer is not None:
            check_optimizer(optimizer)
        check_scaler(scaler, optimizer)
        if dtype is not None:
            read_dtype(dtype, "dtype")
        super().__init__(
            target_steps, strategy=strategy, optimizer=optimizer, scaler=scaler, dtype=dtype
        )
        self.plain = PlainBackwards(self)
        if scaler is not None:
            observe_scaler(scaler)

    # -- what `plain_backwards` tells it ----------------------------------------------------------

    def admit_plain(self, one: PlainPass) -> float | None:
        """Before a plain pass adds anything: count it, and give the factor for its gradients; None
        if it is not counted. Or refuse it.

        Args:
            one: the pass.
        """
        return admit_plain(self, one)

    def plain_factor(self) -> float:
        """What a plain pass's gradients are multiplied by, so that it weighs 1 among the sums."""
        return plain_factor(self)

    def end_plain(self, *, complete: bool) -> None:
        """A plain pass has added all of its gradients.

        Args:
            complete: it was the last one that the window waits for.
        """
        with self.lock:
            if self.parameters_written:
                require_parameters_unwritten(self)
            take_marks(self)
            if complete:
                self._end_complete()

    def _end_complete(self) -> None:
        if not self.hears_of_steps and self.apart is None:
            finalise_by_itself(self)
        if is_usual(self) and not self.plain.expects_more(threading.get_ident()):
            self.settled = UsualPlainPass(self)

    def __enter__(self) -> AccumulationContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dispose(self) -> None:
        """`close`, under the name that other languages have for it."""
        self.close()
