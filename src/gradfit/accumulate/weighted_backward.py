"""Backward passes into a window: with a weight, by terms, or as a micro-batch that can be taken
back.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch
from gradfit.accumulate.counted_micro_batches import add, add_terms, skip
from gradfit.accumulate.provisional_divisor import divisor_for, term_for
from gradfit.accumulate.scaling import back_off, gradient_norm, nonfinite_gradient
from gradfit.accumulate.transaction import Transaction, zero
from gradfit.accumulate.usual_pass import NARROW, UsualPass
from gradfit.accumulate.window import Window
from gradfit.accumulate.window_marks import require_parameters_unwritten, take_marks
from gradfit.accumulate.window_members import follow_optimizer
from gradfit.accumulate.window_state import Phase, Total
from gradfit.arguments import Number
from gradfit.errors import MisuseError
from gradfit.own_passes import OWN_PASSES, owner_of

_INITIAL_KEPT = 256


class Backpropagator:
    """Runs the passes that the accumulator weighs itself, and books them in the window. All of it
    needs its turn.
    """

    def __init__(
        self,
        window: Window,
        *,
        scaler: Any,
        dtype: torch.dtype | None,
        isolate: bool,
        skip_nonfinite: bool,
    ) -> None:
        self.window, self.scaler, self.isolate = window, scaler, isolate
        self.skip_nonfinite = skip_nonfinite or scaler is not None
        self.can_take_back = isolate or dtype is not None
        self._settles = scaler is None and not self.can_take_back and window.hears_of_steps
        self._initial: dict[tuple[float, torch.dtype, torch.Size], Tensor] = {}

    def backward(
        self, loss: Tensor | None, weight: Number, reduction: str, times: Tensor | None = None
    ) -> None:
        """One loss, the mean over `weight` items or their sum, multiplied by `times`; what a loss
        without weight reaches has zeros.
        """
        window, transaction = self.window, self.window.transaction
        if not weight:
            self._reach(loss)
            add(window, 0) if transaction is None else transaction.add(0)
            take_marks(window)
            return
        assert loss is not None
        if transaction is None and not self.isolate:
            self._backward_into_sums(loss, weight, reduction, times)
            return
        loss = loss if times is None else loss * times
        if transaction is not None:
            self._backward_into(transaction, loss, weight, reduction)
        else:
            self._backward_apart(loss, weight, reduction)

    def _backward_into_sums(
        self, loss: Tensor, weight: Number, reduction: str, times: Tensor | None
    ) -> None:
        window = self.window
        divisor = divisor_for(window, weight, narrow=loss.dtype in NARROW or window.narrow)
        factor = (weight if reduction == "mean" else 1) / divisor
        factor *= self._rescale()
        if self.can_take_back and self._is_rounded(factor):
            loss = loss if times is None else loss * times
            self._backward_apart(loss, weight, reduction)
            return
        window.in_doubt, window.marks = True, None
        self._run(loss, factor, times=times)
        with window.lock:
            add(window, weight)
            if self._is_only_pass:
                window.in_doubt = False
                return
            take_marks(window)
            window.in_doubt = False
            self._settle(loss, weight)

    @property
    def _is_only_pass(self) -> bool:
        """Whether the window's owner ends it right after this pass: nobody's code runs between."""
        return self.window.bare and self.window.target_steps == 1

    def _settle(self, loss: Tensor, weight: Number) -> None:
        """The next pass can go the short way if nothing else happens until then."""
        window = self.window
        if self._settles and window.marks is not None and not window.state.terms:
            window.settled = UsualPass(window, self.initial_for, loss, weight)

    def _is_rounded(self, factor: float) -> bool:
        """Whether a factor must be multiplied in at the sums, because the parameters' own type
        would round it.

        bfloat16 takes a power of two as it is; in float16, which has few exponents, gradients would
        vanish under it.
        """
        window = self.window
        if window.widened_float16:
            return factor != 1.0
        return window.narrow and math.frexp(factor)[0] != 0.5

    def _backward_apart(self, loss: Tensor, weight: Number, reduction: str) -> None:
        with self.transact(None) as transaction:
            self._backward_into(transaction, loss, weight, reduction)

    def _backward_into(
        self, transaction: Transaction, loss: Tensor, weight: Number, reduction: str
    ) -> None:
        self._run(loss, transaction.factor_for(weight, reduction))
        transaction.add(weight)
        take_marks(self.window)

    def _reach(self, loss: Any, *, retain_graph: bool = False) -> None:
        """A loss without weight, NaN perhaps: what it reaches has a gradient of zeros, as in plain
        torch.
        """
        sources = self.window.sources
        if not _has_graph(loss) or self._would_change_nothing():
            return
        reached: dict[int, Tensor] = {}
        with self._apart(), _separate_gradients(sources, reached):
            self._run(loss, 0.0, retain_graph)
        for position, gradient in reached.items():
            if sources[position].grad is None:
                sources[position].grad = zero(gradient)

    def _would_change_nothing(self) -> bool:
        """Whether zeros would add nothing to gradients that are all there, and no other process
        waits for a pass.
        """
        window = self.window
        return not window.ranks.lockstep and all(
            source.grad is not None for source in window.sources
        )

    def backward_terms(self, terms: dict[str, tuple[Tensor, Number]]) -> None:
        """One pass per term, into sums of its own: what divides them is known only at the end."""
        window = self.window
        with contextlib.ExitStack() as stack:
            if self.isolate and window.transaction is None:
                stack.enter_context(self.transact(None))
            if window.transaction is None:
                stack.enter_context(self._apart())
                window.in_doubt = True
            rescale = 1.0 if window.transaction is not None else self._rescale()
            last = _last_pass(terms)
            for name, (loss, weight) in terms.items():
                # the terms share one graph, which the last pass through it frees
                self._backward_term(name, loss, weight, rescale, last not in (None, name))
            self._book_terms(terms)

    def _backward_term(
        self, name: str, loss: Tensor, weight: Number, rescale: float, retain: bool
    ) -> None:
        """One pass of a term, into the window's sums of it or the transaction's."""
        window, transaction = self.window, self.window.transaction
        sums = term_for(window, name, weight)
        if not weight:
            self._reach(loss, retain_graph=retain)
            return
        if transaction is not None:
            sums = transaction.terms.setdefault(name, Total(0, sums.divisor))
        with _separate_gradients(window.sources, sums.gradients):
            self._run(loss, rescale / (sums.divisor or 1.0), retain)
        sums.weight += weight

    def _book_terms(self, terms: dict[str, tuple[Tensor, Number]]) -> None:
        """All terms of a micro-batch are in."""
        window, transaction = self.window, self.window.transaction
        if transaction is not None:
            transaction.had_pass = True
            transaction.names.update(terms)
            take_marks(window)
            return
        add_terms(window, next(iter(terms.values()))[1], set(terms))
        take_marks(window)
        window.in_doubt = False

    def _run(
        self,
        loss: Tensor,
        factor: float,
        retain_graph: bool = False,
        *,
        times: Tensor | None = None,
    ) -> None:
        """One pass with a factor, which is the loss's own gradient; `times` another one."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        initial = self.initial_for(loss, factor) if times is None else _times(times, factor, loss)
        own, thread = OWN_PASSES, threading.get_ident()
        outermost = owner_of(thread) is None
        try:
            if outermost:
                own[thread] = self.window.plain.token
            _run_engine(loss, initial, retain_graph)
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            if outermost:
                own.pop(thread, None)
        require_parameters_unwritten(self.window)

    def _note_failure(self, error: BaseException) -> None:
        if self.window.in_doubt:
            self.window.break_off()
        self.window.ranks.failed(error)

    def initial_for(self, loss: Tensor, factor: float) -> Tensor:
        """A loss's own gradient, made once per value; on an accelerator in each pass, as torch
        does: a block that stays would lie between those of the passes.
        """
        if not loss.is_cpu:
            return torch.full_like(loss, factor, requires_grad=False)
        key = (factor, loss.dtype, loss.shape)
        initial = self._initial.get(key)
        if initial is None:
            if len(self._initial) >= _INITIAL_KEPT:
                self._initial.clear()
            initial = self._initial[key] = torch.full(
                loss.shape, factor, dtype=loss.dtype, device=loss.device
            )
        return initial

    def _rescale(self) -> float:
        """What brings gradients at the present loss scale to the scale the window began with; 1
        unless somebody has changed it since: a skip, or an update of another optimizer.
        """
        if self.scaler is None:
            return 1.0
        return self.window.state.carried.over_present(self.scaler)

    # -- transactions -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, `.grad` is something else than the window's sums: no plain pass may add to it."""
        window = self.window
        before = window.apart
        window.set_apart("accumulator.backward()")
        try:
            yield
        finally:
            window.apart = before

    @contextlib.contextmanager
    def transact(self, weight: Number | None, *, block: bool = False) -> Iterator[Transaction]:
        """A micro-batch that comes in whole or not at all; `block` if what is inside is the
        user's.
        """
        window = self.window
        with self._apart():
            marks, terms = window.marks, set(window.state.terms)
            transaction = window.transaction = Transaction(window.sources, weight)
            try:
                window.block = threading.get_ident() if block else None
                take_marks(window)
                yield transaction
                self._commit(transaction)
            except BaseException:
                self._take_back(transaction, terms)
                window.marks = marks
                raise
            finally:
                window.transaction = window.block = None
                window.plain.end_micro_batch(threading.get_ident())
            take_marks(window)

    def _take_back(self, transaction: Transaction, terms: set[str]) -> None:
        window = self.window
        if transaction.adds_up:  # it was interrupted while it was added to the sums
            window.break_off()
            return
        follow_optimizer(window)
        transaction.roll_back()
        for name in set(window.state.terms) - terms:
            del window.state.terms[name]
        window.state.phase, window.in_doubt = Phase.FILLING, False
        window.plain.abandon()

    def _commit(self, transaction: Transaction) -> None:
        window = self.window
        window.require_intact()
        follow_optimizer(window)
        self._require_untouched_inside()
        if transaction.is_empty and transaction.declared != 0:
            transaction.roll_back()
            return
        norm = gradient_norm(transaction.gradients()) if transaction.weighs else 0.0
        if math.isfinite(norm):
            self._add_all(transaction, norm)
        else:
            self._leave_out(transaction)

    def _require_untouched_inside(self) -> None:
        marks = self.window.marks
        if marks is not None and not marks.untouched():
            raise MisuseError(
                "The gradients were cleared or changed by hand inside micro_batch. Leave"
                " optimizer.zero_grad(), clipping and unscaling out of the block; the micro-batch"
                " was taken back, and can be repeated."
            )

    def _add_all(self, transaction: Transaction, norm: float) -> None:
        """Add a micro-batch whose gradients are finite, its loss terms included."""
        rescale = self._rescale()
        if transaction.weight:
            self._add(transaction, norm, rescale)
        else:
            self._add_weightless(transaction)
        self._add_terms(transaction, rescale)

    def _leave_out(self, transaction: Transaction) -> None:
        """A micro-batch with a NaN or an infinity: skip it, or stop if that was not asked for."""
        window = self.window
        if not self.skip_nonfinite:
            error = nonfinite_gradient(
                window.sources, "this micro-batch", "on_nonfinite='skip' leaves it out."
            )
            window.ranks.failed(error)
            raise error
        back_off(self.scaler)
        transaction.roll_back()
        skip(window)

    def _add_weightless(self, transaction: Transaction) -> None:
        """A micro-batch whose main loss has no weight: it may still have terms that do."""
        transaction.roll_back_to_zero()
        first = next((term.weight for term in transaction.terms.values()), 0)
        transaction.adds_up = True
        add_terms(self.window, first, transaction.names or {""})

    def _add_terms(self, transaction: Transaction, rescale: float) -> None:
        """Add each loss term's gradients to the window's sums of that term."""
        for name, term in transaction.terms.items():
            total = term_for(self.window, name, term.weight)
            factor = rescale * (term.divisor or 1.0) / (total.divisor or 1.0)
            total.take(term.gradients, factor)
            total.weight += term.weight

    def _add(self, transaction: Transaction, norm: float, rescale: float) -> None:
        """Add a micro-batch to the window's sums, in their own precision."""
        window, weight = self.window, transaction.weight
        transaction.adds_up = True
        divisor = divisor_for(window, weight, narrow=True, sums=transaction.sums)
        reference = transaction.reference or 1
        transaction.commit(reference / divisor * rescale)
        scale = window.state.loss_scale / rescale  # the present one
        add(window, weight, squared_norm=(norm / scale * reference / weight) ** 2)


