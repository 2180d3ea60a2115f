"""What share each term of a part's loss has in the loss of the whole batch, where one weight for
all cannot be right.

Two means in one loss may be over different items: tokens and rows, or labels that are ignored in
one task and not in the other. Each then has a total of its own, and what has been added up under
another total can no longer be mended. So the parts are counted before the first backward pass: a
forward of each, in which no activation is kept, reads every term's divisor and value. A part's
terms are then scaled one by one, by multiplying the gradient that enters the node of each term's
reduction.

The same forward shows counts that were clamped (`mask.sum().clamp(min=1)`), which a part without
items needs.

Cost: one forward more for each part. Memory: less than the forward that follows takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import eager_functions
from gradfit.batches.denominator import Denominator, Term, read_denominator
from gradfit.batches.loss import PartLoss, read_loss
from gradfit.batches.scalars import ScalarReader
from gradfit.batches.snapshot import Generators
from gradfit.errors import MisuseError
from gradfit.tree import repeat_rows, split_batch, unmarked

T = TypeVar("T")

_NEXT = "Return gf.Loss(sum=…, count=…), or pass fit(micro_batch='whole')."


@dataclass(frozen=True, slots=True)
class TermCount:
    """One term of one part's loss."""

    divisor: float
    """What its sum was divided by."""
    items: float
    """The same if it was not clamped: what adds up over parts."""
    value: float

    @property
    def is_lost(self) -> bool:
        """Whether a sum that was not 0 was divided by 0 items: nothing can tell any more what it
        was.
        """
        return self.divisor == 0 and not math.isnan(self.value) and self.value != 0

    @property
    def floor(self) -> float:
        """What the divisor is at least, as far as this part shows."""
        return self.divisor if self.items < self.divisor else 0.0


@dataclass(frozen=True, slots=True)
class PartShare:
    """How one part enters the whole."""

    factors: tuple[float, ...]
    """By which each of its terms is multiplied."""
    divisors: tuple[float, ...]
    value: float
    """What it then contributes to the loss of the whole."""
    log_share: float = 0.0
    """Of all items of the first term that has any, how many are this part's: what its logs
    weigh.
    """

    @property
    def is_nothing(self) -> bool:
        return not self.value and not any(self.divisors)


def without_activations() -> saved_tensors_hooks:
    """Inside, autograd keeps single numbers of what it saves, which say what was divided by, and
    nothing else.
    """
    return saved_tensors_hooks(_keep_numbers, _give_back)


def run_without_activations(forward: Callable[[], T]) -> T:
    """What a forward returns, run as above; or with all that autograd saves, if it runs a backward
    pass of its own, as a penalty on a slope does.
    """
    generators = Generators()
    try:
        with without_activations():
            return forward()
    except _NothingSaved:
        generators.restore()
    return forward()


class _NothingSaved(RuntimeError):
    """A backward pass asks for what was not saved."""


def _keep_numbers(tensor: Tensor) -> Tensor | None:
    if tensor.numel() > 1:
        return None
    # without its graph: a node that saves its own result would hold itself, and all before it
    return tensor if tensor.is_leaf else tensor.detach()


def _give_back(kept: Tensor | None) -> Tensor:
    if kept is None:
        raise _NothingSaved("Nothing was saved in this forward.")
    return kept


def share_terms(parts: Sequence[Sequence[TermCount]], roles: Sequence[str]) -> list[PartShare]:
    """The shares of all parts of one batch.

    Args:
        parts: the terms of each part.
        roles: of each term, "adds" if its divisor is a total over the batch, "constant" if it is
            the same in each part, "same" if the whole term is the same in each part.

    >>> first, second = TermCount(3.0, 3.0, 10.0), TermCount(1.0, 1.0, 6.0)
    >>> [share.factors for share in share_terms([[first], [second]], ["adds"])]
    [(0.75,), (0.25,)]
    """
    totals = [_total([part[place] for part in parts]) for place in range(len(roles))]
    shares = [_share(part, roles, totals, len(parts)) for part in parts]
    return [
        replace(share, log_share=of_items)
        for share, of_items in zip(shares, _shares_of_items(parts, roles), strict=True)
    ]


def _shares_of_items(parts: Sequence[Sequence[TermCount]], roles: Sequence[str]) -> list[float]:
    """How the items of the first term that counts any are spread over the parts; evenly if there
    are none.
    """
    for place, role in enumerate(roles):
        total = math.fsum(part[place].items for part in parts)
        if role == "adds" and total:
            return [part[place].items / total for part in parts]
    return [1 / len(parts)] * len(parts)


def _total(terms: Sequence[TermCount]) -> float:
    """What one term of the whole is divided by."""
    return max(math.fsum(term.items for term in terms), *(term.floor for term in terms))


def _share(
    part: Sequence[TermCount], roles: Sequence[str], totals: Sequence[float], parts: int
) -> PartShare:
    factors = tuple(map(partial(_factor, parts), part, roles, totals))
    value = math.fsum(
        factor * term.value for factor, term in zip(factors, part, strict=True) if factor
    )
    return PartShare(factors, tuple(term.divisor for term in part), value)


def _factor(parts: int, term: TermCount, role: str, total: float) -> float:
    """Of one term of one of so many parts."""
    if role == "adds":
        return term.divisor / total if total else 0.0
    return 1.0 if role == "constant" else 1.0 / parts


def count_terms(read: Denominator | None) -> list[TermCount] | None:
    """The terms of a loss that was read along; None unless each is known with its value."""
    if read is None or not read.has_values:
        return None
    return [
        TermCount(float(term.divisor), float(term.items), float(term.value or 0.0))
        for term in read.terms
    ]


