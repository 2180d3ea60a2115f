"""Do the losses of parts make the loss of the whole? Measured on a few rows, before a batch is cut.

The loss is run on some rows and on unequal parts of them, without keeping activations and without
randomness that depends on the number of rows, and the ways in which parts can be put together are
tried: by the count that `loss_fn` returns, by what the mean says it was divided by, by nothing (a
sum), by rows. A loss that couples rows (a contrastive one, the worst of the batch, statistics over
the batch) agrees with none of them.

It is done twice, the second time with some small parameters slightly changed: at its first step a
model may be in a place where different losses are equal, as all zeros at the output, or a policy
that is still the old one. There the gradients are compared, too (`gradient_additivity.py`).

A loss of which it cannot be read what it was divided by is compared on other rows of the batch as
well: what clamps, or takes the size of a mean, may do nothing on the first ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradfit._torch import is_out_of_memory
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity_record import Additivity, go_together, is_close
from gradfit.batches.carried_state import read_carried_state
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.gradient_additivity import FewRows, GradientError, gradient_error
from gradfit.batches.gradient_changes import gradient_changers
from gradfit.batches.loss import PartLoss, read_loss
from gradfit.batches.quiet import QuietRandomness, without_dropout
from gradfit.batches.scalars import ScalarReader
from gradfit.batches.shares import (
    PartCounter,
    TermCount,
    count_terms,
    share_terms,
    without_activations,
)
from gradfit.batches.weights import BatchWeights, CountFirst, must_count
from gradfit.errors import MisuseError
from gradfit.tree import (
    leaves,
    map_tensors,
    pick_rows,
    repeat_rows,
    size_of_batch,
    split_batch,
    unmarked,
)

LossFunction = Callable[[nn.Module, Any], Any]
Cut = Callable[[Any, int], Iterable[Any]]

MOST_ROWS = 5  # 4 + 1 and 3 + 2: few enough for any budget that a row fits in
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OTHER_ROWS = 4  # so many other groups of a batch's rows, where its loss cannot be read
_NEITHER = "neither"
_SMALL_SHARE = 1 / 16  # of the parameters' bytes: so much is changed and put back


def batch_norms(model: nn.Module) -> list[str]:
    """The names of modules that normalise with the statistics of the rows they are given."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats)
    ]


