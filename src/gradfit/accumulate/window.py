"""One accumulation window: what it holds, what that weighs, when it is full, and who may touch it.

The gradients of a window live in the tensors' own `.grad`, divided by a number that is chosen from
the first weight (`provisional_divisor`) until the total is known. What a window does stands in
files of its own, in the order of its life: which tensors it has (`window_members`), how it begins
(`window_begin`), what comes in (`weighted_backward`, `plain_admission`) and how it counts
(`counted_micro_batches`), whether it is as it was left (`window_marks`), how it ends
(`window_end`).

Who may do what:

1. `turn` is held by whoever runs a pass of the window's, a micro-batch that can be taken back, or
   an update: one at a time, the others wait. Plain passes need no turn, because they only add to
   `.grad`.
2. `apart` is the thread for which `.grad` is something else than the window's sums at the moment.
   Plain passes of other threads are refused meanwhile, and nobody becomes it while a plain pass
   runs.
3. `block` is the thread that is inside `micro_batch`. What ends or changes a window is refused
   until it has left, in any thread: waiting for it could mean waiting for oneself.
4. What is half done is `in_doubt`. Whoever comes next, after an interrupt say, finds the window
   broken.
5. Before anything is added, the gradients must be as they were left (`GradientMarks`).
6. `settled` is the short way round these questions for the next usual pass. It is taken away by
   whoever takes a turn for something else, brings a plain pass or changes the members, so that they
   are asked again.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit._torch import version_of
from gradfit.accumulate.counted_micro_batches import end_micro_batch
from gradfit.accumulate.gradient_marks import GradientMarks, drop_gradients
from gradfit.accumulate.marks import disown
from gradfit.accumulate.optimizer_access import stepper_of
from gradfit.accumulate.plain_backwards import NoPlainBackwards
from gradfit.accumulate.processes import SINGLE_PROCESS, AllParts, SingleProcess
from gradfit.accumulate.short_way import ShortWay
from gradfit.accumulate.strategy import FixedStepCount, Strategy
from gradfit.accumulate.transaction import Transaction
from gradfit.accumulate.unread_numbers import UnreadNumbers
from gradfit.accumulate.window_begin import notice_use
from gradfit.accumulate.window_end import finalise
from gradfit.accumulate.window_members import follow_optimizer, let_go_all, register_all
from gradfit.accumulate.window_state import Phase, WindowState
from gradfit.arguments import Number, read_count
from gradfit.errors import MisuseError

FILLING, FINAL, BROKEN = Phase.FILLING, Phase.FINAL, Phase.BROKEN
_LOOK_SECONDS = 0.05  # how often somebody who waits for a turn looks whether it can come at all


class Window:
    """The micro-batches of one update: `target_steps` of them, or what a strategy asks for, become
    one mean gradient.

    A bare window holds what its owner puts in, by `Backpropagator`, and nothing else;
    `AccumulationContext` is one that also counts plain `loss.backward()` calls. Either way it
    begins anew once it was used.
    """

    bare = True
    """What is in `.grad` before it begins is nobody's, and dropped; others refuse to add to it."""

    def __init__(
        self,
        target_steps: int,
        *,
        strategy: Strategy | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.strategy = (
            FixedStepCount(read_count(target_steps, "target_steps"))
            if strategy is None
            else strategy
        )
        self.optimizer, self.scaler, self.dtype = optimizer, scaler, dtype
        self.hears_of_steps = stepper_of(optimizer) is not None
        # its parameters are the optimizer's, whatever those are by now
        self.follows_optimizer = False
        self.tensors: list[Tensor] = []
        self.ids: set[int] = set()  # of the tensors
        self.ranks: SingleProcess = SINGLE_PROCESS
        self.sources: Sequence[Any] = self.tensors  # whose `.grad` autograd adds to
        # nobody shared the tensors when they were registered, and nobody has looked since
        self.may_be_wrapped_later = True
        self.owns = self.is_noted = False  # for `marks`
        self.lock = threading.RLock()  # for a moment: counters
        self.turn = threading.RLock()  # rule 1
        self.apart: int | None = None  # rule 2
        self.block: int | None = None  # rule 3
        self.in_doubt = False  # rule 4
        self.settled: ShortWay | None = None  # rule 6
        self.next_way: ShortWay | None = None  # which the first pass of the next window may take
        self.plain = NoPlainBackwards()
        # step() ends micro-batches here, so passes between two calls are one
        self.step_ends_micro_batch = False
        self.enabled = True
        self.transaction: Transaction | None = None
        self.narrow = self.widened_float16 = False
        self.state = WindowState()
        self.is_first = True  # no window has begun since the tensors were registered
        self.last_marks: GradientMarks | None = None  # to be taken anew after each pass
        # the parameters' versions when the window began; None: not watched
        self.written: list[int] | None = None
        # gradients of the last window that were left in `.grad` when it ended
        self.left: GradientMarks | None = None
        self.drops_left = False  # nobody needs them once the next window begins
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.state = WindowState(updates=self.state.updates)
        # for whoever ends the window: numbers to be added up over all processes
        self.notes: dict[str, float] = {}
        # of the sums, for whoever has read it together with other numbers
        self.norm_ahead: float | None = None
        # numbers that nobody has read: the update is launched with them, and reads them then
        self.unread: UnreadNumbers | None = None
        # reads weights that are still on an accelerator, with other numbers, when it ends
        self.read_late: Callable[[Sequence[float | Tensor]], list[float]] | None = None
        self.whole: AllParts | None = None  # what all processes hold, once they have met
        self.marks: GradientMarks | None = None
        self.settled = None
        self.in_doubt = False
        self.plain.end_window()
        if self.ranks is not SINGLE_PROCESS:
            self.ranks.release()
        if self.bare:
            disown(self)

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def target_steps(self) -> int:
        """How many micro-batches fill the window; an estimate if the strategy goes by their
        sizes.
        """
        if isinstance(self.strategy, FixedStepCount):
            return self.strategy.steps
        steps = self.accumulation_steps
        return max(1, _steps_at_end(steps, self.strategy.progress(steps, self.weight)))

    @property
    def accumulation_steps(self) -> int:
        """How many micro-batches the window holds, skipped ones included."""
        steps = self.state.micro_batches
        for one in list(self.state.open.values()):
            steps += min(1, one.passes) if self.step_ends_micro_batch else one.passes
        return steps

    @property
    def weight(self) -> Number:
        """What the window weighs: by the first term if there are only terms."""
        state = self.state
        if state.main.weight or not state.terms:
            return state.main.weight
        return next(iter(state.terms.values())).weight

    @property
    def is_full(self) -> bool:
        """Whether the window holds enough, without doing anything about it."""
        steps = self.accumulation_steps
        return steps > 0 and self.strategy.is_complete(steps, self.weight)

    @property
    def is_of_one(self) -> bool:
        """Whether one micro-batch is a window, of an optimizer that is known: then all plain passes
        of an update are losses of that one, and add up as without an accumulator.
        """
        strategy = self.strategy
        return (
            self.optimizer is not None
            and isinstance(strategy, FixedStepCount)
            and strategy.steps == 1
        )

    @property
    def holds_one_mean(self) -> bool:
        """Whether what is in `.grad` is a mean with nothing left to divide, and is never to be
        added up with others: the user's, as without an accumulator.
        """
        state = self.state
        return (
            self.is_of_one
            and state.phase is FILLING
            and self.accumulation_steps == 1
            and bool(state.main.weight)
            and state.main.factor == 1.0
            and not state.terms
            and self.scaler is None
            and self.ranks is SINGLE_PROCESS
        )

    @property
    def is_ready(self) -> bool:
        """Whether the window is full; if it is, its gradients are normalised from here on."""
        ready = self._look_quietly()
        if ready is not None:
            return ready
        with self.alone("is_ready"):
            self.require_intact()
            notice_use(self)
            follow_optimizer(self)
            self.plain.end_micro_batch()
            if self.is_full:
                finalise(self)
            return self.is_full

    def _look_quietly(self) -> bool | None:
        """Whether the window is full, seen in few calls; None if there is something to do or to
        refuse. Ends a micro-batch.
        """
        if self.block is not None or not self.turn.acquire(blocking=False):
            return None
        try:
            return self._look_in_turn()
        finally:
            self.turn.release()

    def _look_in_turn(self) -> bool | None:
        state, full = self.state, self.is_full
        if self.in_doubt or self.plain.passes:
            return None
        if full or state.phase is not FILLING:
            if not (full and self._may_be_handed_out):
                return None
            # whoever asks must use them before more can come in
            state.asked, self.settled = True, None
        self.plain.end_micro_batch()
        return full

    @property
    def _may_be_handed_out(self) -> bool:
        """Whether the gradients are final, as they were left, and of the same parameters."""
        is_final = self.state.phase is FINAL and not self.follows_optimizer
        return is_final and self.final_is_unused

    @property
    def in_use(self) -> bool:
        """Whether somebody still wants what is in `.grad`: it is filling, or final and not used
        yet.
        """
        if self._is_amid_something:
            return True
        return self.final_is_wanted if self.state.phase is FINAL else not self.state.is_empty

    @property
    def _is_amid_something(self) -> bool:
        """Whether a pass or an update has begun and not ended, or was left half-way."""
        return (
            self.transaction is not None
            or bool(self.plain.passes)
            or self.in_doubt
            or self.state.phase is BROKEN
        )

    @property
    def final_is_wanted(self) -> bool:
        """Whether final gradients are still for somebody to use, or to clear."""
        return (
            not self.state.applied
            and self.marks is not None
            and (self.final_is_unused or self.marks.leftovers)
        )

    @property
    def final_is_unused(self) -> bool:
        """Whether final gradients, which there are, are as they were handed out."""
        marks = self.marks
        return (
            marks is not None and marks.any and marks.untouched() and not marks.parameters_changed
        )

    @property
    def is_final(self) -> bool:
        """Whether `.grad` is the mean."""
        return self.state.phase is FINAL

    @property
    def watches_parameters(self) -> bool:
        """Whether somebody else's optimizer could update them unseen."""
        return not self.hears_of_steps and not self.bare

    @property
    def parameters_written(self) -> bool:
        """Whether anybody has written to a parameter since the window began; never, if that is not
        watched.
        """
        return self.written is not None and [*map(version_of, self.tensors)] != self.written

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(target_steps={self.target_steps},"
            f" accumulation_steps={self.accumulation_steps}, tensors={len(self.tensors)})"
        )

    # -- membership --------------------------------------------------------------------------------

    def register_tensor(self, tensor: Tensor) -> None:
        """Accumulate into this tensor; it must be a leaf of floating point type, and may be frozen
        for now.

        Args:
            tensor: a parameter, or any other leaf that a loss is differentiated by.
        """
        register_all(self, [tensor], "tensor")

    def close(self) -> None:
        """Stop counting; the tensors and their `.grad` are left as they are."""
        self.require_outside_micro_batch("close()")
        let_go_all(self)
        self._begin_anew()

    # -- who may touch it --------------------------------------------------------------------------

    def require_outside_micro_batch(self, call: str) -> None:
        """Refuse what ends or changes a window while a micro-batch is between its two ends (rule
        3).
        """
        if self.block is None:
            return
        if self.block == threading.get_ident():
            raise MisuseError(
                f"{call} inside micro_batch: the window is between two states. Call it after the"
                " `with` block."
            )
        raise MisuseError(
            f"{call} while another thread is inside micro_batch. Call it when that thread has left"
            " its `with` block, after joining it, say."
        )

    def require_quiet(self, call: str) -> None:
        """Refuse to touch the gradients while a plain pass adds to them."""
        if not self.plain.passes:
            return
        if self.plain.any_died():
            self.break_off()
            self.require_intact()
        raise MisuseError(
            f"{call} {self._where_plain()}: half of its gradients would be used. Call it when the"
            " pass has ended, or run every loss by accumulator.backward(loss), which waits by"
            " itself."
        )

    def _where_plain(self) -> str:
        """Where a plain pass runs, seen from this thread."""
        if threading.get_ident() in self.plain.passes.values():
            return "inside a backward pass"
        return "while another thread runs a plain backward()"

    def require_intact(self) -> None:
        """Refuse to go on with gradients that hold half of something."""
        state = self.state
        if state.phase is not BROKEN:
            self._look_for_half_done()
        if state.phase is BROKEN:
            raise MisuseError(f"{state.fault} Call reset() and repeat the window.")

    def _look_for_half_done(self) -> None:
        if self.in_doubt and self.transaction is None:
            self.break_off(
                "A backward pass or an update was interrupted half-way, so the gradients hold part"
                " of it."
            )
        elif self.plain.passes and self.plain.any_died():
            self.break_off()

    def break_off(self, fault: str = "") -> None:
        """Part of something is in the gradients, and cannot be told from the rest."""
        self.settled = None
        if self.state.phase is not BROKEN:
            self.state.phase = BROKEN
            self.state.fault = fault or (
                "A backward pass failed half-way, so the window holds part of a micro-batch (with"
                " isolate=True, `with accumulator.micro_batch():` leaves the window as it was"
                " before)."
            )
        self.in_doubt = False

    @contextlib.contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """A turn in which nobody else adds to `.grad`; refused inside of a micro-batch and beside
        plain passes.
        """
        self.take_turn(call)
        before = self.apart
        try:
            self.set_apart(call)
            yield
        finally:
            self.apart = before
            self.turn.release()

    @contextlib.contextmanager
    def alone_after_failure(self, call: str) -> Iterator[None]:
        """As `alone`, and what has died half-way is forgotten."""
        if self.plain.passes and self.plain.any_died():
            self.plain.abandon()
        with self.alone(call):
            yield

    def set_apart(self, call: str) -> None:
        """From now on `.grad` is something else than the sums, for this thread only (rule 2)."""
        with self.lock:
            self.require_quiet(call)
            self.apart = threading.get_ident()

    def take_turn(self, call: str) -> None:
        """Wait for a turn, but not for a micro-batch that somebody is inside of (rule 3)."""
        self.require_outside_micro_batch(call)
        while not self.turn.acquire(timeout=_LOOK_SECONDS):
            self.require_outside_micro_batch(call)
        self.settled = None

    # -- ending ------------------------------------------------------------------------------------

    def step(self) -> None:
        """End a micro-batch."""
        with self.alone("step()"):
            self.require_intact()
            if end_micro_batch(self):
                finalise(self)

    def reset(self) -> None:
        """Forget the window and its gradients, and start the next."""
        with self.alone_after_failure("reset()"):
            self.drop()

    def drop(self) -> None:
        """Take all gradients away, and begin anew; the strategy learns that this window was
        nothing.
        """
        drop_gradients((*self.tensors, *self.sources))
        self.left = self.transaction = None
        self.plain.abandon()
        if not self.state.is_empty:
            self.strategy.end_window(self.weight, None)
        self._begin_anew()

    def count_update(self, squared_norm: float | None) -> None:
        """The window is over: count it, and begin from zero. The gradients are the caller's."""
        if not self.state.is_empty or self._others_held_any():
            self.strategy.end_window(self.weight, squared_norm)
            self.state.updates += 1
        self._begin_anew()

    def _others_held_any(self) -> bool:
        """Whether any process has put something into the window, as far as they have met."""
        whole = self.whole
        return whole is not None and whole.micro_batches + whole.skipped > 0

    def settle_weight(self, weight: Number, *, whole: bool, divisor: float | None = None) -> None:
        """The weights that came in stood for others, which were on a device: this is what they add
        up to.

        `whole`: there was one micro-batch, a mean, which is its own divisor. `divisor`: of the
        sums, if they were not divided by what stood for the weights.
        """
        self.state.main.weight = weight
        if whole and weight:
            self.state.main.divisor = float(weight)
        elif divisor is not None:
            self.state.main.divisor = divisor


def _steps_at_end(steps: int, progress: float) -> int:
    """How many micro-batches a window will have, of which so many have filled so much."""
    if not progress:
        return steps + 1
    return steps if progress >= 1 else math.ceil(steps / progress)
