"""One accumulation window: what it holds, what that weighs, and when it is full.

The gradients of a window live in the tensors' own `.grad`. Micro-batch i is backpropagated with the factor wᵢ/D, where
D is a provisional divisor, chosen from the first weight; when the window is full the gradients are multiplied by D/Σw.
So the total need not be known beforehand, partial sums stay in the range of a mean, and if D was guessed right (equal
micro-batches) there is nothing left to multiply.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.finals import FinalGradients
from gradfit.accumulate.marks import mark, unmark
from gradfit.accumulate.numbers import Number, read_count
from gradfit.accumulate.options import read_members
from gradfit.accumulate.plain_backwards import NoPlainBackwards
from gradfit.accumulate.ranks import ALONE, Alone, Whole, present_in, ranks_of, wrapped_since
from gradfit.accumulate.scaling import scale_gradients
from gradfit.accumulate.strategy import FixedStepCount, Strategy
from gradfit.accumulate.transaction import Total, Transaction
from gradfit.errors import MisuseError


class Window:
    """The micro-batches of one update: `target_steps` of them, or what a strategy asks for, become one mean gradient.

    A bare window holds what its owner puts in, by `Backpropagator`, and nothing else; `AccumulationContext` is one that
    also counts plain `loss.backward()` calls. Either way it begins anew once it was used.
    """

    def __init__(self, target_steps: int, *, strategy: Strategy | None = None) -> None:
        self.strategy = FixedStepCount(read_count(target_steps, "target_steps")) if strategy is None else strategy
        self.tensors: list[Tensor] = []
        self.ids: set[int] = set()  # of the tensors
        self.ranks: Alone = ALONE
        self.sources: Sequence[Any] = self.tensors  # whose `.grad` autograd adds to
        self._found_alone = True  # nobody shares the tensors, as far as was seen when they were registered
        self.lock = threading.RLock()
        self.plain = NoPlainBackwards()
        self.delimited = False  # step() was seen to end micro-batches, so passes between two calls are one
        self.enabled = True
        self.transaction: Transaction | None = None
        self.plain_expected = True  # until a whole window had none: then D need not be 1
        self._clear()

    def _clear(self) -> None:
        self.closed = 0  # micro-batches ended by step()
        self.open = 0  # backward passes since
        self.open_plain = 0
        self.reached: set[int] = set()  # the first tensor of each of those that were plain
        self.losses: set[str] = set()  # the loss terms among them; "" is the main loss
        self.skipped = 0
        self.main = Total()
        self.terms: dict[str, Total] = {}
        self.final = False
        self.applied = False
        self.broken = False
        self.had_plain = False
        self.scale = 1.0  # the loss scale that the sums carry
        self.notes: dict[str, float] = {}  # for whoever ends the window: numbers to be added up over all processes
        self.whole: Whole | None = None  # what all processes hold, once they have met
        self.rescaled = False  # the scaler has another one by now
        self._finals: FinalGradients | None = None
        self.plain.end_micro_batch()
        self.ranks.release()

    # -- what the seed calls it -----------------------------------------------------------------------------------

    @property
    def target_steps(self) -> int:
        """How many micro-batches fill the window; an estimate if the strategy goes by their sizes."""
        if isinstance(self.strategy, FixedStepCount):
            return self.strategy.steps
        steps, progress = self.accumulation_steps, self.strategy.progress(self.accumulation_steps, self.weight)
        return max(1, steps if progress >= 1 else math.ceil(steps / progress) if progress else steps + 1)

    @property
    def accumulation_steps(self) -> int:
        """How many micro-batches the window holds, skipped ones included."""
        return self.closed + (min(1, self.open) if self.delimited else self.open)

    @property
    def weight(self) -> Number:
        """What the window weighs: by the first term if there are only terms."""
        if self.main.weight or not self.terms:
            return self.main.weight
        return next(iter(self.terms.values())).weight

    @property
    def is_full(self) -> bool:
        """Whether the window holds enough, without doing anything about it."""
        steps = self.accumulation_steps
        return steps > 0 and self.strategy.is_complete(steps, self.weight)

    @property
    def is_ready(self) -> bool:
        """Whether the window is full; if it is, its gradients are normalised from here on."""
        self.require_intact()
        self.plain.end_micro_batch()
        if self.is_full:
            self.finalise()
        return self.is_full

    def register_tensor(self, tensor: Tensor) -> None:
        """Accumulate into this tensor; it must be a leaf of floating point type, and may be frozen for now."""
        self.register_all([tensor], "tensor")

    def step(self) -> None:
        """End a micro-batch."""
        with self.lock:
            if self.end_micro_batch():
                self.finalise()

    def reset(self) -> None:
        """Forget the window and its gradients, and start the next."""
        for source in (*self.tensors, *self.sources):
            source.grad = None
        self.plain.abandon()
        self._clear()

    def close(self) -> None:
        """Stop counting; the tensors and their `.grad` are left as they are."""
        self.plain.close()
        unmark(self, self.tensors)
        self.tensors, self.ids = [], set()
        self._find_ranks()
        self._clear()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(target_steps={self.target_steps}, accumulation_steps={self.accumulation_steps}, "
            f"tensors={len(self.tensors)})"
        )

    # -- membership -----------------------------------------------------------------------------------------------

    def register_all(self, tensors: Iterable[Tensor], name: str) -> None:
        """Register tensors, all or none."""
        new = read_members(tensors, self.ids, name)
        self.tensors += new
        self.ids.update(map(id, new))
        mark(self, new)
        for tensor in new:
            self.plain.watch(tensor)
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

    def _find_ranks(self) -> None:
        self.ranks.close()
        self.ranks = ranks_of(self.tensors, self) if self.tensors else ALONE
        self.sources = self.ranks.sources(self.tensors)
        self._found_alone = self.ranks is ALONE

    def _look_again(self) -> None:
        """Before the first pass: are the tensors still nobody else's?"""
        self._found_alone = False
        error = wrapped_since(self.tensors, self)
        if error is not None:
            self.broken = True
            raise error

    # -- weighing -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a contribution: what a user has consumed is over, what is final and unused is taken up again."""
        if self.broken or self.plain.passes:
            self.require_intact()
        if self._found_alone:
            self._look_again()
        if not self.final:
            return
        finals = self._finals
        if finals is None or self.applied or finals.are_used():
            if finals is not None and self.applied:
                finals.clear()
            self._clear()
        elif self.terms:
            raise MisuseError(_UNUSED)
        else:  # the gradients are now Σ/total: as if the total had been the divisor from the start
            self.main.divisor, self.final, self._finals = float(self.main.weight), False, None

    def divisor_for(self, weight: Number, *, narrow: bool) -> float:
        """The provisional divisor, chosen now if this is the window's first weight.

        `narrow`: float16 or bfloat16 is involved, so the factors should be powers of two where they can be.
        """
        main = self.main
        if main.divisor is None:
            if not weight:
                return 1.0
            if narrow:
                main.divisor = float(weight) * 2.0 ** math.ceil(
                    math.log2(self.strategy.expected_weight(weight) / weight)
                )
            elif weight == 1 and self.plain_expected:
                main.divisor = 1.0  # a plain backward may follow, and its factor is 1
            else:
                main.divisor = float(self.strategy.expected_weight(weight))
        return main.divisor

    def term_for(self, name: str, weight: Number) -> Total:
        """A loss term's denominator; its divisor is a power of two, which costs no rounding anywhere."""
        term = self.terms.setdefault(name, Total())
        if term.divisor is None:
            term.divisor = 2.0 ** round(math.log2(self.strategy.expected_weight(weight))) if weight else None
        return term

    def add(self, weight: Number, *, squared_norm: float | None = None) -> None:
        """A micro-batch of that weight is in the gradients now."""
        if not (self.terms and self._joins({""})):
            self.open += 1
        self.main.weight += weight
        self.strategy.observe(weight, squared_norm)

    def add_terms(self, weight: Number, names: set[str]) -> None:
        """A micro-batch of terms is in; their totals are kept apart, `weight` is what the first one adds."""
        if not self._joins(names):
            self.open += 1
        self.strategy.observe(weight)

    def _joins(self, names: set[str]) -> bool:
        """Whether losses of these names are of the micro-batch that is open: it has each loss once."""
        joins = bool(self.open) and names.isdisjoint(self.losses or {""})
        self.losses = (self.losses or {""}) | names if joins else names
        return joins

    def totals(self) -> dict[str, Number]:
        """Every denominator by its term's name; that of the main loss is ""."""
        return {"": self.main.weight, **{name: term.weight for name, term in self.terms.items()}}

    def skip(self) -> None:
        """A micro-batch took its turn and left nothing."""
        self.open += 1
        self.skipped += 1

    def count_plain(self, joins: bool, first: Tensor) -> None:
        """A plain pass has added to the gradients, of `first` so far; `joins`: it shares the last one's micro-batch."""
        if not self.enabled:
            return
        with self.lock:
            if self.transaction is not None:
                self.transaction.add_plain()
                return
            if self._found_alone:
                self._look_again()
            if self.final:
                if self._finals is not None and not self._finals.are_used(passes=1):
                    self.broken = True
                    raise MisuseError(_UNUSED)
                self._clear()
            if self.main.divisor is None:
                self.main.divisor = 1.0
            if self.main.divisor != 1.0:
                self.broken = True
                raise MisuseError(
                    f"A plain backward() came into a window whose gradients are divided by {self.main.divisor:g}: its "
                    "weight of 1 is lost. Use accumulator.backward(loss) for every loss, then call reset() and repeat."
                )
            if self.rescaled:
                self.broken = True
                raise MisuseError(
                    "A plain backward() after the loss scale has changed in the middle of the window. Put every "
                    "micro-batch into `with accumulator.micro_batch():`, or use accumulator.backward(loss)."
                )
            self.plain_expected = self.had_plain = True
            if joins and self.open_plain:
                return
            self.open_plain += 1
            self.reached.add(id(first))
            self.add(1)

    def end_micro_batch(self) -> bool:
        """What has come since the last call is one micro-batch, unless the window is full of such passes already.

        Gives whether the window is full.
        """
        if self.broken or self.plain.passes:
            self.require_intact()
        self.plain.end_micro_batch()
        if not self.open:
            if self.is_full:  # and the update failed
                return True
            self.begin()
            if self.main.divisor is None:
                self.main.divisor = 1.0
            by_hand = self.ranks.size == 1 or any(source.grad is not None for source in self.sources)
            self.add(1 if by_hand else 0)  # gradients put there by hand, or a process that has none
        if not self.delimited:  # passes that began at different tensors are parts of one micro-batch
            parts = self.open == self.open_plain == len(self.reached) > 1
            self.delimited = parts or not self.is_full
        if self.open > 1 and self.delimited:
            self.main.weight -= max(0, self.open_plain - 1)
            self.open = 1
        self.closed += self.open
        self.open = self.open_plain = 0
        if self.reached or self.losses:
            self.reached, self.losses = set(), set()
        return self.strategy.is_complete(self.closed, self.weight)

    # -- ending ---------------------------------------------------------------------------------------------------

    def meet(self, *, flushing: bool = False, joined: bool = False, scale: float = 1.0) -> Whole:
        """Learn, once per window, what all processes hold; the totals are everybody's from here on."""
        if self.whole is None:
            ranks = self.ranks
            reduces = ranks.size > 1 or ranks.lockstep
            present, sparse = present_in(self.sources, self.terms.values()) if reduces else ((), ())
            steps, skipped, broken = self.accumulation_steps, self.skipped, self.broken or self.plain.found_dead
            part = Whole(
                self.totals(), steps - skipped, skipped, self.notes, self.scale, scale, flushing, joined, present,
                sparse, broken,
            )  # fmt: skip
            self.whole = ranks.meet(part)
            if self.whole is not part:
                self.scale = self.whole.base
                for name, total in self.whole.weights.items():
                    (self.terms.setdefault(name, Total()) if name else self.main).weight = total
        return self.whole

    def combine(self) -> float:
        """Bring every sum of every process into `.grad`; gives the factor that is still to be multiplied by."""
        whole = self.whole or self.meet()
        if self.broken or self.plain.passes:
            self.require_intact()
        if self.final:
            return 1.0
        factor = self.main.factor
        if self.terms:
            with torch.no_grad():
                for source in self.sources:
                    if factor != 1.0 and source.grad is not None:
                        source.grad.mul_(factor)
                for term in self.terms.values():
                    term.pour_into(self.sources)
            factor = 1.0
        self.final = bool(self.terms) or self.ranks.size > 1 or self.ranks.lockstep
        return self.ranks.reduce(self, whole, factor)

    def finalise(self, *, normalised: bool = False) -> None:
        """Make `.grad` the mean over the window, once; `normalised` if it is already."""
        if self.final and self._finals:
            return
        if not normalised:
            scale_gradients(self.tensors, self.combine())
        self.final, self._finals = True, FinalGradients(self.tensors)

    def end(self) -> None:
        """The window was used: count from zero. The gradients are the caller's."""
        self.plain_expected = self.had_plain
        self._clear()

    def break_off(self) -> None:
        """A backward pass died half-way: part of its gradients are in, and cannot be told from the rest."""
        self.broken = True

    def require_intact(self) -> None:
        """Refuse to go on with gradients that hold half a micro-batch."""
        if self.broken or self.plain.found_dead:
            raise MisuseError(
                "A backward pass failed half-way, so the window holds part of a micro-batch. Call reset() and repeat "
                "it; with isolate=True, `with accumulator.micro_batch():` leaves the window as it was before."
            )


_UNUSED = (
    "The window is full and its gradients are final, but neither a step nor zero_grad came before the next backward. "
    "Step the optimizer and zero the gradients once is_ready is true, or call reset()."
)