def measure_additivity(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    split: Cut | None = None,
    rows: int = MOST_ROWS,
    rewind: Callable[[], None] = lambda: None,
    finish: Callable[[Tensor], object] | None = None,
    gradient_rows: int = MOST_ROWS,
    passes: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Additivity:
    """Run the loss on a few rows and on parts of them, and compare.

    Parameters, gradients and modes come back as they were; buffers and generators are the caller's
    to put back.

    Args:
        model: in the mode in which it is trained.
        loss_fn: as for `fit`.
        batch: the rows are taken from its beginning.
        split: as for `fit`; None cuts along dim 0.
        rows: at most so many, so that little memory is needed.
        rewind: puts buffers and all random generators back to where they were; called before each
            run.
        finish: called with each loss, for modules that wait for a backward pass. Without it no
            activation is kept.
        gradient_rows: at most so many with both passes; below 2, gradients are not compared.
        passes: what both passes of one forward run in, to keep their memory small.

    Raises:
        MisuseError: `loss_fn` returns something that is no loss.
    """
    runner = _Runner(model, loss_fn, split, rewind, finish)
    names = tuple(batch_norms(model))
    cuts = list(_choose_rows(batch, split, rows))
    with eager_functions():
        if names:  # which cannot be run on one row
            measured = runner.measure(cuts[-1:])
            reason = batch_norm_reason(names)
            return dataclasses.replace(measured, over=None, modules=names, reason=reason)
        measured = runner.measure(cuts)
        if runner.raised and len(cuts) > 1:
            measured = runner.measure(cuts[-1:])  # a single row may be all that it refuses
        if not measured.adds_up and len(cuts) > 1:
            measured = runner.measure_sum(cuts, measured)
        if not measured.adds_up and (runner.raised or runner.is_random):
            measured = runner.measure_without_randomness(cuts, measured)
        if measured.adds_up and (measured.over == "rows" or measured.unread):
            measured = runner.measure_elsewhere(cuts, _other_rows(batch, split, rows), measured)
        if not measured.adds_up and split is None:
            measured = runner.measure_other_ways(batch, rows, measured)
        if measured.adds_up or finish is not None:  # all processes run the same
            few = _rows_for_gradients(batch, split, min(rows, gradient_rows))
            measured = runner.measure_state(cuts[-1][1], measured)
            measured = runner.measure_gradients(few, cuts[-1][1][-1], measured, passes)
    return measured


def has_count(model: nn.Module, loss_fn: LossFunction, batch: Any) -> bool:
    """Whether the loss comes with a count of its own, by one forward that keeps no activation.

    Args:
        model: its buffers and generators are the caller's to put back.
        loss_fn: as for `fit`.
        batch: what to call it with.
    """
    with eager_functions(), without_activations(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = loss_fn(model, unmarked(batch))
    return read_loss(result, 1).count is not None


def batch_norm_reason(names: Sequence[str]) -> str:
    """Why a model with these modules is not cut."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm ({shown}) takes its statistics over the rows it is given. Use GroupNorm or"
        " LayerNorm, or freeze the statistics with module.eval(), to let the batch be cut"
    )


@dataclass(frozen=True, slots=True)
class Run:
    """The loss of some rows: its value, its returned count, what it was divided by."""

    value: float
    rows: int
    count: float | None = None
    divisors: tuple[float, ...] | None = None
    """Of each term; not clamped."""
    terms: tuple[TermCount, ...] | None = None
    """If each can be told apart, with its value."""
    logs: Mapping[str, float] = field(default_factory=dict)
    whole_logs: frozenset[str] = frozenset()
    """The logs that are of a type for whole numbers."""

    @property
    def is_clamped(self) -> bool:
        return any(term.floor for term in self.terms or ())

    def is_lost_at(self, weight: float) -> bool:
        """Whether it was divided by no items, and is not nothing: what was divided is lost."""
        return not weight and self.value != 0 and not math.isnan(self.value)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same rows as a whole and in parts."""

    whole: Run
    parts: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The whole, then the parts."""
        return (self.whole, *self.parts)

    def mean_error(self, weight: Callable[[Run], float]) -> float:
        """How far the whole is from the parts' weighted mean, and its weight from the sum of
        theirs; relative.
        """
        weights = [weight(part) for part in self.parts]
        total, of_whole = math.fsum(weights), weight(self.whole)
        weighted = list(zip(weights, self.parts, strict=True))
        if not (total > 0 and of_whole > 0) or any(part.is_lost_at(w) for w, part in weighted):
            return math.inf
        mixed = math.fsum(w * part.value for w, part in weighted if w) / total
        return max(self._relative(mixed), abs(total / of_whole - 1))

    def items_error(self) -> float:
        """How far the whole is from the sum of its parts, or its count from the sum of theirs;
        relative.
        """
        whole, total = self.whole.count or 0.0, math.fsum(part.count or 0.0 for part in self.parts)
        return max(self.sum_error(), abs(total - whole) / max(whole, total, 1.0))

    def terms_error(self, roles: Sequence[str]) -> float:
        """How far the whole is from its parts, each term by its own total; relative."""
        terms = [part.terms or () for part in self.parts]
        if any(term.is_lost for of_part in terms for term in of_part):
            return math.inf
        return self._relative(math.fsum(share.value for share in share_terms(terms, roles)))

    def sum_error(self) -> float:
        """How far the whole is from the sum of its parts; relative."""
        return self._relative(math.fsum(part.value for part in self.parts))

    def _relative(self, mixed: float) -> float:
        difference = abs(mixed - self.whole.value)
        values = [abs(run.value) for run in self.runs]
        largest = max(value for value in (*values, 0.0) if not math.isnan(value))
        # From zeros alone nothing can be told, nor from what is not finite.
        return difference / largest if largest > 0 and math.isfinite(difference) else math.inf


def judge(comparisons: Sequence[Comparison], tolerance: float, read: str = "") -> Additivity:
    """By what the parts are to be weighted, if by anything."""
    evidence = _Evidence(comparisons)
    ways = evidence.ways()
    errors = {over: max(map(error, comparisons)) for over, error in ways.items()}
    for over, error in errors.items():
        if error <= tolerance:
            told = () if over == "rows" else evidence.roles_of_values or evidence.roles
            return Additivity(over, error, read=read, roles=told)
    if "items" in ways and evidence.is_mean_over_count(tolerance):
        whole = comparisons[0].whole
        raise MisuseError(
            f"loss_fn returned (loss, {whole.count:g}), but the loss is {read}: a mean, not a sum"
            " over the count. Return loss * count with the count, or the mean alone."
        )
    reason = _why(comparisons, read)
    least = _least_error(comparisons, list(ways.values()))
    return Additivity(None, least, read=read, roles=evidence.roles, reason=reason)


class _Evidence:
    """What the divisors of wholes and parts say of how parts could be put together."""

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        self.comparisons = comparisons
        self.runs = [run for one in comparisons for run in one.runs]
        read = _read_roles(comparisons)
        # a term with a coefficient that all rows of a part make, as one loss's size does that
        # scales another: values may add up by rows all the same, and gradients do not
        self.depends_on_rows_together = _NEITHER in read
        self.roles = () if self.depends_on_rows_together else read
        self.roles_of_values = _roles_of_values(comparisons, self.roles)
        self.one_weight = _one_weight(self.runs, self.roles)
        if not self.one_weight and not self.roles_of_values:
            self.roles = ()
            self.one_weight = _one_weight(self.runs, ())

    def ways(self) -> dict[str, Callable[[Comparison], float]]:
        """How the parts could be put together, each with how far the whole is from it."""
        if all(run.count is not None for run in self.runs):
            return {"items": Comparison.items_error}
        ways: dict[str, Callable[[Comparison], float]] = {}
        if self.one_weight and "adds" in self.roles:
            ways["divisor"] = self.divisor_error
        elif self.one_weight and self.roles:
            ways["sum"] = Comparison.sum_error
        if len(self.roles_of_values) > 1 or "adds" in self.roles_of_values:
            ways["terms"] = self.terms_error
        if not self.depends_on_rows_together:
            ways["rows"] = _rows_error
        return ways

    def divisor_error(self, comparison: Comparison) -> float:
        place = self.roles.index("adds")
        return comparison.mean_error(lambda run: (run.divisors or ())[place])

    def terms_error(self, comparison: Comparison) -> float:
        return comparison.terms_error(self.roles_of_values)

    def is_mean_over_count(self, tolerance: float) -> bool:
        """Whether what was returned as a sum over a count is the mean over it."""
        return "adds" in self.roles and all(
            one.mean_error(_count_of) <= tolerance for one in self.comparisons
        )


def _rows_error(comparison: Comparison) -> float:
    return comparison.mean_error(lambda run: float(run.rows))


def _least_error(
    comparisons: Sequence[Comparison], ways: Sequence[Callable[[Comparison], float]]
) -> float:
    """How far the whole is from its parts in the best way, for the message alone."""
    ways = ways or [Comparison.sum_error]
    least = [min(way(one) for way in ways) for one in comparisons]
    return max(filter(math.isfinite, least), default=math.inf)


def _why(comparisons: Sequence[Comparison], read: str) -> str:
    first = comparisons[0]
    if all(run.value == 0 for one in comparisons for run in one.runs):
        return (
            "the loss is 0 on the rows it was measured on, so nothing can be told. Pass a sample"
            " with a loss"
        )
    if any(not math.isfinite(one.whole.value) for one in comparisons):
        return (
            f"the loss of the rows it was measured on is {first.whole.value}. Pass a sample with a"
            " finite loss"
        )
    if " + " in read:
        return (
            f"its terms are divided by different numbers ({read}). Return gf.Loss(sum=…, count=…)"
            " with one count, or divide all terms by the same items"
        )
    return (
        "the loss depends on rows together, or its items are not its rows. Return gf.Loss(sum=…,"
        " count=…) if it is a sum over items; use gf.chunked for the encoder of a contrastive loss"
    )


def _count_of(run: Run) -> float:
    return run.count or 0.0


def _read_roles(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Whether each term's divisor adds up over the parts, stays what it is, or does neither; () if
    not all runs have the same terms.
    """
    divisors = [run.divisors for one in comparisons for run in one.runs]
    first = divisors[0]
    if first is None or any(one is None or len(one) != len(first) for one in divisors):
        return ()
    numbers = [[_divisors_at(one, term) for one in comparisons] for term in range(len(first))]
    return tuple(map(_role, numbers))


def _divisors_at(comparison: Comparison, term: int) -> list[float]:
    """Of the whole, then of each part."""
    return [(run.divisors or ())[term] for run in comparison.runs]


def _role(numbers: Sequence[list[float]]) -> str:
    """Of a term, by its divisor in each whole and its parts."""
    if all(is_close(sum(parts), whole) for whole, *parts in numbers):
        return "adds"
    return "constant" if _stays(numbers) else _NEITHER


def _stays(numbers: Sequence[list[float]]) -> bool:
    """Whether a number is the same in each whole and all of its parts."""
    return all(is_close(part, whole) for whole, *parts in numbers for part in parts)


def _roles_of_values(comparisons: Sequence[Comparison], roles: Sequence[str]) -> tuple[str, ...]:
    """The roles, with "same" for a term that does not depend on the rows at all, as a penalty on
    the parameters does.

    () unless each term of each run is known with its value.
    """
    if any(run.terms is None for one in comparisons for run in one.runs):
        return ()
    return tuple(
        [
            "same" if role == "constant" and _stays(_values_at(comparisons, term)) else role
            for term, role in enumerate(roles)
        ]
    )


def _values_at(comparisons: Sequence[Comparison], term: int) -> list[list[float]]:
    return [[(run.terms or ())[term].value for run in one.runs] for one in comparisons]


def _one_weight(runs: Sequence[Run], roles: Sequence[str]) -> bool:
    """Whether one number for a part is right for all of its terms, and none of these was
    clamped.
    """
    if any(run.is_clamped for run in runs):
        return False
    first = runs[0].divisors or ()
    return not roles or all(go_together(roles, first, run.divisors or ()) for run in runs[1:])


class _Runner:
    """Runs the loss on rows, quietly."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        split: Cut | None,
        rewind: Callable[[], None],
        finish: Callable[[Tensor], object] | None,
    ) -> None:
        self._model, self._loss_fn, self._split = model, loss_fn, split
        self._rewind, self._finish = rewind, finish
        self._drops = finish is None
        self._evaluates = False
        self._sets_hooks = False  # on tensors, in a forward
        self._is_repeatable = False  # the same rows have given the same bits
        self.rounding = max((_eps(p) for p in model.parameters()), default=0.0)
        """Machine epsilon of the narrowest numbers that were met."""
        self._read = ""
        self._by_hand, self._floor = False, 0.0
        self.raised = False
        self.is_random = False

    def measure(self, cuts: Sequence[tuple[Any, Sequence[Any]]]) -> Additivity:
        """Compare each whole with its parts, as the model is and slightly changed."""
        self.raised = self.is_random = False
        try:
            first = self.run(cuts[0][0])
            read = self._read
            second = self.run(cuts[0][0])
            self._is_repeatable = first.value == second.value
            if not self._is_same(first, second):
                self.is_random = True
                return Additivity(
                    None,
                    math.inf,
                    reason="the loss is another one each time it is called with the same rows, by "
                    "state outside of parameters, buffers and generators",
                )
            comparisons = self._comparisons(cuts)
        except MisuseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.raised = True
            said = f"the loss of fewer rows raises {type(error).__name__}: {error}"
            return Additivity(None, math.inf, read=self._read, reason=said, runs_parts=False)
        verdict = judge(comparisons, _tolerance(self.rounding), read)
        return dataclasses.replace(
            verdict,
            by_hand=self._by_hand and "adds" in verdict.roles,
            floor=self._floor,
            summed_logs=_summed_logs(comparisons, verdict),
        )

    def measure_without_randomness(
        self, cuts: Sequence[tuple[Any, Sequence[Any]]], measured: Additivity
    ) -> Additivity:
        """Some losses can be compared only without what is random in training."""
        self._evaluates = True
        again = self.measure(cuts)
        self._evaluates = again.adds_up
        return again if again.adds_up else measured

    def measure_sum(
        self, cuts: Sequence[tuple[Any, Sequence[Any]]], measured: Additivity
    ) -> Additivity:
        """A sum may be written so that of one row it says something else: an `einsum` over one row
        is a product. Then larger parts tell that it is a sum, if all of them add up.
        """
        raised, is_random = self.raised, self.is_random
        again = self.measure(cuts[-1:])
        is_sum = again.over == "sum"
        if is_sum:
            errors = map(Comparison.sum_error, self._comparisons(cuts))
            is_sum = max(errors) <= _tolerance(self.rounding)
        self.raised, self.is_random = raised, is_random
        return again if is_sum else measured

    def measure_elsewhere(
        self,
        cuts: Sequence[tuple[Any, Sequence[Any]]],
        others: Sequence[tuple[Any, Sequence[Any]]],
        measured: Additivity,
    ) -> Additivity:
        """The same with other rows of the batch."""
        if not others:
            return measured
        again = self.measure([*others, *cuts])
        return dataclasses.replace(again, read=measured.read)

    def measure_gradients(
        self,
        few: tuple[Any, Sequence[Any]] | None,
        part: Any,
        measured: Additivity,
        passes: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> Additivity:
        """What was measured, or that the batch must not be cut since its gradients do not add
        up.
        """
        if few is None:
            return dataclasses.replace(measured, uncompared=self._gradient_changers(part))
        compared = FewRows(self._model, *few, self._nudged, self._forward, self._rewind, passes)
        try:
            with _slightly_changed(self._model):
                worst = self._gradient_error(compared, measured)
        except MisuseError as problem:  # what a step would say of such a batch
            reason = str(problem).removesuffix(".")
            return dataclasses.replace(measured, over=None, error=math.inf, reason=reason)
        if not worst.reason or not measured.adds_up:
            return measured
        return dataclasses.replace(measured, over=None, error=worst.error, reason=worst.reason)

    def _gradient_changers(self, part: Any) -> tuple[str, ...]:
        """What may change gradients in the passes of a part; found without a backward pass."""
        self._rewind()
        saving = without_activations() if self._drops else contextlib.nullcontext()
        with saving:
            loss = self._forward(part).loss
        hooks = ["a hook that the loss function sets"] if self._sets_hooks else []
        return tuple(hooks + gradient_changers(self._model, loss))

    def _nudged(self) -> contextlib.AbstractContextManager[None]:
        return _slightly_changed(self._model, 4 * self.rounding, 0.0)

    def _gradient_error(self, rows: FewRows, measured: Additivity) -> GradientError:
        def weights(*, counts: bool) -> BatchWeights:
            shares = None
            if counts:
                self._rewind()
                counter = PartCounter(self._model, self._quiet_loss, self._split, measured.roles)
                shares = counter.shares(rows.parts)
            size = _count_rows(rows.whole, self._split)
            return BatchWeights(measured, size, shares=shares, may_repeat=not counts)

        def error(*, counts: bool) -> GradientError:
            tolerance = _gradient_tolerance(self.rounding)
            narrow = self.rounding >= torch.finfo(torch.float16).eps
            return gradient_error(rows, partial(weights, counts=counts), tolerance, narrow=narrow)

        try:
            return error(counts=must_count(measured, len(rows.parts)))
        except CountFirst:
            return error(counts=True)

    def measure_state(self, parts: Sequence[Any], measured: Additivity) -> Additivity:
        """What was measured, or that the batch must not be cut since a part's loss depends on the
        parts that were run before it.
        """

        def run(part: Any) -> float:
            return self._run(part).value

        with _slightly_changed(self._model):
            reads = read_carried_state(self._model, parts, run, self._rewind)
        # to the bit, unless a device adds up in no fixed order
        rounding = 0.0 if self._is_repeatable else _tolerance(self.rounding)
        if reads.error <= rounding or math.isnan(reads.before) or not measured.adds_up:
            return measured
        return dataclasses.replace(measured, over=None, error=reads.error, reason=reads.reason)

    def _forward(self, part: Any) -> PartLoss:
        return read_loss(self._quiet_loss(self._model, part), _count_rows(part, self._split))

    def _quiet_loss(self, model: nn.Module, part: Any) -> Any:
        """What the loss function returns for some rows, without randomness that depends on their
        number.
        """
        quiet = QuietRandomness()
        with contextlib.ExitStack() as stack:
            if self._evaluates:
                stack.enter_context(_evaluating(model))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # about rows that nobody trains on
            stack.enter_context(without_dropout(model))
            stack.enter_context(quiet)
            result = self._loss_fn(model, unmarked(part))
        self.rounding = max(self.rounding, quiet.rounding)
        self._sets_hooks |= quiet.sets_hooks
        return result

    def measure_other_ways(self, batch: Any, rows: int, measured: Additivity) -> Additivity:
        """Say so, if the batch adds up along dim 1, which makes dim 0 the time, or as a list of
        samples.
        """
        if _could_be_sequence_first(batch) and self._adds_up_by(_cut_dim_1, batch, rows):
            reason = (
                "it adds up along dim 1, so dim 0 seems to be the sequence and not the batch. Pass"
                " split=, a function (batch, size) -> parts, which cuts along dim 1, as"
                " x.split(size, dim=1)"
            )
        elif _could_be_samples(batch) and self._adds_up_by(_cut_list, batch, rows):
            reason = (
                f"the batch is a list of {len(batch)} samples, and lists that hold tensors are not"
                " cut by themselves. Pass split=lambda batch, size: (batch[i : i + size] for i in"
                " range(0, len(batch), size))"
            )
        else:
            return measured
        return dataclasses.replace(measured, reason=reason)

    def _adds_up_by(self, cut: Cut, batch: Any, rows: int) -> bool:
        other = _Runner(self._model, self._loss_fn, cut, self._rewind, self._finish)
        try:
            return other.measure(list(_choose_rows(batch, cut, rows))).adds_up
        except Exception:  # the user's code, on a batch it may not be made for
            return False

    def _comparisons(self, cuts: Sequence[tuple[Any, Sequence[Any]]]) -> list[Comparison]:
        comparisons = [self._compare(whole, parts) for whole, parts in cuts]
        with _slightly_changed(self._model):
            changed = self._compare(*cuts[-1])
        if math.isfinite(changed.whole.value):
            comparisons.append(changed)
        return comparisons

    def _compare(self, whole: Any, parts: Sequence[Any]) -> Comparison:
        return Comparison(self.run(whole), tuple(self.run(part) for part in parts))

    def _is_same(self, first: Run, second: Run) -> bool:
        if math.isnan(first.value) or math.isnan(second.value):
            return True
        return math.isclose(first.value, second.value, rel_tol=_tolerance(self.rounding))

    def run(self, part: Any) -> Run:
        """One forward; of what autograd saves only single numbers are kept, which say what was
        divided by.
        """
        self._rewind()
        try:
            return self._run(part)
        except MisuseError:
            raise
        except Exception as error:
            if not self._drops or is_out_of_memory(error):
                raise
        self._rewind()
        return self._run_keeping_activations(part)

    def _run_keeping_activations(self, part: Any) -> Run:
        """A loss that differentiates inside itself needs what was saved."""
        self._drops = False
        try:
            return self._run(part)
        except Exception:
            self._drops = True
            raise

    def _run(self, part: Any) -> Run:
        reader = ScalarReader()
        saving = without_activations() if self._drops else contextlib.nullcontext()
        with saving, reader:
            loss = self._forward(part)
        denominator = read_denominator(loss.loss, reader)
        divisors = terms = None
        if denominator is not None:
            divisors = tuple(float(term.items) for term in denominator.terms)
            terms = self._count_terms(denominator)
            self._note(denominator)
        self.rounding = max(self.rounding, _eps(loss.loss))
        count = None if loss.count is None else float(loss.count)
        logs = {name: float(value) for name, value in loss.logs.items()}
        whole_logs = frozenset(name for name, value in loss.logs.items() if _is_whole(value))
        value = float(loss.loss.detach())
        run = Run(value, loss.rows, count, divisors, terms, logs, whole_logs)
        if self._finish is not None:
            self._finish(loss.loss)
        return run

    def _count_terms(self, denominator: Denominator) -> tuple[TermCount, ...] | None:
        """Over several processes (`finish`) a forward alone cannot be run before each step."""
        counts = count_terms(denominator) if self._drops and self._finish is None else None
        return None if counts is None else tuple(counts)

    def _note(self, read: Denominator) -> None:
        self._read = str(read)
        self._by_hand |= any(term.is_divided_by_hand for term in read.terms)
        self._floor = max([self._floor, *(_least_divisor(term) for term in read.terms)])


def _is_whole(value: Any) -> bool:
    """Whether a number is of a type for whole ones, and no truth value."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and value.dtype is not torch.bool
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _summed_logs(comparisons: Sequence[Comparison], verdict: Additivity) -> tuple[str, ...]:
    """The logs that add up over parts, and are not their mean over the items; where the rows do not
    tell, those that are whole numbers.
    """

    def weight(run: Run) -> float:
        if verdict.over == "items":
            return run.count or 0.0
        divisors = run.divisors or ()
        place = verdict.roles.index("adds") if "adds" in verdict.roles else len(divisors)
        return divisors[place] if place < len(divisors) else float(run.rows)

    def is_sum(name: str) -> bool:
        return all(
            is_close(
                math.fsum(run.logs.get(name, math.nan) for run in one.parts), one.whole.logs[name]
            )
            for one in comparisons
        )

    def is_mean(name: str) -> bool:
        return all(
            is_close(
                math.fsum(weight(run) * run.logs.get(name, math.nan) for run in one.parts),
                weight(one.whole) * one.whole.logs[name],
            )
            for one in comparisons
        )

    names = [
        name
        for name in comparisons[0].whole.logs
        if all(name in one.whole.logs for one in comparisons)
    ]
    whole = comparisons[0].whole.whole_logs
    return tuple(name for name in names if is_sum(name) and (name in whole or not is_mean(name)))


def _least_divisor(term: Term) -> float:
    """What a divisor that was clamped, and is no whole number, is at least."""
    if term.floor is None or term.floor.is_whole or not term.floor.after:
        return 0.0
    return float(term.divisor) * term.floor.least / term.floor.after


def _count_rows(part: Any, split: Cut | None) -> int:
    return size_of_batch(part) if split is None else sum(1 for _ in split(part, 1))


def _eps(tensor: Tensor) -> float:
    """Machine epsilon of a tensor's numbers; 0 for whole ones."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _tolerance(rounding: float) -> float:
    """What relative error of a loss is rounding, by the machine epsilon of its numbers."""
    if rounding < 1e-12:
        return 1e-9
    return 2e-5 if rounding < 1e-6 else max(2e-3, 4 * rounding)


def _gradient_tolerance(rounding: float) -> float:
    """The same of a gradient, which adds up more of them."""
    if rounding < 1e-12:
        return 1e-8
    return 1e-4 if rounding < 1e-6 else max(1e-2, 4 * rounding)


def _rows_for_gradients(
    batch: Any, split: Cut | None, most: int
) -> tuple[Any, Sequence[Any]] | None:
    """A few rows and unequal parts of them, one of the rows in both: words that are in two parts
    may count otherwise than in one. None if there is no room for two rows.
    """
    if most < 2:
        return None
    whole, parts = list(_choose_rows(batch, split, most))[-1]
    rows = _count_rows(whole, split)
    if split is not None or rows < 3:
        return whole, parts
    whole = repeat_rows(next(iter(split_batch(whole, rows - 1))), rows)
    return whole, list(split_batch(whole, (rows + 1) // 2))


def _other_rows(batch: Any, split: Cut | None, rows: int) -> list[tuple[Any, Sequence[Any]]]:
    """Some more groups of rows from all over the batch, each with its parts."""
    cut = split or split_batch
    total = _count_rows(batch, split)
    if split is None:  # each group's rows far from each other, so that parts may be unlike
        apart = max(1, total // rows)
        starts = range(0, apart, max(1, apart // _OTHER_ROWS))
        orders = [list(range(start, total, apart))[:rows] for start in starts]
        groups = [pick_rows(batch, order) for order in orders[:_OTHER_ROWS]]
    else:
        groups = list(islice(cut(batch, rows), 1, None, max(1, total // rows // _OTHER_ROWS)))
    cuts = [(whole, list(cut(whole, (rows + 1) // 2))) for whole in groups[:_OTHER_ROWS]]
    return [(whole, parts) for whole, parts in cuts if len(parts) > 1]


def _choose_rows(batch: Any, split: Cut | None, most: int) -> Iterator[tuple[Any, list[Any]]]:
    """A few rows, whole and in unequal parts, cut in two ways."""
    cut = split or split_batch
    total = _count_rows(batch, split)
    if total == 1 and split is None:
        batch, total = repeat_rows(batch, 3), 3
    rows = max(2, min(most, total))
    whole = next(iter(cut(batch, rows)))
    for size in sorted({rows - 1, (rows + 1) // 2}, reverse=True):
        yield whole, list(cut(whole, size))


def _could_be_sequence_first(batch: Any) -> bool:
    tensors = [tensor for tensor in leaves(batch) if tensor.dim() > 1]
    return (
        bool(tensors)
        and len({tensor.size(1) for tensor in tensors}) == 1
        and tensors[0].size(1) > 1
    )


def _could_be_samples(batch: Any) -> bool:
    """Whether it is a list of nests, each perhaps a row."""
    return isinstance(batch, list) and len(batch) > 1


def _cut_list(batch: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(batch), size):
        yield batch[start : start + size]


def _cut_dim_1(nest: Any, size: int) -> Iterator[Any]:
    wide = next(tensor.size(1) for tensor in leaves(nest) if tensor.dim() > 1)
    for start in range(0, wide, size):
        yield map_tensors(nest, partial(_narrowed, cut=slice(start, start + size)))


def _narrowed(tensor: Tensor, cut: slice) -> Tensor:
    return tensor[:, cut] if tensor.dim() > 1 else tensor


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _slightly_changed(model: nn.Module, share: float = 0.05, least: float = 0.01) -> Iterator[None]:
    """Some small trained parameters, biases and the like, are a little different inside: by a share
    of their mean size, and at least by so much.
    """
    chosen = [(parameter, parameter.detach().clone()) for parameter in _small_parameters(model)]
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        with torch.no_grad():
            for parameter, content in chosen:
                noise = torch.randn(content.shape, generator=generator, device="cpu").to(content)
                parameter.add_(noise * (share * content.abs().mean() + least))
        yield
    finally:
        with torch.no_grad():
            for parameter, content in chosen:
                parameter.copy_(content)


def _small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The smallest trained parameters: few bytes of all, and at least one."""
    trained = sorted(filter(_is_trained_plainly, model.parameters()), key=lambda p: p.numel())
    room = _SMALL_SHARE * sum(p.nbytes for p in trained)
    taken = accumulate(parameter.nbytes for parameter in trained)
    few = sum(1 for nbytes in taken if nbytes <= room)
    return trained[: max(1, few)]


def _is_trained_plainly(parameter: nn.Parameter) -> bool:
    """Whether it is a trained tensor of real numbers, and of no subclass."""
    is_plain = type(parameter.data) is Tensor and parameter.is_floating_point()
    return parameter.requires_grad and is_plain
