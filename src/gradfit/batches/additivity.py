"""Do the losses of parts make the loss of the whole? Measured on a few rows, before a batch is cut.

The loss is run on some rows and on unequal parts of them, without keeping activations and without
randomness that depends on the number of rows, and the ways in which parts can be put together are
tried: by the count that `loss_fn` returns, by what the mean says it was divided by, by nothing (a
sum), by rows. A loss that couples rows (a contrastive one, the worst of the batch, statistics over
the batch) agrees with none of them.

It is done twice, the second time with some small parameters slightly changed: at its first step a
model may be in a place where different losses are equal, as all zeros at the output, or a policy
that is still the old one. There the gradients are compared, too (`gradient_additivity.py`).

Where the graph says what the loss was divided by, few runs are enough to see that it adds up; a
loss that does not in these, or of which nothing can be read, is run in more ways, which also tell
why. One that cannot be read is compared on other rows of the batch as well: what clamps, or takes
the size of a mean, may do nothing on the first ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfit._torch import is_out_of_memory, let_go_of_graph, nodes_behind
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.additivity_verdict import judge
from gradfit.batches.carried_state import read_carried_state
from gradfit.batches.compared_runs import Comparison, Run
from gradfit.batches.few_rows import (
    Cut,
    RowsAndParts,
    choose_rows,
    could_be_samples,
    could_be_sequence_first,
    count_measured_rows,
    cut_dim_1,
    cut_list,
    other_rows,
    rows_for_gradients,
    rows_of_batch,
)
from gradfit.batches.first_rows import FirstRows
from gradfit.batches.gradient_additivity import FewRows, GradientError, gradient_error
from gradfit.batches.gradient_changes import gradient_changers
from gradfit.batches.loss import read_loss
from gradfit.batches.passes import FewRowsPasses
from gradfit.batches.quiet_runner import LossFunction, QuietRunner
from gradfit.batches.shares import PartCounter, PartShare, run_without_activations
from gradfit.batches.slightly_changed import slightly_changed
from gradfit.batches.summed_logs import summed_logs
from gradfit.batches.weights import BatchWeights, CountFirst, must_count
from gradfit.errors import GradfitError, MisuseError
from gradfit.tree import (
    SPLIT_LISTS,
    pick_rows,
    rows_in_lists,
    split_batch,
    split_with_lists,
    unmarked,
)

MOST_ROWS = 5  # 4 + 1 and 3 + 2: few enough for any budget that a row fits in
MOST_ROWS_IF_READ = 3  # 2 + 1: enough where the graph says what the loss was divided by
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(model: nn.Module) -> list[str]:
    """The names of modules that normalise with the statistics of the rows they are given."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if _takes_statistics(module)
    ]


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats)


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
    passes: FewRowsPasses | None = None,
    first: FirstRows | None = None,
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
        passes: what both passes of so many rows run in, to keep their memory small, or to watch
            them; None keeps all that autograd saves.
        first: the batch's first rows, which others run, too.

    Raises:
        MisuseError: `loss_fn` returns something that is no loss.
    """
    measurement = _Measurement(QuietRunner(model, loss_fn, split, rewind, finish))
    passes = FewRowsPasses() if passes is None else passes
    names = tuple(batch_norms(model))
    with eager_functions():
        first = rows_of_batch(batch, split) if first is None else first
        ways = choose_rows(first, rows)
        cut = next(ways)
        if names:  # which cannot be run on one row
            measured = measurement.measure([cut, *ways][-1:])
            reason = batch_norm_reason(names)
            return dataclasses.replace(measured, over=None, modules=names, reason=reason)
        # several processes run the same, whatever each of them reads
        quickly = measurement.look_quickly(*cut) if finish is None else None
        if quickly is not None:
            few = rows_for_gradients(first, min(rows, gradient_rows, MOST_ROWS_IF_READ))
            return measurement.measure_gradients(few, cut[1][-1], quickly, passes)
        cuts = [cut, *ways]
        measured = measurement.measure_values(cuts, first, rows)
        telling = None
        if not measured.adds_up and finish is None:
            telling = measurement.rows_that_tell(cuts[0][0], first, rows)
        if telling is not None:
            return measure_additivity(
                model, loss_fn, telling, rows=rows, rewind=rewind,
                gradient_rows=gradient_rows, passes=passes,
            )  # fmt: skip
        if measured.adds_up or finish is not None:  # all processes run the same
            few = rows_for_gradients(first, min(rows, gradient_rows))
            measured = measurement.measure_state(cuts[-1][1], measured)
            measured = measurement.measure_gradients(few, cuts[-1][1][-1], measured, passes)
    return measured


def has_count(model: nn.Module, loss_fn: LossFunction, batch: Any) -> bool:
    """Whether the loss comes with a count of its own, by one forward that keeps no activation.

    Args:
        model: its buffers and generators are the caller's to put back.
        loss_fn: as for `fit`.
        batch: what to call it with.
    """
    with eager_functions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run_without_activations(lambda: loss_fn(model, unmarked(batch)))
    return read_loss(result, 1).count is not None


def batch_norm_reason(names: Sequence[str]) -> str:
    """Why a model with these modules is not cut."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm ({shown}) takes its statistics over the rows it is given. Use GroupNorm or"
        " LayerNorm, or freeze the statistics with module.eval(), to let the batch be cut"
    )


