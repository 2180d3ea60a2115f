"""Do the losses of parts make the loss of the whole? Measured on a few rows, before a batch is cut.

The loss is run on some rows and on unequal parts of them, without keeping activations and without
randomness that depends on the number of rows, and the ways in which parts can be put together are
tried: by the count that `loss_fn` returns, by what the mean says it was divided by, by nothing (a
sum), by rows. A loss that couples rows (a contrastive one, the worst of the batch, statistics over
the batch) agrees with none of them.

It is done twice, the second time with some small parameters slightly changed: at its first step a
model may be in a place where different losses are equal, as all zeros at the output, or a policy
that is still the old one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradfit._torch import is_out_of_memory
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.denominator import Denominator, read_denominator
from gradfit.batches.loss import read_loss
from gradfit.batches.quiet import QuietRandomness, without_dropout
from gradfit.batches.scalars import ScalarReader
from gradfit.batches.shares import TermCount, count_terms, share_terms, without_activations
from gradfit.errors import MisuseError
from gradfit.tree import leaves, map_tensors, repeat_rows, size_of_batch, split_batch, unmarked

LossFunction = Callable[[nn.Module, Any], Any]
Cut = Callable[[Any, int], Iterable[Any]]

MOST_ROWS = 5  # 4 + 1 and 3 + 2: few enough for any budget that a row fits in
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# relative; the second where numbers are rounded to 16 bits on the way
_TOLERANCE, _COARSE_TOLERANCE = 2e-5, 2e-3
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
) -> Additivity:
    """Run the loss on a few rows and on parts of them, and compare.

    Parameters and modes come back as they were; buffers and generators are the caller's to put
    back.

    Args:
        model: in the mode in which it is trained.
        loss_fn: as for `fit`.
        batch: the rows are taken from its beginning.
        split: as for `fit`; None cuts along dim 0.
        rows: at most so many, so that little memory is needed.
        rewind: puts all random generators back to where they were; called before each run.
        finish: called with each loss, for modules that wait for a backward pass. Without it no
            activation is kept.

    Raises:
        MisuseError: `loss_fn` returns something that is no loss.
    """
    run = _Runner(model, loss_fn, split, rewind, finish)
    names = tuple(batch_norms(model))
    cuts = list(_choose_rows(batch, split, rows))
    if names:
        cuts = cuts[-1:]  # which cannot be run on one row
    with eager_functions():
        found = run.measure(cuts)
        if run.raised and len(cuts) > 1:
            found = run.measure(cuts[-1:])  # a single row may be all that it refuses
        if not found.adds_up and not names and (run.raised or run.is_random):
            # some losses can be compared only without what is random in training
            with _evaluating(model):
                again = run.measure(cuts)
            found = again if again.adds_up else found
        if not found.adds_up and not names and split is None and _could_be_sequence_first(batch):
            found = _sequence_first(model, loss_fn, batch, rows, rewind, finish, found)
    if names:
        return dataclasses.replace(found, over=None, modules=names, reason=batch_norm_reason(names))
    return found


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same rows as a whole and in parts."""

    whole: Run
    parts: tuple[Run, ...]

    def mean_error(self, weight: Callable[[Run], float]) -> float:
        """How far the whole is from the parts' weighted mean, and its weight from the sum of
        theirs; relative.
        """
        total = math.fsum(weight(part) for part in self.parts)
        if not total > 0 or not weight(self.whole) > 0:
            return math.inf
        if any(
            not weight(part) and part.value and not math.isnan(part.value) for part in self.parts
        ):
            return math.inf  # divided by 0 items, and not nothing: what was divided is lost
        mixed = math.fsum(weight(part) * part.value for part in self.parts if weight(part)) / total
        return max(self._relative(mixed), abs(total / weight(self.whole) - 1))

    def items_error(self) -> float:
        """How far the whole is from the sum of its parts, or its count from the sum of theirs;
        relative.
        """
        whole, total = self.whole.count or 0.0, math.fsum(part.count or 0.0 for part in self.parts)
        return max(self.sum_error(), abs(total - whole) / max(whole, total, 1.0))

    def terms_error(self, roles: Sequence[str]) -> float:
        """How far the whole is from its parts, each term by its own total; relative."""
        if any(term.is_lost for part in self.parts for term in part.terms or ()):
            return math.inf
        shares = share_terms([part.terms or () for part in self.parts], roles)
        return self._relative(math.fsum(share.value for share in shares))

    def sum_error(self) -> float:
        """How far the whole is from the sum of its parts; relative."""
        return self._relative(math.fsum(part.value for part in self.parts))

    def _relative(self, mixed: float) -> float:
        difference = abs(mixed - self.whole.value)
        values = [abs(run.value) for run in (self.whole, *self.parts)]
        largest = max(value for value in (*values, 0.0) if not math.isnan(value))
        # From zeros alone nothing can be told, nor from what is not finite.
        return difference / largest if largest > 0 and math.isfinite(difference) else math.inf