def _last_pass(terms: dict[str, tuple[Tensor, Number]]) -> str | None:
    """The last term that is backpropagated; None if none is."""
    live = [name for name, (loss, weight) in terms.items() if weight or _has_graph(loss)]
    return live[-1] if live else None


def _has_graph(loss: Any) -> bool:
    return isinstance(loss, Tensor) and loss.requires_grad


@contextlib.contextmanager
def _separate_gradients(tensors: Sequence[Any], sums: dict[int, Tensor]) -> Iterator[None]:
    """Let autograd add to `sums` instead of `.grad`, without a copy."""
    kept = [tensor.grad for tensor in tensors]
    for position, tensor in enumerate(tensors):
        tensor.grad = sums.get(position)
    try:
        yield
    finally:
        for position, (tensor, gradient) in enumerate(zip(tensors, kept, strict=True)):
            if tensor.grad is not None:
                sums[position] = tensor.grad
            tensor.grad = gradient


def _times(number: Tensor, factor: float, loss: Tensor) -> Tensor:
    """The gradient that `loss` gets from `factor` times the loss times `number`: its bits, too."""
    wide = torch.promote_types(number.dtype, loss.dtype)
    with torch.no_grad():
        number = number.to(wide) if factor == 1.0 else number.to(wide) * factor
        return number.to(loss.dtype).reshape(loss.shape)


def _run_engine(loss: Tensor, initial: Tensor, retain_graph: bool) -> None:
    if type(loss) is Tensor:
        _torch.run_backward(loss, initial, retain_graph)
    else:  # a subclass has its own say
        torch.autograd.backward(loss, initial, retain_graph=retain_graph)
