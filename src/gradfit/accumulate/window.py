"""One accumulation window: what it holds, what that weighs, when it is full, and who may touch it.

The gradients of a window live in the tensors' own `.grad`. Micro-batch i is backpropagated with the
factor wᵢ/D, where D is a provisional divisor, chosen from the first weight; when the window is full
the gradients are multiplied by D/Σw. So the total need not be known beforehand, partial sums stay
in the range of a mean (D grows by powers of two where Σw outgrows it), and if D was guessed right
(equal micro-batches) there is nothing left to multiply.

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
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradfit._torch import have_no_gradient, type_of, version_of
from gradfit.accumulate.accumulator_options import read_members
from gradfit.accumulate.gradient_marks import GradientMarks, Touch, is_clear
from gradfit.accumulate.marks import belongs_to_another, claim, disown, mark, unmark
from gradfit.accumulate.optimizer_access import parameters_of
from gradfit.accumulate.plain_backwards import NoPlainBackwards, PlainPass
from gradfit.accumulate.processes import (
    SINGLE_PROCESS,
    AllParts,
    SingleProcess,
    present_in,
    ranks_of,
    wrapped_since,
)
from gradfit.accumulate.scaled_losses import is_scaled, times_unscaled
from gradfit.accumulate.scaling import scale_gradients
from gradfit.accumulate.short_way import ShortWay
from gradfit.accumulate.strategy import FixedStepCount, Strategy
from gradfit.accumulate.transaction import Transaction
from gradfit.accumulate.window_state import OpenMicroBatch, Phase, Total, WindowState
from gradfit.arguments import Number, read_count
from gradfit.errors import MisuseError

FILLING, REDUCED, FINAL, BROKEN = Phase.FILLING, Phase.REDUCED, Phase.FINAL, Phase.BROKEN
# how often float16's largest number fits into float32's, with room to spare
_FLOAT16_IN_FLOAT32 = 2.0**96
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
        # its parameters are the optimizer's, whatever those are by now
        self.follows_optimizer = False
        self.tensors: list[Tensor] = []
        self.ids: set[int] = set()  # of the tensors
        self.ranks: SingleProcess = SINGLE_PROCESS
        self.sources: Sequence[Any] = self.tensors  # whose `.grad` autograd adds to
        # nobody shares the tensors, as far as was looked when they were registered
        self._found_alone = True
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
        self._is_first = True  # no window has begun since the tensors were registered
        self.last_marks: GradientMarks | None = None  # to be taken anew after each pass
        # the parameters' versions when the window began; None: not watched
        self.written: list[int] | None = None
        # gradients of the last window that were left in `.grad` when it ended
        self.left: GradientMarks | None = None
        self._left_to_drop = False  # nobody needs them once the next window begins
        self._clear()

    def _clear(self) -> None:
        self.state = WindowState(updates=self.state.updates)
        # for whoever ends the window: numbers to be added up over all processes
        self.notes: dict[str, float] = {}
        # of the sums, for whoever has read it together with other numbers
        self.norm_ahead: float | None = None
        self.whole: AllParts | None = None  # what all processes hold, once they have met
        self.marks: GradientMarks | None = None
        self.settled = None
        self.in_doubt = False
        self.plain.end_window()
        if self.ranks is not SINGLE_PROCESS:
            self.ranks.release()
        if self.bare:
            disown(self)

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def target_steps(self) -> int:
        """How many micro-batches fill the window; an estimate if the strategy goes by their
        sizes.
        """
        if isinstance(self.strategy, FixedStepCount):
            return self.strategy.steps
        steps, progress = (
            self.accumulation_steps,
            self.strategy.progress(self.accumulation_steps, self.weight),
        )
        return max(
            1, steps if progress >= 1 else math.ceil(steps / progress) if progress else steps + 1
        )

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
    def is_ready(self) -> bool:
        """Whether the window is full; if it is, its gradients are normalised from here on."""
        ready = self._look_quietly()
        if ready is not None:
            return ready
        with self.alone("is_ready"):
            self.require_intact()
            self.notice_use()
            self.follow()
            self.plain.end_micro_batch()
            if self.is_full:
                self.finalise()
            return self.is_full

    def _look_quietly(self) -> bool | None:
        """Whether the window is full, seen in few calls; None if there is something to do or to
        refuse. Ends a micro-batch.
        """
        if self.block is not None or not self.turn.acquire(blocking=False):
            return None
        try:
            state, full = self.state, self.is_full
            if self.in_doubt or self.plain.passes:
                return None
            final = full and state.phase is FINAL and not self.follows_optimizer
            if final and self._final_is_unused:
                # whoever asks must use them before more can come in
                state.asked, self.settled = True, None
            elif full or state.phase is not FILLING:
                return None
            self.plain.end_micro_batch()
            return full
        finally:
            self.turn.release()

    @property
    def in_use(self) -> bool:
        """Whether somebody still wants what is in `.grad`: it is filling, or final and not used
        yet.
        """
        if (
            self.transaction is not None
            or self.plain.passes
            or self.in_doubt
            or self.state.phase is BROKEN
        ):
            return True
        if self.state.phase is FINAL:
            return (
                not self.state.applied
                and self.marks is not None
                and (self._final_is_unused or self.marks.leftovers)
            )
        return not self.state.is_empty

    @property
    def _final_is_unused(self) -> bool:
        marks = self.marks
        return (
            marks is not None and marks.any and marks.untouched() and not marks.parameters_changed
        )

    @property
    def is_final(self) -> bool:
        """Whether `.grad` is the mean."""
        return self.state.phase is FINAL

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(target_steps={self.target_steps},"
            f" accumulation_steps={self.accumulation_steps}, tensors={len(self.tensors)})"
        )

    # -- membership -------------------------------------------------------------------------------

    def register_tensor(self, tensor: Tensor) -> None:
        """Accumulate into this tensor; it must be a leaf of floating point type, and may be frozen
        for now.

        Args:
            tensor: a parameter, or any other leaf that a loss is differentiated by.
        """
        self.register_all([tensor], "tensor")

    def register_all(self, tensors: Iterable[Tensor], name: str) -> None:
        """Register tensors, all or none."""
        new = read_members(tensors, self.ids, name)
        self.is_noted = False
        if not self.bare:
            claim(self, [*self.tensors, *new])
        self.tensors += new
        self.ids.update(map(id, new))
        mark(self, new)
        for tensor in new:
            self.plain.watch(tensor)
            self._widen(tensor)
        self._find_ranks()

    def forget_all(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors out again."""
        gone = {id(tensor): tensor for tensor in tensors}
        for tensor in gone.values():
            self.plain.forget(tensor)
        unmark(self, gone.values())
        self.tensors = [tensor for tensor in self.tensors if id(tensor) not in gone]
        self.ids -= gone.keys()
        self._find_ranks()

    def follow(self) -> list[Tensor]:
        """Take up parameters that were added to the optimizer, let go those that were removed;
        gives the new ones.
        """
        if not self.follows_optimizer or (now := parameters_of(self.optimizer)) is None:
            return []
        before = self.tensors
        if len(now) == len(before) and all(map(is_, now, before)):
            return []
        was = {id(tensor): position for position, tensor in enumerate(before)}
        ids = {id(tensor) for tensor in now}
        self.forget_all([tensor for tensor in before if id(tensor) not in ids])
        new = [tensor for tensor in now if id(tensor) not in was]
        self.register_all(new, "optimizer")
        self._arrange(now, was)
        if self.transaction is not None:
            self.transaction.extend(self.sources)
        if self.marks is not None:
            self.marks.change(ids, new)
        return new

    def _arrange(self, order: Sequence[Tensor], was: dict[int, int]) -> None:
        """Keep the optimizer's order, as whoever loads the window's state will find it."""
        self.tensors = list(order)
        self._find_ranks()
        now = {was[id(tensor)]: at for at, tensor in enumerate(order) if id(tensor) in was}
        terms = [*self.state.terms.values()]
        if self.transaction is not None:
            terms += self.transaction.terms.values()
        for term in terms:
            term.gradients = {
                now[at]: gradient for at, gradient in term.gradients.items() if at in now
            }

    def _widen(self, tensor: Tensor) -> None:
        wide = tensor.dtype if self.dtype is None else torch.promote_types(tensor.dtype, self.dtype)
        if wide != tensor.dtype:
            gradient, tensor.grad = tensor.grad, None
            tensor.grad_dtype = wide  # autograd itself adds up in this precision from now on
            tensor.grad = None if gradient is None else gradient.to(wide)

    def _find_ranks(self) -> None:
        self.last_marks = self.settled = self.next_way = None  # of other tensors
        self.ranks.close()
        self.ranks = ranks_of(self.tensors, self) if self.tensors else SINGLE_PROCESS
        self.sources = self.ranks.sources(self.tensors)
        self._found_alone = self.ranks is SINGLE_PROCESS
        self._note_parameters()

    def close(self) -> None:
        """Stop counting; the tensors and their `.grad` are left as they are."""
        self.require_outside_micro_batch("close()")
        self.plain.close()
        unmark(self, self.tensors)
        for tensor in self.tensors:
            if self.dtype is not None and tensor.grad_dtype is not None:
                tensor.grad_dtype = tensor.dtype if tensor.grad is None else tensor.grad.dtype
        self.tensors, self.ids = [], set()
        self._is_first = True
        self._find_ranks()
        self._clear()

    # -- who may touch it -------------------------------------------------------------------------

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
        inside = threading.get_ident() in self.plain.passes.values()
        where = (
            "inside a backward pass" if inside else "while another thread runs a plain backward()"
        )
        raise MisuseError(
            f"{call} {where}: half of its gradients would be used. Call it when the pass has ended,"
            " or run every loss by accumulator.backward(loss), which waits by itself."
        )

    def require_intact(self) -> None:
        """Refuse to go on with gradients that hold half of something."""
        state = self.state
        if self.in_doubt and self.transaction is None and state.phase is not BROKEN:
            self.break_off(
                "A backward pass or an update was interrupted half-way, so the gradients hold part"
                " of it."
            )
        elif state.phase is not BROKEN and self.plain.passes and self.plain.any_died():
            self.break_off()
        if state.phase is BROKEN:
            raise MisuseError(f"{state.fault} Call reset() and repeat the window.")

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

    # -- what comes in ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a contribution of the owner's: the window must be whole, as it was left, and ours.
        Needs `turn`.
        """
        self.settled = None
        if self.transaction is not None:
            return
        self.require_intact()
        self.follow()
        if self.state.phase is FINAL:
            self._leave_final(plain=False)
        self._require_filling()

    def _require_filling(self, *, plain: bool = False) -> None:
        """The window can take something in; an empty one begins."""
        state = self.state
        if state.phase is REDUCED:
            raise MisuseError(
                "The window has ended, and its update has not succeeded yet. Call step() again, or"
                " reset() to drop it."
            )
        if state.is_empty:
            self.start(plain=plain)
        else:
            self.require_untouched()

    def start(self, *, plain: bool = False) -> None:
        """The first contribution of a window is about to come.

        Gradients from before the very first one are the user's own, and plain passes add to them as
        ever.
        """
        self.next_way = None
        if self._found_alone:
            error = wrapped_since(self.tensors, self)
            if error is not None:
                raise error
            self._found_alone = False
        claim(self, self.tensors)
        if self.left is not None:
            self._drop_left()
        if not have_no_gradient(self.sources):
            if self.bare:
                for source in self.sources:
                    source.grad = None
            elif not self._may_add_to_earlier(plain) and not all(
                is_clear(source.grad) for source in self.sources
            ):
                raise MisuseError(
                    "There are gradients in `.grad` from before this window. Call"
                    " optimizer.zero_grad() after optimizer.step(), or reset() to drop them."
                )
        self.start_clear()

    def start_clear(self) -> None:
        """The same where the tensors are this window's own, and have no gradients to see to."""
        self._is_first, self.left, self.owns = False, None, True
        self.plain.forget_others()
        self._note_parameters()
        self._note_types()
        if self.scaler is not None:
            self.state.loss_scale = self.scaler.get_scale()

    def _note_types(self) -> None:
        """Whether factors must be chosen with care: gradients are, or come from, narrow numbers."""
        types, wide = set(map(type_of, self.tensors)), self.dtype
        if wide is None:
            self.narrow = torch.float16 in types
            return
        widened = {one for one in types if one != torch.promote_types(one, wide)}
        self.narrow, self.widened_float16 = bool(widened), torch.float16 in widened

    def _may_add_to_earlier(self, plain: bool) -> bool:
        """Whether gradients from before this window are the user's own, and meant."""
        return plain and self._is_first and not self.plain.reached_by_others

    def leave_gradients(self) -> None:
        """A window has ended, and what is in `.grad` is for the user to clear."""
        self.left, self._left_to_drop = GradientMarks(self.tensors), False

    def _drop_left(self) -> None:
        """Gradients that were applied stay until now."""
        if self.left is not None and self._left_to_drop:
            self.left.clear()
            self.left = None

    def _leave_final(self, *, plain: bool) -> None:
        """The gradients were handed out; begin anew if they were used, go on with them if they were
        not.
        """
        self.notice_use()
        state = self.state
        if state.phase is not FINAL:
            return
        if self._final_is_unused:
            if state.terms or (plain and state.asked):
                raise MisuseError(
                    "The window is full and its gradients are final, but neither a step nor"
                    " zero_grad came before the next backward. Step the optimizer and zero the"
                    " gradients once is_ready is true, or call reset()."
                )
            self._take_up()
        else:
            raise MisuseError(
                "The gradients of the last window were used, and are still in `.grad`. Call"
                " optimizer.zero_grad() after optimizer.step(), or reset() to drop them."
            )

    def _take_up(self) -> None:
        """Final gradients are Σ/total: as if the total had been the divisor from the start, more
        can come in.
        """
        state = self.state
        state.main.divisor, state.phase, state.asked = (
            float(state.main.weight) or None,
            FILLING,
            False,
        )

    def notice_use(self) -> None:
        """A final window whose gradients were used and cleared, or applied, is over."""
        if self.state.phase is not FINAL:
            return
        marks, applied = self.marks, self.state.applied
        if not applied and marks is not None and (self._final_is_unused or marks.leftovers):
            return
        self.count_update(None)
        self.left, self._left_to_drop = marks, applied

    def count_update(self, squared_norm: float | None) -> None:
        """The window is over: count it, and begin from zero. The gradients are the caller's."""
        whole = self.whole
        if not self.state.is_empty or (whole is not None and whole.micro_batches + whole.skipped):
            self.strategy.end_window(self.weight, squared_norm)
            self.state.updates += 1
        self._clear()

    def require_untouched(self) -> None:
        """Refuse to add to sums that somebody else has changed since (rule 5)."""
        marks, before = self.marks, self.state.unscaled_before
        unscaled = before is not None and times_unscaled(self.scaler, self.optimizer) != before
        if marks is None or (marks.untouched() and not self.parameters_written and not unscaled):
            return
        steps = f"{self.accumulation_steps} of {self.target_steps} micro-batches"
        touch = marks.touch()
        if touch in (Touch.CLEARED, Touch.PARTLY_CLEARED):
            fault = (
                f"The gradients were cleared in the middle of a window ({steps}): what was"
                " accumulated is gone. Call optimizer.zero_grad() only after a step;"
                " `acc.backward(loss); acc.step()` needs none at all."
            )
        elif touch is Touch.CHANGED or unscaled:
            fault = (
                f"The gradients were changed by hand in the middle of a window ({steps}), where"
                " they are sums, not means. Change them after `if acc.is_ready:`, or pass clip= or"
                " scaler= to the accumulator, or run every loss by accumulator.backward(loss)."
            )
        else:
            fault = (
                f"The parameters were updated in the middle of a window ({steps}), with sums for"
                " gradients. Pass the optimizer to the accumulator, or step it when is_ready is"
                " true, or after flush()."
            )
        self.break_off(fault)  # what is there now is nobody's sum
        self.require_intact()

    @property
    def watches_parameters(self) -> bool:
        """Whether somebody else's optimizer could update them unseen."""
        return self.optimizer is None and not self.bare

    @property
    def parameters_written(self) -> bool:
        """Whether anybody has written to a parameter since the window began; never, if that is not
        watched.
        """
        return self.written is not None and [*map(version_of, self.tensors)] != self.written

    def _note_parameters(self) -> None:
        self.written = [*map(version_of, self.tensors)] if self.watches_parameters else None

    def require_parameters_unwritten(self) -> None:
        """After a pass: refuse if parameters were updated while it ran."""
        if self.parameters_written:
            self.break_off(
                "The parameters were updated while a backward pass ran, by an optimizer that steps"
                " in a hook, say. It steps at every micro-batch, with sums for gradients: take the"
                " hooks away and step it when is_ready is true, or use no accumulator."
            )
            self.require_intact()

    def take_marks(self) -> None:
        """The gradients are as we left them; unless a plain pass is adding to them at the
        moment.
        """
        if self.sources is not self.tensors or self.plain.passes:
            self.marks = None  # FSDP moves unreduced gradients about by itself
            return
        marks = self.last_marks
        if marks is None or not marks.refresh():
            marks = self.last_marks = GradientMarks(self.tensors)
        self.marks = marks
        if self.scaler is not None:
            self._note_unscaled()

    # -- plain passes -----------------------------------------------------------------------------

    def admit_plain(self, one: PlainPass) -> float | None:
        """Before a plain pass adds anything: count it, and give the factor for its gradients; or
        refuse it.
        """
        if not self.enabled or belongs_to_another(self, self.tensors):
            return None
        with self.lock:
            self.settled = None
            if self.apart is not None and self.apart != one.thread:
                raise MisuseError(
                    "A plain backward() while another thread is inside micro_batch, or updates. Use"
                    " accumulator.backward(loss), which waits by itself, or join the threads"
                    " before."
                )
            state = self.state
            if state.phase is BROKEN:
                return None
            if self.scaler is not None:
                self._require_scaled(one)
            if self.transaction is not None:
                return self._require_exact(self.transaction.add_plain())
            if self.follows_optimizer and any(tensor.grad is not None for tensor in self.follow()):
                raise MisuseError(
                    "New parameters of the optimizer have gradients of passes that nobody has"
                    " counted. Add them by optimizer.add_param_group, which is noticed at once, and"
                    " call reset() to begin a new window."
                )
            self._begin_plain()
            factor = self._require_exact(self.plain_factor())
            self._book_plain(one)
            self.marks = None  # until it has ended
            return factor

    def _begin_plain(self) -> None:
        """As `begin`, for a plain pass: gradients that were there before the first one are added
        to.
        """
        state, marks = self.state, self.marks
        if marks is None or state.phase is not FILLING or state.is_empty:
            if state.phase is FINAL:
                self._leave_final(plain=True)
            self._require_filling(plain=True)
        elif not marks.untouched() or self.parameters_written or self.scaler is not None:
            self.require_untouched()
        main = self.state.main
        main.divisor = main.divisor or 1.0

    def _book_plain(self, one: PlainPass) -> None:
        present = self.state.open.get(one.thread)
        if one.joins and present is not None and present.plain:
            return
        try:
            self.add(1, thread=one.thread)
            present = self.state.open[one.thread]
            present.plain += 1
            present.reached.add(one.first)
        except BaseException:  # an interrupt: it may be counted, and will add nothing
            self.break_off("A backward pass was interrupted half-way, when it was being counted.")
            raise

    def _require_exact(self, factor: float) -> float:
        if factor != 1.0 and self.widened_float16:
            raise MisuseError(
                "A plain backward() into float16 parameters would have to be multiplied by"
                f" {factor:g}, which rounds it to float16. Use accumulator.backward(loss) for every"
                " loss of the window."
            )
        return factor

    def plain_factor(self) -> float:
        """What a plain pass's gradients are multiplied by, so that it weighs 1 among the sums."""
        state = self.state
        factor = 1.0 / (state.main.divisor or 1.0)
        if state.rescaled and self.transaction is None:
            factor *= state.loss_scale / self.scaler.get_scale()
        return factor

    def end_plain(self, *, complete: bool) -> None:
        """A plain pass has added all of its gradients.

        Args:
            complete: it was the last one that the window waits for.
        """
        with self.lock:
            if self.parameters_written:
                self.require_parameters_unwritten()
            self.take_marks()
            if complete and self.optimizer is None and self.apart is None:
                self.finalise_by_itself()

    def finalise_by_itself(self) -> None:
        """An optimizer that we do not know can step at any moment, so a full window is final
        without being asked.
        """
        if (
            self.optimizer is not None
            or self.step_ends_micro_batch
            or self.bare
            or self.transaction is not None
        ):
            return
        if self.ranks.size > 1 or self.ranks.lockstep or self.plain.passes:
            return
        if self.state.phase is FILLING and not self.state.terms and self.is_full:
            self.finalise(asked=False)

    def _require_scaled(self, one: PlainPass) -> None:
        """With a loss scaler, a plain pass must be one of a loss that it has scaled."""
        scaler = self.scaler
        if scaler is None or one.roots is None or not scaler.is_enabled() or is_scaled(one.roots):
            return
        raise MisuseError(
            "A plain backward() of a loss that the scaler has not scaled. Call"
            " scaler.scale(loss).backward(), or accumulator.backward(loss), which scales it."
        )

    # -- weighing ---------------------------------------------------------------------------------

    def divisor_for(
        self, weight: Number, *, narrow: bool, sums: Iterable[Tensor] | None = None
    ) -> float:
        """The provisional divisor, chosen now if this is the window's first weight, raised if it is
        outgrown.

        `narrow`: float16 or bfloat16 is involved, so the factors should be powers of two where they
        can be.
        """
        main = self.state.main
        if main.divisor is None:
            if not weight:
                return 1.0
            if self.widened_float16:
                # float16 must not meet small factors; float32 has room for sums
                main.divisor = float(weight)
            elif narrow:
                main.divisor = float(weight) * 2.0 ** math.ceil(
                    math.log2(self.strategy.expected_weight(weight) / weight)
                )
            else:
                main.divisor = float(self.strategy.expected_weight(weight))
        if main.lacks_room(weight, _FLOAT16_IN_FLOAT32 if self.widened_float16 else 1.0):
            self.require_quiet("A larger weight")
            present = [one.grad for one in self.sources if one.grad is not None]
            before, self.in_doubt = self.in_doubt, True
            main.make_room(weight, present if sums is None else sums)
            self.in_doubt = before
        return main.divisor

    def term_for(self, name: str, weight: Number) -> Total:
        """A loss term's denominator; its divisor is a power of two, which costs no rounding
        anywhere.
        """
        term = self.state.terms.setdefault(name, Total())
        if term.divisor is None and weight:
            expected = 1.0 if self.widened_float16 else self.strategy.expected_weight(weight)
            term.divisor = 2.0 ** math.ceil(math.log2(expected))
        if term.lacks_room(weight, _FLOAT16_IN_FLOAT32 if self.widened_float16 else 1.0):
            term.make_room(weight, term.gradients.values())
        return term

    def add(
        self, weight: Number, *, squared_norm: float | None = None, thread: int | None = None
    ) -> None:
        """A micro-batch of that weight is in the gradients now."""
        state, one = self.state, self._open(thread)
        if not (state.terms and _joins(one, {""})):
            one.passes += 1
        state.main.weight += weight
        state.had_pass = True
        self.strategy.observe(weight, squared_norm)

    def add_terms(self, weight: Number, names: set[str]) -> None:
        """A micro-batch of terms is in; their totals are kept apart, `weight` is what the first one
        adds.
        """
        one = self._open()
        if not _joins(one, names):
            one.passes += 1
        self.state.had_pass = True
        self.strategy.observe(weight)

    def skip(self) -> None:
        """A micro-batch was left out."""
        self._open().passes += 1
        self.state.skipped += 1

    def _open(self, thread: int | None = None) -> OpenMicroBatch:
        thread = threading.get_ident() if thread is None else thread
        one = self.state.open.get(thread)
        if one is None:
            one = self.state.open[thread] = OpenMicroBatch()
        return one

    def totals(self) -> dict[str, Number]:
        """Every denominator by its term's name; that of the main loss is ""."""
        return {
            "": self.state.main.weight,
            **{name: term.weight for name, term in self.state.terms.items()},
        }

    def end_micro_batch(self) -> bool:
        """What this thread has put in since its last call is one micro-batch; gives whether the
        window is full.

        Passes before the first call count one by one if they fill the window. A thread that has put
        in nothing ends the micro-batches of all others; if there are none either, it counts what
        was put into `.grad` by hand.
        """
        state, thread = self.state, threading.get_ident()
        self.plain.end_micro_batch(thread)
        if state.phase is FINAL and not state.asked and self._final_is_unused:
            self._take_up()
        if state.phase is not FILLING:
            return True
        closing = [thread] if thread in state.open else list(state.open)
        if not closing:
            self._count_by_hand()
        for one in closing:
            self._close(one)
        full = not state.is_empty and self.strategy.is_complete(state.micro_batches, self.weight)
        if full:  # else the next pass looks
            self.require_untouched()
        return full

    def end_settled_micro_batch(self) -> bool | None:
        """End a micro-batch of one usual pass; gives whether the window is full, None if it goes
        the long way (rule 6).

        Needs `turn`. A full window is left as it is if its gradients are not.
        """
        state, settled, thread = self.state, self.settled, threading.get_ident()
        one = state.open.get(thread)
        if settled is None or not self.step_ends_micro_batch or one is None or one.passes != 1:
            return None
        taken = state.micro_batches + 1
        full = self.strategy.is_complete(taken, state.main.weight)
        if full and not settled.is_as_left():
            return None
        state.micro_batches = taken
        del state.open[thread]
        return full

    def _close(self, thread: int) -> None:
        state = self.state
        one = state.open[thread]
        # passes that began at different tensors are parts of one micro-batch
        if not self.step_ends_micro_batch:
            parts = one.passes == one.plain == len(one.reached) > 1
            self.step_ends_micro_batch = parts or not self.is_full
        if one.passes > 1 and self.step_ends_micro_batch:
            state.main.weight -= max(0, one.plain - 1)
            one.passes = 1
        state.micro_batches += one.passes
        del state.open[thread]

    def close_all(self) -> None:
        """The window ends: what any thread has put in is in the gradients, and counts."""
        for thread in list(self.state.open):
            if self.step_ends_micro_batch:
                self._close(thread)
            else:
                self.state.micro_batches += self.state.open.pop(thread).passes

    def _count_by_hand(self) -> None:
        """A micro-batch that no pass has made: new gradients in `.grad`, or, over several
        processes, none at all.
        """
        state, marks = self.state, self.marks
        if state.is_empty:
            new = self._put_into_empty()
        else:
            new = marks is not None and not marks.untouched()
            self._require_not_of_others(new)
            if marks is not None and (
                self.parameters_written
                or (new and (state.had_pass or marks.touch() is not Touch.CHANGED))
            ):
                self.require_untouched()
        if not new and self.ranks.size == 1:
            return
        state.main.divisor = state.main.divisor or (1.0 if new else None)
        state.main.weight += int(new)
        state.micro_batches += 1
        self.strategy.observe(int(new))
        self.take_marks()

    def _put_into_empty(self) -> bool:
        """Whether somebody has put gradients where the last window's were, or none."""
        present = sum(source.grad is not None for source in self.sources)
        old = 0 if self.left is None else self.left.still_there
        if present > old:
            if old and not self._left_to_drop:
                raise MisuseError(
                    f"{old} of {present} gradients in `.grad` are those of the last window, which"
                    " were used. Call optimizer.zero_grad() after optimizer.step(), or reset() to"
                    " drop them."
                )
            self._require_not_of_others(True)
            claim(self, self.tensors)
            self._drop_left()
            self.left = None
            self._note_parameters()
        return present > old

    def _require_not_of_others(self, new: bool) -> None:
        """Refuse to take for put by hand what another window's pass has added."""
        if new and self.plain.reached_by_others:
            raise MisuseError(
                f"Another accumulator's backward() has reached {len(self.plain.reached_by_others)}"
                f" of these {len(self.tensors)} parameters, with gradients that are divided by a"
                " number of its own. Call loss.backward(), which both accumulators count, or"
                " reset() on this one to drop them."
            )

    # -- ending -----------------------------------------------------------------------------------

    def step(self) -> None:
        """End a micro-batch."""
        with self.alone("step()"):
            self.require_intact()
            if self.end_micro_batch():
                self.finalise()

    def reset(self) -> None:
        """Forget the window and its gradients, and start the next."""
        with self.alone_after_failure("reset()"):
            self.drop()

    @contextlib.contextmanager
    def alone_after_failure(self, call: str) -> Iterator[None]:
        """As `alone`, and what has died half-way is forgotten."""
        if self.plain.passes and self.plain.any_died():
            self.plain.abandon()
        with self.alone(call):
            yield

    def drop(self) -> None:
        """Take all gradients away, and begin anew; the strategy learns that this window was
        nothing.
        """
        for source in (*self.tensors, *self.sources):
            source.grad = None
        self.left = self.transaction = None
        self.plain.abandon()
        if not self.state.is_empty:
            self.strategy.end_window(self.weight, None)
        self._clear()

    def meet(self, *, flushing: bool = False, joined: bool = False, scale: float = 1.0) -> AllParts:
        """Learn, once per window, what all processes hold; the totals are everybody's from here
        on.
        """
        if self.whole is None:
            ranks, state = self.ranks, self.state
            reduces = ranks.size > 1 or ranks.lockstep
            present, sparse = (
                present_in(self.sources, state.terms.values()) if reduces else ((), ())
            )
            broken = state.phase is BROKEN or self.in_doubt or self.plain.any_died()
            part = AllParts(
                self.totals(), self.accumulation_steps - state.skipped, state.skipped, self.notes,
                state.loss_scale, scale, flushing, joined, present, sparse, broken,
            )  # fmt: skip
            self.whole = ranks.meet(part)
            if self.whole is not part:
                state.loss_scale = self.whole.base
                for name, total in self.whole.weights.items():
                    (state.terms.setdefault(name, Total()) if name else state.main).weight = total
        return self.whole

    def settle_weight(self, weight: Number, *, whole: bool) -> None:
        """The weights that came in stood for others, which were on a device: this is what they add
        up to.

        `whole`: there was one micro-batch, a mean, which is its own divisor.
        """
        self.state.main.weight = weight
        if whole and weight:
            self.state.main.divisor = float(weight)

    def combine(self) -> float:
        """Bring every sum of every process into `.grad`; gives the factor that is still to be
        multiplied by.
        """
        state, alone = self.state, self.ranks.size == 1 and not self.ranks.lockstep
        if not alone:
            self.meet()  # which also tells the others if this window is broken
        self.require_intact()
        if state.phase is not FILLING:
            return 1.0
        factor = state.main.factor
        if state.terms or not alone:
            self.in_doubt = True
            if state.terms:
                with torch.no_grad():
                    for source in self.sources:
                        if factor != 1.0 and source.grad is not None:
                            source.grad.mul_(factor)
                    for term in state.terms.values():
                        term.pour_into(self.sources)
                factor = 1.0
            factor = self.ranks.reduce(self, self.meet(), factor)
            scale_gradients(self.tensors, factor)
            state.phase, factor = REDUCED, 1.0
            self.in_doubt = False
            self.take_marks_of_tensors()
        return factor

    def finalise(self, *, asked: bool = True) -> None:
        """Make `.grad` the mean over the window, once. Nobody else may add to it meanwhile.

        Not `asked`: a pass has ended this moment, and its gradients were marked.
        """
        state = self.state
        if state.phase is FILLING and asked:
            self.require_untouched()
        self.settled = None
        if state.phase is not FINAL:
            factor = self.combine()
            self.in_doubt = True
            scale_gradients(self.tensors, factor)
            state.phase = FINAL
            self.in_doubt = False
            self.take_marks_of_tensors()
        state.asked = state.asked or asked

    def take_marks_of_tensors(self) -> None:
        """The parameters' own gradients are as we left them."""
        marks = self.last_marks
        if marks is None or not marks.refresh():
            marks = self.last_marks = GradientMarks(self.tensors)
        marks.note_parameters()
        self.marks = marks
        self._note_unscaled()

    def _note_unscaled(self) -> None:
        """torch's scaler changes gradients without a new version; that it did is told by its
        calls.
        """
        if self.scaler is not None:
            self.state.unscaled_before = times_unscaled(self.scaler, self.optimizer)


def _joins(one: OpenMicroBatch, names: set[str]) -> bool:
    """Whether losses of these names are of the micro-batch that is open: it has each loss once."""
    joins = bool(one.passes) and names.isdisjoint(one.losses or {""})
    one.losses = (one.losses or {""}) | names if joins else names
    return joins