def judge(comparisons: Sequence[Comparison], tolerance: float, read: str = "") -> Additivity:
    """By what the parts are to be weighted, if by anything."""
    runs = [run for one in comparisons for run in (one.whole, *one.parts)]
    roles = _roles_of(comparisons)
    each = _roles_of_values(comparisons, roles)
    if not _one_weight(runs, roles) and not each:
        roles = ()
    ways: dict[str, Callable[[Comparison], float]] = {}
    if all(run.count is not None for run in runs):
        ways["items"] = Comparison.items_error
    else:
        if _one_weight(runs, roles) and "adds" in roles:
            ways["divisor"] = lambda one: one.mean_error(
                lambda run: (run.divisors or ())[roles.index("adds")]
            )
        elif _one_weight(runs, roles) and roles:
            ways["sum"] = Comparison.sum_error
        if len(each) > 1 or "adds" in each:
            ways["terms"] = lambda one: one.terms_error(each)
        if not _depends_on_rows_together(comparisons):
            ways["rows"] = lambda one: one.mean_error(lambda run: float(run.rows))
    errors = {over: max(map(error, comparisons)) for over, error in ways.items()}
    for over, error in errors.items():
        if error <= tolerance:
            told = () if over == "rows" else each or roles
            return Additivity(over, error, read=read, roles=told)
    if (
        "items" in ways
        and "adds" in roles
        and max(one.mean_error(_count_of) for one in comparisons) <= tolerance
    ):
        whole = comparisons[0].whole
        raise MisuseError(
            f"loss_fn returned (loss, {whole.count:g}), but the loss is {read}: a mean, not a sum"
            " over the count. Return loss * count with the count, or the mean alone."
        )
    ways = ways or {"rows": Comparison.sum_error}  # for the message alone
    finite = [min(way(one) for way in ways.values()) for one in comparisons]
    largest = max((error for error in finite if math.isfinite(error)), default=math.inf)
    return Additivity(None, largest, read=read, roles=roles, reason=_why(comparisons, errors, read))


def _why(comparisons: Sequence[Comparison], errors: dict[str, float], read: str) -> str:
    first = comparisons[0]
    if all(run.value == 0 for one in comparisons for run in (one.whole, *one.parts)):
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