class PartCounter:
    """Counts the terms of parts by forwards alone; buffers and generators are the caller's to put
    back.

    Args:
        model: in training mode.
        loss_fn: as for `fit`.
        split: as for `fit`; None cuts along dim 0.
        roles: of the terms, as they were measured.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Any],
        split: Callable[[Any, int], Iterable[Any]] | None,
        roles: Sequence[str],
    ) -> None:
        self._model, self._loss_fn, self._split, self._roles = model, loss_fn, split, roles

    def shares(self, parts: Sequence[Any], first: int = 0) -> list[PartShare]:
        """Of all parts of a batch, in their order; they are run from part number `first` on, as the
        step will.
        """
        order = [*range(first, len(parts)), *range(first)]
        counts = {number: self._count(parts[number]) for number in order}
        return share_terms([counts[number] for number in range(len(parts))], self._roles)

    def _count(self, part: Any) -> list[TermCount]:
        read = self._read(part)
        counts = count_terms(read)
        if read is not None and read.is_nothing:
            return [TermCount(0.0, 0.0, 0.0)] * len(self._roles)
        is_alike = read is not None and not read.unknown and len(read.terms) == len(self._roles)
        if is_alike and counts is None:
            raise MisuseError(
                f"This micro-batch's loss is {read}, and a batch of which a micro-batch may have no"
                " items needs the value of each of its terms, which one function of torch's has"
                f" added up (cross_entropy with label_smoothing=). Nothing was updated. {_NEXT}"
            )
        if read is None or counts is None or len(counts) != len(self._roles):
            raise MisuseError(
                f"This micro-batch's loss is {read or 'divided by what cannot be read'}, which is"
                f" not what the sample's was, so nothing was updated. {_NEXT}"
            )
        _require_nothing_lost(counts, read)
        for place in self._places_to_count(read):
            counts[place] = replace(counts[place], items=self._items(part, place))
        return counts

    def _places_to_count(self, read: Denominator) -> list[int]:
        """The terms whose divisor may be their items, or a floor."""
        roles = zip(self._roles, read.terms, strict=True)
        return [
            place
            for place, (role, term) in enumerate(roles)
            if role == "adds" and may_be_clamped(term)
        ]

    def _read(self, part: Any) -> Denominator | None:
        reader = ScalarReader()

        def forward() -> Any:
            with reader:
                return self._loss_fn(self._model, unmarked(part))

        with eager_functions():
            result = run_without_activations(forward)
        read = read_denominator(read_loss(result, 1).loss, reader)
        del result
        reader.let_go()
        return read

    def _items(self, part: Any, place: int) -> float:
        """Over how many items a term is that is exactly 0. A row given twice has twice as many,
        unless that is a floor.

        `max(1, int(mask.sum()))` is a number of Python's, which nobody sees being made.
        """
        if self._split is not None:
            raise MisuseError(
                "A micro-batch's loss is 0, divided by a number that may be its items or a floor"
                " such as max(1, n); that cannot be told where `split` cuts the batch, so nothing"
                f" was updated. {_NEXT}"
            )
        generators = Generators()  # these runs draw numbers that the step does not
        items = math.fsum(self._items_of_row(row, place) for row in split_batch(part, 1))
        generators.restore()
        return items

    def _items_of_row(self, row: Any, place: int) -> float:
        once, twice = (self._divisor(repeat_rows(row, times), place) for times in (1, 2))
        if math.isclose(twice, 2 * once, rel_tol=1e-5):
            return once
        if math.isclose(twice, once, rel_tol=1e-5):
            return 0.0  # a floor
        raise MisuseError(
            f"A row's loss is divided by {once:g}, and by {twice:g} if the row is there"
            f" twice: that is no number of items, so nothing was updated. {_NEXT}"
        )

    def _divisor(self, rows: Any, place: int) -> float:
        read = self._read(rows)
        if read is None or place >= len(read.terms):
            return math.nan
        return float(read.terms[place].divisor)


def _require_nothing_lost(counts: Sequence[TermCount], read: Denominator) -> None:
    if any(count.is_lost for count in counts):
        raise MisuseError(
            f"A micro-batch's loss is {read}: what was divided by 0 is lost, so nothing was"
            f" updated. {_NEXT}"
        )


def may_be_clamped(term: Term) -> bool:
    """Whether a term is exactly 0 and was divided by a number of which it was not seen how it was
    made.
    """
    # multiplied by 1 / 1, it looks like a plain sum
    by_hand = term.is_divided_by_hand or term.reduction == "sum"
    return by_hand and term.floor is None and term.value == 0.0


def scale_terms(part: PartLoss, share: PartShare, read: Denominator) -> Tensor:
    """The part's loss as its contribution to the whole: with that value, and with that gradient.

    Raises:
        MisuseError: two terms with different shares come from one reduction.
    """
    for node, factor in _factor_of_each_node(share, read):
        if factor != 1.0:
            node.register_prehook(_Scale(factor))
    scaled: Tensor = _WithValue.apply(part.loss, share.value)  # type: ignore[no-untyped-call]
    return scaled


def _factor_of_each_node(share: PartShare, read: Denominator) -> list[tuple[Any, float]]:
    factors: dict[int, tuple[Any, float]] = {}
    for term, factor in zip(read.terms, share.factors, strict=True):
        _, first = factors.setdefault(id(term.node), (term.node, factor))
        if not math.isclose(first, factor, rel_tol=1e-6):
            raise MisuseError(
                f"One sum enters the loss under two different divisors ({read}). {_NEXT}"
            )
    return list(factors.values())


class _Scale:
    """A hook before a node: multiplies what enters it. By 0 there is nothing left, not even of
    infinities.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else self._scaled(one) for one in gradients)

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)


class _WithValue(torch.autograd.Function):
    """Another number in the place of a loss, with the loss's gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        return torch.full_like(loss, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