class _Measurement:
    """Asks a loss, in one way after the other, whether it adds up."""

    def __init__(self, runner: QuietRunner) -> None:
        self._runner = runner
        self._is_repeatable = False  # the same rows have given the same bits
        self._raised = self._is_random = False  # in the last comparison

    # -- values -----------------------------------------------------------------------------------

    def look_quickly(self, whole: Any, parts: Sequence[Any]) -> Additivity | None:
        """That values add up and carry nothing over, in five forwards, by what the graph says that
        they were divided by; None if these do not tell.
        """
        runner = self._runner
        if len(parts) != 2:
            return None
        try:
            with slightly_changed(runner.model):
                compared = self._compare_from_one_state(whole, parts)
            if compared is None or compared.whole.divisors is None:
                return None
            found = self._judge([compared], runner.read)
        except Exception as error:  # said where it is measured in full
            if is_out_of_memory(error):
                raise
            return None
        return found if found.adds_up and not found.is_told_by_values else None

    def _compare_from_one_state(self, whole: Any, parts: Sequence[Any]) -> Comparison | None:
        """Some rows and their two parts; None if the second part's loss is another one after the
        first part, or at all when it is run again.
        """
        runner = self._runner
        runs: list[Run] = []

        def value(part: Any) -> float:
            runs.append(runner.run_on(part))
            return runs[-1].value

        reads = read_carried_state(runner.model, parts, value, runner.rewind)
        of_whole = runner.run(whole)  # last: what it was divided by is what is said
        if reads.before != reads.after or not math.isfinite(of_whole.value):
            return None
        second, first = runs[:2]
        return Comparison(of_whole, (first, second))

    def measure_values(
        self, cuts: Sequence[RowsAndParts], first: FirstRows, rows: int
    ) -> Additivity:
        """Compare losses, in as many ways as it takes to tell."""
        measured = self._measure_first_rows(cuts)
        if measured.adds_up and measured.is_told_by_values:
            measured = self._measure_elsewhere(cuts, other_rows(first, rows), measured)
        if not measured.adds_up and first.split is None:
            measured = self._measure_other_ways(first.batch, rows, measured)
        return measured

    def _measure_first_rows(self, cuts: Sequence[RowsAndParts]) -> Additivity:
        measured = self.measure(cuts)
        if len(cuts) > 1:
            measured = self._measure_larger_parts(cuts, measured)
        if not measured.adds_up and (self._raised or self._is_random):
            measured = self._measure_without_randomness(cuts, measured)
        return measured

    def _measure_larger_parts(
        self, cuts: Sequence[RowsAndParts], measured: Additivity
    ) -> Additivity:
        if self._raised:
            measured = self.measure(cuts[-1:])  # a single row may be all that it refuses
        return measured if measured.adds_up else self._measure_sum(cuts, measured)

    def rows_that_tell(self, whole: Any, first: FirstRows, rows: int) -> Any | None:
        """Other rows of the batch to measure, where the first ones have no items, as rows that are
        all padding; None if these tell what there is to tell, or no others do.
        """
        if first.split is not None or self._raised or self._tells(whole):
            return None
        others = (other for other, _ in other_rows(first, rows))
        telling = next(filter(self._tells, others), None)
        if telling is None:
            return None
        tells = [*map(self._tells, split_batch(telling, 1))]  # of gradients, the first are compared
        return pick_rows(telling, sorted(range(len(tells)), key=lambda row: not tells[row]))

    def _tells(self, rows: Any) -> bool:
        """Whether the loss of some rows is a number, and of any items."""
        try:
            run = self._runner.run(rows)
        except Exception as error:  # the user's code, on rows it may not be made for
            if is_out_of_memory(error):
                raise
            return False
        return math.isfinite(run.value) and run.value != 0 and run.count != 0

    def measure(self, cuts: Sequence[RowsAndParts]) -> Additivity:
        """Compare each whole with its parts, as the model is and slightly changed."""
        runner = self._runner
        self._raised = self._is_random = False
        try:
            read, comparisons = self._compare(cuts)
        except MisuseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._raised = True
            said = f"the loss of fewer rows raises {type(error).__name__}: {error}"
            return Additivity(None, math.inf, read=runner.read, reason=said, runs_parts=False)
        if self._is_random:
            return Additivity(
                None,
                math.inf,
                reason="the loss is another one each time it is called with the same rows, by "
                "state outside of parameters, buffers and generators",
            )
        return self._judge(comparisons, read)

    def _judge(self, comparisons: Sequence[Comparison], read: str) -> Additivity:
        runner = self._runner
        verdict = judge(comparisons, runner.tolerance, read)
        return dataclasses.replace(
            verdict,
            by_hand=runner.by_hand and "adds" in verdict.roles,
            floor=runner.floor,
            summed_logs=summed_logs(comparisons, verdict),
        )

    def _compare(self, cuts: Sequence[RowsAndParts]) -> tuple[str, list[Comparison]]:
        """What the first rows' loss was divided by, and all comparisons; none if the loss is
        another one each time.
        """
        runner = self._runner
        first = runner.run(cuts[0][0])
        read = runner.read
        second = runner.run(cuts[0][0])
        self._is_repeatable = first.value == second.value
        self._is_random = not runner.is_same(first, second)
        return read, [] if self._is_random else runner.compare_all(cuts, (cuts[0][0], second))

    def _measure_without_randomness(
        self, cuts: Sequence[RowsAndParts], measured: Additivity
    ) -> Additivity:
        """Some losses can be compared only without what is random in training."""
        self._runner.evaluates = True
        again = self.measure(cuts)
        self._runner.evaluates = again.adds_up
        return again if again.adds_up else measured

    def _measure_sum(self, cuts: Sequence[RowsAndParts], measured: Additivity) -> Additivity:
        """A sum may be written so that of one row it says something else: an `einsum` over one row
        is a product. Then larger parts tell that it is a sum, if all of them add up.
        """
        raised, is_random = self._raised, self._is_random
        again = self.measure(cuts[-1:])
        is_sum = again.over == "sum" and self._adds_up_as_sum(cuts)
        self._raised, self._is_random = raised, is_random
        return again if is_sum else measured

    def _adds_up_as_sum(self, cuts: Sequence[RowsAndParts]) -> bool:
        errors = map(Comparison.sum_error, self._runner.compare_all(cuts))
        return max(errors) <= self._runner.tolerance

    def _measure_elsewhere(
        self, cuts: Sequence[RowsAndParts], others: Sequence[RowsAndParts], measured: Additivity
    ) -> Additivity:
        """The same with other rows of the batch."""
        if not others:
            return measured
        again = self.measure([*others, *cuts])
        return dataclasses.replace(again, read=measured.read)

    def _measure_other_ways(self, batch: Any, rows: int, measured: Additivity) -> Additivity:
        """Say so, if the batch adds up along dim 1, which makes dim 0 the time, as a list of
        samples, or by the items of lists in it.
        """
        if could_be_sequence_first(batch) and self._adds_up_by(cut_dim_1, batch, rows):
            reason = (
                "it adds up along dim 1, so dim 0 seems to be the sequence and not the batch. Pass"
                " split=, a function (batch, size) -> parts, which cuts along dim 1, as"
                " x.split(size, dim=1)"
            )
        elif could_be_samples(batch) and self._adds_up_by(cut_list, batch, rows):
            reason = (
                f"the batch is a list of {len(batch)} samples, and lists that hold tensors are not"
                " cut by themselves. Pass split=lambda batch, size: (batch[i : i + size] for i in"
                " range(0, len(batch), size))"
            )
        elif (lists := rows_in_lists(batch)) and self._adds_up_by(split_with_lists, batch, rows):
            reason = f"it adds up by items of lists: {lists.text}. {SPLIT_LISTS}"
        else:
            return measured
        return dataclasses.replace(measured, reason=reason)

    def _adds_up_by(self, cut: Cut, batch: Any, rows: int) -> bool:
        own = self._runner
        other = QuietRunner(own.model, own.loss_fn, cut, own.rewind, own.finish)
        try:
            cuts = list(choose_rows(rows_of_batch(batch, cut), rows))
            return _Measurement(other).measure(cuts).adds_up
        except Exception:  # the user's code, on a batch it may not be made for
            return False

    # -- state ------------------------------------------------------------------------------------

    def measure_state(self, parts: Sequence[Any], measured: Additivity) -> Additivity:
        """What was measured, or that the batch must not be cut since a part's loss depends on the
        parts that were run before it.
        """
        runner = self._runner
        with slightly_changed(runner.model):
            reads = read_carried_state(runner.model, parts, self._value, runner.rewind)
        # to the bit, unless a device adds up in no fixed order
        rounding = 0.0 if self._is_repeatable else runner.tolerance
        if reads.error <= rounding or math.isnan(reads.before) or not measured.adds_up:
            return measured
        return dataclasses.replace(measured, over=None, error=reads.error, reason=reads.reason)

    def _value(self, part: Any) -> float:
        return self._runner.run_on(part).value

    # -- gradients --------------------------------------------------------------------------------

    def measure_gradients(
        self, few: RowsAndParts | None, part: Any, measured: Additivity, passes: FewRowsPasses
    ) -> Additivity:
        """What was measured, or that the batch must not be cut since its gradients do not add
        up.
        """
        if few is None:
            return dataclasses.replace(measured, uncompared=self._gradient_changers(part))
        runner = self._runner
        compared = FewRows(
            runner.model,
            *few,
            nudged=self._nudged,
            forward=runner.forward,
            rewind=runner.rewind,
            passes=lambda content: passes.of(
                content,
                count_measured_rows(content, runner.split),
                is_as_trained=runner.is_as_trained,
            ),
            quiet=runner.quiet,
            begins_anew=passes.begins_anew,
        )
        try:
            with slightly_changed(runner.model):
                worst = self._gradient_error(compared, measured)
        except MisuseError as problem:  # what a step would say of such a batch
            reason = str(problem).removesuffix(".")
            return dataclasses.replace(measured, over=None, error=math.inf, reason=reason)
        except GradfitError:
            raise
        except Exception as error:  # the user's code, which may be made for more rows
            if is_out_of_memory(error):
                raise
            reason = f"the backward pass of fewer rows raises {type(error).__name__}: {error}"
            return dataclasses.replace(
                measured, over=None, error=math.inf, reason=reason, runs_parts=False
            )
        if not worst.reason or not measured.adds_up:
            return measured
        return dataclasses.replace(measured, over=None, error=worst.error, reason=worst.reason)

    def _gradient_changers(self, part: Any) -> tuple[str, ...]:
        """What may change gradients in the passes of a part; found without a backward pass."""
        runner = self._runner
        runner.rewind()
        with runner.saving():
            loss = runner.forward(part).loss
        hooks = ["a hook that the loss function sets"] if runner.sets_hooks else []
        nodes = nodes_behind(loss)
        del loss
        found = gradient_changers(runner.model, nodes)
        let_go_of_graph(nodes)
        return tuple(hooks + found)

    def _nudged(self) -> contextlib.AbstractContextManager[None]:
        return slightly_changed(self._runner.model, 4 * self._runner.rounding, 0.0)

    def _gradient_error(self, rows: FewRows, measured: Additivity) -> GradientError:
        try:
            return self._compare_gradients(
                rows, measured, counts=must_count(measured, len(rows.parts))
            )
        except CountFirst:
            return self._compare_gradients(rows, measured, counts=True)

    def _compare_gradients(
        self, rows: FewRows, measured: Additivity, *, counts: bool
    ) -> GradientError:
        runner = self._runner
        weights = partial(self._weights, rows, measured, counts=counts)
        narrow = runner.rounding >= torch.finfo(torch.float16).eps
        return gradient_error(rows, weights, runner.gradient_tolerance, narrow=narrow)

    def _weights(self, rows: FewRows, measured: Additivity, *, counts: bool) -> BatchWeights:
        shares = self._count_shares(rows, measured) if counts else None
        size = count_measured_rows(rows.whole, self._runner.split)
        return BatchWeights(measured, size, shares=shares, may_repeat=not counts)

    def _count_shares(self, rows: FewRows, measured: Additivity) -> list[PartShare]:
        runner = self._runner
        runner.rewind()
        counter = PartCounter(runner.model, runner.quiet_loss, runner.split, measured.roles)
        return counter.shares(rows.parts)