def _roles_of(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Whether each term's divisor adds up over the parts or stays what it is; () if it cannot be
    told for each.
    """
    roles = _read_roles(comparisons)
    return () if _NEITHER in roles else roles


def _read_roles(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """The same, term by term; () if not all runs have the same terms."""
    runs = [run for one in comparisons for run in (one.whole, *one.parts)]
    lengths = {None if run.divisors is None else len(run.divisors) for run in runs}
    if len(lengths) != 1 or lengths == {None}:
        return ()
    roles = []
    for term in range(len(runs[0].divisors or ())):
        numbers = [
            [(run.divisors or ())[term] for run in (one.whole, *one.parts)] for one in comparisons
        ]
        if all(is_close(sum(parts), whole) for whole, *parts in numbers):
            roles.append("adds")
        elif all(is_close(part, whole) for whole, *parts in numbers for part in parts):
            roles.append("constant")
        else:
            roles.append(_NEITHER)
    return tuple(roles)


def _depends_on_rows_together(comparisons: Sequence[Comparison]) -> bool:
    """Whether a term has a coefficient that all rows of a part make, as one loss's size does that
    scales another.

    Values may add up by rows all the same, and gradients do not.
    """
    return _NEITHER in _read_roles(comparisons)


def _roles_of_values(comparisons: Sequence[Comparison], roles: Sequence[str]) -> tuple[str, ...]:
    """The roles, with "same" for a term that does not depend on the rows at all, as a penalty on
    the parameters does.

    () unless each term of each run is known with its value.
    """
    if not roles or any(
        run.terms is None for one in comparisons for run in (one.whole, *one.parts)
    ):
        return ()
    found = []
    for place, role in enumerate(roles):
        numbers = [
            [(run.terms or ())[place].value for run in (one.whole, *one.parts)]
            for one in comparisons
        ]
        is_same = role == "constant" and all(
            is_close(part, whole) for whole, *parts in numbers for part in parts
        )
        found.append("same" if is_same else role)
    return tuple(found)


def _one_weight(runs: Sequence[Run], roles: Sequence[str]) -> bool:
    """Whether one number for a part is right for all of its terms, and none of these was
    clamped.
    """
    is_clamped = any(term.floor for run in runs for term in run.terms or ())
    first = runs[0].divisors or ()
    return not is_clamped and all(
        go_together(roles, first, run.divisors or ()) for run in runs[1:] if roles
    )


def go_together(roles: Sequence[str], first: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the divisors that stay are the same, and those that grow have grown by the same
    factor.
    """
    pairs = list(zip(first, now, strict=True))
    staying = [pair for role, pair in zip(roles, pairs, strict=True) if role != "adds"]
    growing = [pair for role, pair in zip(roles, pairs, strict=True) if role == "adds"]
    # a/b = c/d, written so that a term without any items on one side is compared, too.
    return all(is_close(a, b) for a, b in staying) and all(
        is_close(a * growing[0][1], b * growing[0][0]) for a, b in growing[1:]
    )


def is_close(first: float, second: float) -> bool:
    """Equal but for the rounding of a few float32 operations."""
    return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-12)


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
        self._coarse = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        self._tolerance = _TOLERANCE
        self._read = ""
        self._by_hand, self._floor = False, 0.0
        self.raised = False
        self.is_random = False

    def measure(self, cuts: Sequence[tuple[Any, Sequence[Any]]]) -> Additivity:
        """Compare each whole with its parts, as the model is and slightly changed."""
        self.raised = self.is_random = False
        comparisons: list[Comparison] = []
        try:
            first = self.run(cuts[0][0])
            read = self._read
            if not self._is_same(first, self.run(cuts[0][0])):
                self.is_random = True
                return Additivity(
                    None,
                    math.inf,
                    reason="the loss is another one each time it is called with the same rows, by "
                    "state outside of parameters, buffers and generators",
                )
            for whole, parts in cuts:
                comparisons.append(self._compare(whole, parts))
            with _slightly_changed(self._model):
                changed = self._compare(*cuts[-1])
            if math.isfinite(changed.whole.value):
                comparisons.append(changed)
        except MisuseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.raised = True
            said = f"the loss of fewer rows raises {type(error).__name__}: {error}"
            return Additivity(None, math.inf, read=self._read, reason=said, runs_parts=False)
        found = judge(comparisons, self._tolerance, read)
        return dataclasses.replace(
            found, by_hand=self._by_hand and "adds" in found.roles, floor=self._floor
        )

    def _compare(self, whole: Any, parts: Sequence[Any]) -> Comparison:
        return Comparison(self.run(whole), tuple(self.run(part) for part in parts))

    def _is_same(self, first: Run, second: Run) -> bool:
        if math.isnan(first.value) or math.isnan(second.value):
            return True
        return math.isclose(first.value, second.value, rel_tol=self._tolerance)

    def run(self, part: Any) -> Run:
        """One forward; of what autograd saves only single numbers are kept, which say what was
        divided by.
        """
        self._rewind()
        try:
            found = self._run(part)
        except MisuseError:
            raise
        except Exception as error:
            if not self._drops or is_out_of_memory(error):
                raise
            self._rewind()
            self._drops = False  # a loss that differentiates inside itself needs what was saved
            try:
                found = self._run(part)
            except Exception:
                self._drops = True
                raise
        return found

    def _run(self, part: Any) -> Run:
        quiet = QuietRandomness()
        reader = ScalarReader()
        saving = without_activations() if self._drops else contextlib.nullcontext()
        with saving, warnings.catch_warnings(), without_dropout(self._model), quiet, reader:
            warnings.simplefilter("ignore")  # about rows that nobody trains on
            result = self._loss_fn(self._model, unmarked(part))
        rows = (
            sum(1 for _ in self._split(part, 1)) if self._split is not None else size_of_batch(part)
        )
        read = read_loss(result, rows)
        denominator = read_denominator(read.loss, reader)
        divisors = terms = None
        if denominator is not None:
            divisors = tuple(float(term.items) for term in denominator.terms)
            self._note(denominator)
            # Over several processes a forward alone cannot be run before each step.
            if (
                self._drops
                and self._finish is None
                and (counts := count_terms(denominator)) is not None
            ):
                terms = tuple(counts)
        self._tolerance = max(
            self._tolerance, _tolerance_of(read.loss, coarse=quiet.autocast or self._coarse)
        )
        count = None if read.count is None else float(read.count)
        run = Run(float(read.loss.detach()), rows, count, divisors, terms)
        if self._finish is not None:
            self._finish(read.loss)
        return run

    def _note(self, read: Denominator) -> None:
        self._read = str(read)
        for term in read.terms:
            self._by_hand = self._by_hand or term.is_divided_by_hand
            if term.floor is not None and not term.floor.is_whole and term.floor.after:
                self._floor = max(
                    self._floor, float(term.divisor) * term.floor.least / term.floor.after
                )


