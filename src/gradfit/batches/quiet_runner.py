"""Runs a loss on some rows without randomness that depends on their number, and reads what it was
divided by.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfit._torch import is_out_of_memory
from gradfit.batches.compared_runs import Comparison, Run
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.few_rows import Cut, RowsAndParts, count_measured_rows
from gradfit.batches.loss import PartLoss, read_loss
from gradfit.batches.quiet import QuietRandomness, evaluating, without_dropout
from gradfit.batches.scalars import ScalarReader
from gradfit.batches.shares import TermCount, count_terms, without_activations
from gradfit.batches.slightly_changed import slightly_changed
from gradfit.batches.summed_logs import whole_logs
from gradfit.errors import MisuseError
from gradfit.tree import unmarked

LossFunction = Callable[[nn.Module, Any], Any]


class QuietRunner:
    """Runs the loss on rows, quietly.

    Args:
        model: in the mode in which it is trained.
        loss_fn: as for `fit`.
        split: as for `fit`; None cuts along dim 0.
        rewind: puts buffers and all random generators back to where they were.
        finish: called with each loss; without it no activation is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        split: Cut | None,
        rewind: Callable[[], None],
        finish: Callable[[Tensor], object] | None,
    ) -> None:
        self.model, self.loss_fn, self.split = model, loss_fn, split
        self.rewind, self.finish = rewind, finish
        self.evaluates = False
        """Run in evaluation mode, without what is random in training."""
        self.sets_hooks = False
        """The loss function sets hooks on tensors."""
        self.is_as_trained = True
        """No forward was another one than in training, as one without dropout is."""
        self.rounding = max(map(_eps, model.parameters()), default=0.0)
        """Machine epsilon of the narrowest numbers that were met."""
        self.read = ""
        """What the last loss said it was divided by."""
        self.by_hand, self.floor = False, 0.0
        """Whether a divisor was the loss function's own, and where one was seen to be clamped."""
        self._drops = finish is None

    @property
    def tolerance(self) -> float:
        """What relative error of a loss is rounding."""
        return _tolerance(self.rounding, (1e-9, 2e-5, 2e-3))

    @property
    def gradient_tolerance(self) -> float:
        """The same of a gradient, which adds up more of them."""
        return _tolerance(self.rounding, (1e-8, 1e-4, 1e-2))

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """What a forward runs in: activations are dropped, unless something needs them."""
        return without_activations() if self._drops else contextlib.nullcontext()

    # -- comparing --------------------------------------------------------------------------------

    def compare_all(
        self, cuts: Sequence[RowsAndParts], known: tuple[Any, Run] | None = None
    ) -> list[Comparison]:
        """Each whole with its parts; the last one of a slightly changed model as well. `known` are
        rows that were run already.
        """
        comparisons = [
            Comparison(known[1], tuple(map(self.run, parts)))
            if known is not None and whole is known[0]
            else self._compare(whole, parts)
            for whole, parts in cuts
        ]
        with slightly_changed(self.model):
            changed = self._compare(*cuts[-1])
        if math.isfinite(changed.whole.value):
            comparisons.append(changed)
        return comparisons

    def _compare(self, whole: Any, parts: Sequence[Any]) -> Comparison:
        return Comparison(self.run(whole), tuple(map(self.run, parts)))

    def is_same(self, first: Run, second: Run) -> bool:
        """Whether two losses are equal but for rounding; NaN is like anything."""
        if math.isnan(first.value) or math.isnan(second.value):
            return True
        return math.isclose(first.value, second.value, rel_tol=self.tolerance)

    # -- running ----------------------------------------------------------------------------------

    def run(self, part: Any) -> Run:
        """One forward; of what autograd saves only single numbers are kept, which say what was
        divided by.
        """
        self.rewind()
        try:
            return self.run_on(part)
        except MisuseError:
            raise
        except Exception as error:
            if not self._drops or is_out_of_memory(error):
                raise
        self.rewind()
        return self._run_keeping_activations(part)

    def _run_keeping_activations(self, part: Any) -> Run:
        """A loss that differentiates inside itself needs what was saved."""
        self._drops = False
        try:
            return self.run_on(part)
        except Exception:
            self._drops = True
            raise

    def run_on(self, part: Any) -> Run:
        """The same from the state that there is, nothing being put back before."""
        reader = ScalarReader()
        rows = count_measured_rows(part, self.split)  # not read: that asks every tensor of the part
        with self.saving(), reader:
            loss = read_loss(self.quiet_loss(self.model, part), rows)
        run = self._describe(loss, read_denominator(loss.loss, reader))
        if self.finish is not None:
            self.finish(loss.loss)
        del loss
        reader.let_go()
        return run

    def _describe(self, loss: PartLoss, denominator: Denominator | None) -> Run:
        divisors = terms = None
        if denominator is not None:
            divisors = tuple(float(term.items) for term in denominator.terms)
            terms = self._count_terms(denominator)
            self._note(denominator)
        self.rounding = max(self.rounding, _eps(loss.loss))
        count = None if loss.count is None else float(loss.count)
        logs = {name: float(value) for name, value in loss.logs.items()}
        value = float(loss.loss.detach())
        return Run(value, loss.rows, count, divisors, terms, logs, whole_logs(loss.logs))

    def _count_terms(self, denominator: Denominator) -> tuple[TermCount, ...] | None:
        """Over several processes (`finish`) a forward alone cannot be run before each step."""
        counts = count_terms(denominator) if self._drops and self.finish is None else None
        return None if counts is None else tuple(counts)

    def _note(self, read: Denominator) -> None:
        self.read = str(read)
        self.by_hand |= any(term.is_divided_by_hand for term in read.terms)
        self.floor = max([self.floor, *map(_least_divisor, read.terms)])

    def forward(self, part: Any) -> PartLoss:
        """The loss of some rows."""
        return read_loss(self.quiet_loss(self.model, part), count_measured_rows(part, self.split))

    def quiet_loss(self, model: nn.Module, part: Any) -> Any:
        """What the loss function returns for some rows, without randomness that depends on their
        number.
        """
        with self.quiet() as quiet:
            result = self.loss_fn(model, unmarked(part))
        self.rounding = max(self.rounding, quiet.rounding)
        self.sets_hooks |= quiet.sets_hooks
        self.is_as_trained &= not quiet.changes
        return result

    @contextlib.contextmanager
    def quiet(self) -> Iterator[QuietRandomness]:
        """What a forward runs in, and a backward, which may run parts of a forward again."""
        with contextlib.ExitStack() as stack:
            if self.evaluates:
                stack.enter_context(evaluating(self.model))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # about rows that nobody trains on
            switches_off = stack.enter_context(without_dropout(self.model))
            quiet = stack.enter_context(QuietRandomness(evaluates=self.evaluates))
            quiet.changes |= switches_off
            yield quiet


def _least_divisor(term: Term) -> float:
    """What a divisor that was clamped, and is no whole number, is at least."""
    if term.floor is None or term.floor.is_whole or not term.floor.after:
        return 0.0
    return float(term.divisor) * term.floor.least / term.floor.after


def _eps(tensor: Tensor) -> float:
    """Machine epsilon of a tensor's numbers; 0 for whole ones."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _tolerance(rounding: float, of: tuple[float, float, float]) -> float:
    """What relative error is rounding, of numbers in double precision, in single, or in less, by
    their machine epsilon.
    """
    double, single, narrow = of
    if rounding < 1e-12:
        return double
    return single if rounding < 1e-6 else max(narrow, 4 * rounding)
