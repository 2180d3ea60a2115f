"""Backward passes into a window: with a weight, by terms, or as a micro-batch that can be taken back."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch
from gradfit.accumulate.numbers import Number
from gradfit.accumulate.plain_backwards import OWN_PASSES
from gradfit.accumulate.scaling import back_off, gradient_norm, nonfinite_gradient
from gradfit.accumulate.transaction import Total, Transaction, add_scaled
from gradfit.accumulate.window import Window

_NARROW = (torch.float16, torch.bfloat16)
_SEEDS_KEPT = 256


class Backpropagator:
    """Runs the passes that the accumulator weighs itself, and books them in the window."""

    def __init__(
        self,
        window: Window,
        *,
        scaler: Any,
        dtype: torch.dtype | None,
        isolate: bool,
        skip_nonfinite: bool,
    ) -> None:
        self.window, self.scaler, self.dtype, self.isolate = window, scaler, dtype, isolate
        self.skip_nonfinite = skip_nonfinite or scaler is not None
        self.can_take_back = isolate or dtype is not None
        self.exclusive = threading.RLock()  # held while `.grad` is not the window's sums
        self.one_at_a_time = self.can_take_back  # no pass may run beside one whose gradients are apart
        self.narrow = False
        self._seeds: dict[tuple[float, torch.dtype, torch.device, torch.Size], Tensor] = {}
        self.known: dict[tuple[int, float | None, torch.dtype, torch.device, torch.Size], Tensor] = {}
        """Seeds of passes that needed nothing but one: by the weight and divisor of a mean, and the loss's kind."""

    def begin_window(self) -> None:
        """See whether a parameter's type is too narrow for the factors: narrower than the sums, or float16."""
        types = {tensor.dtype for tensor in self.window.tensors}
        wide = self.dtype
        if wide is None:
            self.narrow = torch.float16 in types
        else:
            self.narrow = any(one != torch.promote_types(one, wide) for one in types)
        if self.scaler is not None:
            self.window.scale = self.scaler.get_scale()

    def backward(self, loss: Tensor | None, weight: Number, reduction: str) -> None:
        """One loss, the mean over `weight` items or their sum; a weight of 0 is booked, and nothing is run."""
        window, transaction = self.window, self.window.transaction
        if not weight or loss is None:
            if window.ranks.lockstep and loss is not None and loss.requires_grad:
                with self.exclusive, _separate_gradients(window.sources, {}):
                    self._run(loss, 0.0)
            with window.lock:
                window.add(0) if transaction is None else transaction.add(0)
        elif transaction is not None:
            self._run(loss, transaction.factor_for(weight, reduction))
            transaction.add(weight)
        elif self.isolate:
            self._backward_apart(loss, weight, reduction)
        else:
            divisor = window.main.divisor
            if divisor is None:
                with window.lock:
                    divisor = window.divisor_for(weight, narrow=loss.dtype in _NARROW or self.narrow)
            factor = (weight if reduction == "mean" else 1) / divisor
            if self.can_take_back:
                factor *= self._rescale()
                if self.narrow and math.frexp(factor)[0] != 0.5:
                    # Only a power of two passes through a narrow type unrounded: multiply the others in at the sums.
                    self._backward_apart(loss, weight, reduction)
                    return
            seed = self._run(loss, factor)
            with window.lock:
                window.add(weight)
                if type(weight) is int and reduction == "mean" and self.scaler is None and not self.one_at_a_time:
                    if len(self.known) >= _SEEDS_KEPT:
                        self.known.clear()
                    self.known[weight, divisor, loss.dtype, loss.device, loss.shape] = seed

    def _backward_apart(self, loss: Tensor, weight: Number, reduction: str) -> None:
        with self.transact(weight) as transaction:
            self._run(loss, transaction.factor_for(weight, reduction))
            transaction.had_pass = True

    def backward_terms(self, terms: dict[str, tuple[Tensor, Number]]) -> None:
        """One pass per term, into sums of its own: what divides them is known only at the end. Needs `exclusive`."""
        window = self.window
        self.one_at_a_time = True
        self.known.clear()
        with contextlib.ExitStack() as stack:
            if self.isolate and window.transaction is None:
                stack.enter_context(self.transact(None))
            transaction = window.transaction
            rescale = 1.0 if transaction is not None else self._rescale()
            lockstep = window.ranks.lockstep
            for name, (_, weight) in terms.items():
                window.term_for(name, weight)
            live = [name for name, (loss, weight) in terms.items() if weight or (lockstep and loss.requires_grad)]
            for name in live:
                loss, weight = terms[name]
                term = window.terms[name]
                sums = term if transaction is None else transaction.terms.setdefault(name, Total(0, term.divisor))
                factor = rescale / (term.divisor or 1.0) if weight else 0.0
                with _separate_gradients(window.sources, sums.gradients if weight else {}):
                    self._run(loss, factor, retain_graph=name != live[-1])
                sums.weight += weight
            if transaction is None:
                window.add_terms(next(iter(terms.values()))[1], set(terms))
            else:
                transaction.had_pass = True
                transaction.names.update(terms)

    def _run(self, loss: Tensor, factor: float, retain_graph: bool = False) -> Tensor:
        """One pass with a factor; gives its seed: the factor as the loss's gradient, made once per value."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        key = (factor, loss.dtype, loss.device, loss.shape)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) >= _SEEDS_KEPT:
                self._seeds.clear()
            seed = self._seeds[key] = torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
        self.run(loss, seed, retain_graph)
        return seed

    def run(self, loss: Tensor, seed: Tensor, retain_graph: bool = False) -> None:
        """One pass; if it fails the window holds half of it, and says so from then on."""
        own, thread = OWN_PASSES, threading.get_ident()
        outermost = thread not in own
        own.add(thread)
        try:
            if type(loss) is Tensor:
                _torch.run_backward(loss, seed, retain_graph)
            else:  # a subclass has its own say
                torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        except BaseException as error:
            self.window.broken = True
            self.window.ranks.failed(error)
            raise
        finally:
            if outermost:
                own.discard(thread)

    def _rescale(self) -> float:
        """What brings gradients at the present loss scale to the scale the window began with; 1 but after a skip."""
        if self.scaler is None or not self.can_take_back:
            return 1.0
        ratio: float = self.window.scale / self.scaler.get_scale()
        return ratio

    # -- transactions ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transact(self, weight: Number | None) -> Iterator[Transaction]:
        """A micro-batch that comes in whole or not at all. Needs `exclusive`."""
        window = self.window
        transaction = window.transaction = Transaction(window.sources, weight)
        known = set(window.terms)
        try:
            yield transaction
            self._commit(transaction)
        except BaseException:
            transaction.roll_back()
            for name in set(window.terms) - known:
                del window.terms[name]
            window.broken = False
            window.plain.abandon()
            raise
        finally:
            window.transaction = None
            window.plain.end_micro_batch()

    def _commit(self, transaction: Transaction) -> None:
        window = self.window
        window.require_intact()
        if transaction.is_empty and transaction.declared != 0:
            transaction.roll_back()
            return
        weighs = bool(transaction.weight or transaction.terms)
        norm = gradient_norm(transaction.gradients()) if weighs else 0.0
        if weighs and not math.isfinite(norm):
            if not self.skip_nonfinite:
                error = nonfinite_gradient(window.sources, "this micro-batch", "on_nonfinite='skip' leaves it out.")
                window.ranks.failed(error)
                raise error
            window.rescaled = back_off(self.scaler) or window.rescaled
            transaction.roll_back()
            window.skip()
            return
        rescale = self._rescale()
        if transaction.weight:
            divisor, reference = window.divisor_for(transaction.weight, narrow=True), transaction.reference or 1
            transaction.commit(reference / divisor * rescale)
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            window.add(transaction.weight, squared_norm=(norm / scale * reference / transaction.weight) ** 2)
        else:
            transaction.roll_back()
            first = next((term.weight for term in transaction.terms.values()), 0)
            window.add_terms(first, transaction.names or {""})
        for name, term in transaction.terms.items():
            known = window.terms[name]
            known.weight += term.weight
            for position, gradient in term.gradients.items():
                known.gradients[position] = add_scaled(known.gradients.get(position), gradient, rescale)


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