def _tolerance_of(loss: Tensor, *, coarse: bool) -> float:
    if loss.dtype in (torch.float16, torch.bfloat16):
        return 4 * torch.finfo(loss.dtype).eps
    return _COARSE_TOLERANCE if coarse else _TOLERANCE


def _choose_rows(batch: Any, split: Cut | None, most: int) -> Iterator[tuple[Any, list[Any]]]:
    """A few rows, whole and in unequal parts, cut in two ways."""
    cut = split or split_batch
    total = size_of_batch(batch) if split is None else sum(1 for _ in split(batch, 1))
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


def _sequence_first(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    rows: int,
    rewind: Any,
    finish: Any,
    found: Additivity,
) -> Additivity:
    """Say so, if the batch adds up along dim 1, which makes dim 0 the time."""

    def along(nest: Any, size: int) -> Iterator[Any]:
        wide = next(tensor.size(1) for tensor in leaves(nest) if tensor.dim() > 1)
        for start in range(0, wide, size):
            cut = slice(start, start + size)
            yield map_tensors(nest, lambda t, cut=cut: t[:, cut] if t.dim() > 1 else t)  # type: ignore[misc]

    try:
        other = _Runner(model, loss_fn, along, rewind, finish).measure(
            list(_choose_rows(batch, along, rows))
        )
    except Exception:  # the user's code, on a batch it may not be made for
        return found
    if not other.adds_up:
        return found
    return Additivity(
        None,
        found.error,
        read=found.read,
        reason="it adds up along dim 1, so dim 0 seems to be the sequence and not "
        "the batch. Pass split=, a function (batch, size) -> parts, which cuts along dim 1, as "
        "x.split(size, dim=1)",
    )


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
def _slightly_changed(model: nn.Module) -> Iterator[None]:
    """Some small trained parameters, biases and the like, are a little different inside."""
    trained = [
        p
        for p in model.parameters()
        if p.requires_grad and type(p.data) is Tensor and p.is_floating_point()
    ]
    chosen: list[tuple[nn.Parameter, Tensor]] = []
    room = _SMALL_SHARE * sum(p.nbytes for p in trained)
    for parameter in sorted(trained, key=lambda p: p.numel()):
        room -= parameter.nbytes
        if chosen and room < 0:
            break
        chosen.append((parameter, parameter.detach().clone()))
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        with torch.no_grad():
            for parameter, content in chosen:
                noise = torch.randn(content.shape, generator=generator, device="cpu").to(content)
                parameter.add_(noise * (0.05 * content.abs().mean() + 0.01))
        yield
    finally:
        with torch.no_grad():
            for parameter, content in chosen:
                parameter.copy_(content)
