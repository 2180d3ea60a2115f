"""What a scalar loss was divided by, read from autograd's graph.

A loss is a sum of terms, each c · Σ elements / n. Walking back from the loss over additions,
factors, casts and views one comes to the reductions that made it, and their nodes say what each
divided by: `mean` the number of elements, `nll_loss` the weight of all targets that are not
ignored, a division its divisor. Weighted by that number, the means of micro-batches make the mean
of the batch, padding or not.

Nothing is guessed: a node without a rule here is an unknown term. Numbers that are tensors stay on
their device.

The rules read the attributes `_saved_…` and `_input_metadata` of autograd's nodes, which torch 2.10
to 2.15 have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from gradfit.batches.scalars import Floor, ScalarReader

Number = int | float | Tensor  # a tensor of one element, wherever it lives

_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
# A penalty on every parameter is a term for each of them; a loss of more terms than this is a sum
# over items written in Python.
_MOST_TERMS = 10_000
# nodes one behind the other: more that Python has seen cannot be freed (`let_go_of_graph`)
_LONGEST_WAY = 12_000
_MOST_NAMED = 6  # terms that differ, in a message


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a loss: `scale` × the sum of some elements / `count`."""

    count: Number | None
    """What the sum was divided by; None if it was not."""
    scale: Number
    """By what the result was multiplied since, by the user's own coefficients for one."""
    reduction: str
    """What made it, for messages: "mean", "nll_loss", "sum", …"""
    node: Any = None
    """Autograd's node of that reduction: what is multiplied to the gradient that enters it scales
    this term alone.
    """
    value: float | None = None
    """What it contributes to the loss; None if nobody read along."""
    floor: Floor | None = None
    """How the number that it was divided by was clamped; None if it was not, or nobody read
    along.
    """
    divisors: tuple[Number, ...] = ()
    """Each number by which the loss function divided it: of a sum they make the count, of a mean
    they are in `scale`.
    """
    is_sum: bool = False
    """The reduction has not divided."""
    is_counted: bool = False
    """`count` is one: it has no sign."""

    def __str__(self) -> str:
        if self.count is None:
            return self.reduction
        return f"{self.reduction} over {float(self.count):g}"

    @property
    def is_divided_by_hand(self) -> bool:
        """Whether the loss function divided by a number of its own: that may be no count, where a
        count would be 0.
        """
        by_torch = self.count is None or self.reduction != "sum"
        plain = not isinstance(self.scale, Tensor) and abs(self.scale) == 1
        return not (by_torch and plain)

    @property
    def items(self) -> Number:
        """The divisor with what was counted in the place of what that was clamped to."""
        if self.floor is None or self.floor.after == self.floor.before:
            return self.divisor
        return self.divisor * (self.floor.before / self.floor.after)

    @property
    def divisor(self) -> Number:
        """All scalars between the sum and the loss as one positive number: the loss is ± the sum /
        `divisor`.
        """
        quotient = _quotient(_or_1(self.count), self.scale)
        if self.is_counted and quotient is self.count:
            return quotient  # one kernel less on an accelerator
        return quotient.abs() if isinstance(quotient, Tensor) else abs(quotient)


class Denominator(NamedTuple):
    """What each term of a loss was divided by, in the order in which the loss adds them."""

    terms: tuple[Term, ...]
    unknown: tuple[str, ...] = ()
    """Names of the nodes that no rule is for; their terms may be divided by anything."""

    @property
    def is_nothing(self) -> bool:
        """Whether the loss is a constant, or was multiplied by 0: nothing is behind it."""
        return not self.terms and not self.unknown

    @property
    def has_values(self) -> bool:
        """Whether each term is known, with its value."""
        return not self.unknown and all(term.value is not None for term in self.terms)

    @property
    def is_sum(self) -> bool:
        """Whether nothing was divided at all."""
        return (
            bool(self.terms) and not self.unknown and all(term.count is None for term in self.terms)
        )

    def __str__(self) -> str:
        known = _counted(map(str, self.terms))
        more = len(known) - _MOST_NAMED
        named = [*known[:_MOST_NAMED], f"{more} more"] if more > 0 else known
        return " + ".join([*named, *_counted(self.unknown)]) or "0 times something"


def _counted(names: Iterable[str]) -> list[str]:
    """Each name once, with how often it is there."""
    return [f"{times} × {name}" if times > 1 else name for name, times in Counter(names).items()]


def read_denominator(loss: Tensor, reader: ScalarReader | None = None) -> Denominator | None:
    """What `loss` was divided by, term by term; None if no term can be read.

    Args:
        loss: a tensor of one element with a graph behind it.
        reader: it was entered while the loss was computed; the terms then have their values and
            floors.

    >>> import torch
    >>> weight = torch.ones(4, 3, requires_grad=True)
    >>> targets = torch.tensor([0, 2, -100, 1])
    >>> print(read_denominator(torch.nn.functional.cross_entropy(weight, targets)))
    nll_loss over 3
    >>> mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    >>> print(read_denominator((weight.sum(1) * mask).sum() / mask.sum()))
    sum over 2
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return None
    walk = _Walk(loss.grad_fn, reader)
    while walk.goes_on:
        walk.follow(walk.paths.pop())
    if walk.paths or (walk.unknown and not walk.terms):
        return None
    return Denominator(tuple(walk.terms), tuple(walk.unknown))


class _Walk:
    """From the loss back to its reductions: the ways that are still to be followed, and the terms
    at the ends of the others.
    """

    def __init__(self, node: Any, reader: ScalarReader | None) -> None:
        self.paths = [_GraphPath(node, reader=reader).with_value()]
        self.terms: list[Term] = []
        self.unknown: list[str] = []

    @property
    def goes_on(self) -> bool:
        """Whether there are ways left, and not too many terms already."""
        return bool(self.paths) and len(self.terms) + len(self.unknown) < _MOST_TERMS

    def follow(self, path: _GraphPath) -> None:
        rule = _RULES.get(path.node.name()) if path.length < _LONGEST_WAY else None
        reached = None if rule is None else rule(path)
        if reached is None:
            self.unknown.append(path.node.name())
        elif isinstance(reached, Term):
            self.terms.append(reached)
        else:  # of a single way on, the number is still all of what was reached so far
            value = path.value if len(reached) == 1 else None
            # The last one is followed first: reversed, terms come in the order of the loss.
            self.paths += [one.with_value(value) for one in reversed(reached)]


class _GraphPath(NamedTuple):
    """A node that was reached, and the scalars on the way to it."""

    node: Any
    scaled: Number = 1
    divisors: tuple[Number, ...] = ()
    reader: ScalarReader | None = None
    value: float | None = None  # what comes this way to the loss
    floor: Floor | None = None  # of the divisor
    length: int = 0  # nodes before this one

    def with_value(self, otherwise: float | None = None) -> _GraphPath:
        """With what comes this way to the loss, if the node's own result was seen."""
        seen = None if self.reader is None else self.reader.value_of(self.node)
        if seen is None:
            return self if self.value == otherwise else self._replace(value=otherwise)
        return self._replace(value=seen * float(_quotient(self.scaled, _or_1(self.divided))))

    @property
    def divided(self) -> Number | None:
        """All divisors as one; None if there are none."""
        product: Number | None = None
        for divisor in self.divisors:
            product = divisor if product is None else product * divisor
        return product

    def to(
        self, place: int, *, scale: Number = 1, divide: Number | None = None
    ) -> list[_GraphPath]:
        """On to the node's input at that place; nowhere if it is a constant, or multiplied by 0."""
        node = self.node.next_functions[place][0]
        if node is None or (not isinstance(scale, Tensor) and scale == 0):
            return []
        divisors = self.divisors if divide is None else (*self.divisors, divide)
        length = self.length + 1
        return [
            self._replace(node=node, scaled=self.scaled * scale, divisors=divisors, length=length)
        ]

    def mean(self, count: Number, name: str) -> Term:
        """The term of a reduction that has divided by `count`."""
        divided, scale = self.divided, self.scaled
        scale = scale if divided is None else _quotient(scale, divided)
        return Term(count, scale, name, self.node, self.value, self.floor, self.divisors)

    def sum(self, name: str = "sum") -> Term:
        """The term of a reduction that has not divided: what comes after it has, if anything."""
        divided, node = self.divided, self.node
        return Term(divided, self.scaled, name, node, self.value, self.floor, self.divisors, True)

    def shape(self, place: int) -> tuple[int, ...]:
        """Of the node's input, in the forward pass."""
        node, index = self.node.next_functions[place]
        return tuple(node._input_metadata[index].shape)


_Reached = Term | list[_GraphPath] | None
_RULES: dict[str, Callable[[_GraphPath], _Reached]] = {}


def _rule(
    *names: str,
) -> Callable[[Callable[[_GraphPath], _Reached]], Callable[[_GraphPath], _Reached]]:
    def register(function: Callable[[_GraphPath], _Reached]) -> Callable[[_GraphPath], _Reached]:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


@_rule(
    "ToCopyBackward0",
    "CloneBackward0",
    "AliasBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "UnsqueezeBackward0",
    "SelectBackward0",
    "PermuteBackward0",
    "TBackward0",
    "AsStridedBackward0",
    "ExpandBackward0",
)
def _same_number(path: _GraphPath) -> _Reached:
    # Of several numbers it may take some and leave others: what comes through is not told.
    return path.to(0) if math.prod(path.shape(0)) == 1 else None


@_rule("NegBackward0")
def _neg(path: _GraphPath) -> _Reached:
    return path.to(0, scale=-1)


@_rule("AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward1")
def _add(path: _GraphPath) -> _Reached:
    first, second = _signs(path.node)
    later = path.to(1, scale=second) if len(path.node.next_functions) > 1 else []
    return path.to(0, scale=first) + later


def _signs(node: Any) -> tuple[Number, Number]:
    """By what an addition or a subtraction has multiplied its two inputs."""
    alpha = getattr(node, "_saved_alpha", 1)
    if node.name().startswith("Rsub"):
        return -alpha, 1
    return 1, -alpha if node.name().startswith("Sub") else alpha


@_rule("MulBackward0", "MulBackward1")
def _mul(path: _GraphPath) -> _Reached:
    differentiated = [node is not None for node, _ in path.node.next_functions]
    if sum(differentiated) > 1:
        return None  # a product of two losses is no loss of one
    if differentiated[0]:
        return path.to(0, scale=_number(path.node._saved_other))
    return path.to(1, scale=_number(path.node._saved_self))


@_rule("DivBackward0", "DivBackward1")
def _div(path: _GraphPath) -> _Reached:
    inputs = path.node.next_functions
    if len(inputs) > 1 and inputs[1][0] is not None:
        return None  # what it is divided by is trained, too
    other = path.node._saved_other
    floor = None if path.reader is None else path.reader.floor_of(other)
    if floor is not None:
        path = path._replace(floor=floor)
    return path.to(0, divide=_number(other))


@_rule("SumBackward0", "SumBackward1", "NansumBackward0")
def _sum(path: _GraphPath) -> _Reached:
    inside = _several(path)
    if inside is not None:
        return inside
    # A sum of means over the other dimensions, as in x.mean(0).sum(), has divided there.
    count = _inner_count(path)
    return path.sum() if count is None else path.mean(count, "mean")


@_rule("_SumOfTilesBackward")
def _sum_of_tiles(path: _GraphPath) -> _Reached:
    return path.sum()


@_rule("MeanBackward0", "MeanBackward1")
def _mean(path: _GraphPath) -> _Reached:
    inside = _several(path)
    if inside is not None:
        return inside
    return path.mean(math.prod(path.shape(0)) * (_inner_count(path) or 1), "mean")


def _several(path: _GraphPath) -> list[_GraphPath] | None:
    """Where a reduction is over one number, or over a stack of several losses: the way to each of
    them.
    """
    shape = path.shape(0)
    if not shape:
        return path.to(0)
    stack = path.node.next_functions[0][0]
    if stack.name() not in ("StackBackward0", "CatBackward0"):
        return None
    divide = math.prod(shape) if path.node.name().startswith("Mean") else None
    return _ways_into(path._replace(node=stack), divide)


def _ways_into(path: _GraphPath, divide: int | None) -> list[_GraphPath] | None:
    """To each of the numbers that are stacked; None if these are more than numbers."""
    functions = path.node.next_functions
    places = [place for place, (node, _) in enumerate(functions) if node is not None]
    if any(math.prod(path.shape(place)) != 1 for place in places):
        return None
    return [step for place in places for step in path.to(place, divide=divide)]


def _inner_count(path: _GraphPath) -> int | None:
    """What means right below this reduction, over other dimensions, have divided by; None if there
    are none.
    """
    count = None
    for node in reductions_below(path.node):
        if node.name() == "MeanBackward1":
            source, place = node.next_functions[0]
            before = math.prod(source._input_metadata[place].shape)
            after = max(1, math.prod(node._input_metadata[0].shape))
            count = (1 if count is None else count) * (before // after)
    return count


_BELOW_A_REDUCTION = {
    "SumBackward1",
    "MeanBackward1",
    "ViewBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
}


def reductions_below(node: Any) -> Iterator[Any]:
    """The nodes of reductions over some dimensions, and of views, right below a reduction."""
    while True:
        node = node.next_functions[0][0]
        if node.name() not in _BELOW_A_REDUCTION or node.next_functions[0][0] is None:
            return
        yield node


@_rule("NllLossBackward0", "NllLoss2DBackward0")
def _nll_loss(path: _GraphPath) -> _Reached:
    if path.node._saved_reduction != _MEAN:
        return path.sum("nll_loss")
    term = path.mean(_number(path.node._saved_total_weight), "nll_loss")
    return replace(term, is_counted=path.node._saved_weight is None)


@_rule(
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "SoftMarginLossBackward0",
)
def _by_element(path: _GraphPath) -> _Reached:
    place = 0 if path.node.next_functions[0][0] is not None else 1
    name = _name(path)
    return (
        path.mean(math.prod(path.shape(place)), name)
        if path.node._saved_reduction == _MEAN
        else path.sum(name)
    )


@_rule("MultiMarginLossBackward0", "MultilabelMarginLossBackward0")
def _by_row(path: _GraphPath) -> _Reached:
    shape, name = path.shape(0), _name(path)
    rows = shape[0] if len(shape) > 1 else 1
    return path.mean(rows, name) if path.node._saved_reduction == _MEAN else path.sum(name)


@_rule("DotBackward0", "VdotBackward0", "BmmBackward0", "MmBackward0", "MvBackward0")
def _dot(path: _GraphPath) -> _Reached:
    is_number = math.prod(path.node._input_metadata[0].shape) == 1  # of what it returned
    return path.sum() if is_number else None


@_rule("WhereBackward0")
def _where(path: _GraphPath) -> _Reached:
    condition = path.node._saved_condition
    return path.to(0 if bool(condition) else 1) if condition.numel() == 1 else None


def _name(path: _GraphPath) -> str:
    return str(path.node.name()).removesuffix("Backward0")


def _number(value: Any) -> Number:
    """A scalar that a node has saved; a tensor of the CPU becomes a Python number, another stays
    where it is.
    """
    if isinstance(value, Tensor) and value.device.type == "cpu":
        # Not item(): under a dispatch mode torch would hand it the plain number that this scalar
        # was wrapped from.
        number: Any = value.tolist()
        while isinstance(number, list):
            number = number[0]
        return number  # type: ignore[no-any-return]
    return value  # type: ignore[no-any-return]


def _or_1(number: Number | None) -> Number:
    return 1 if number is None else number


def _quotient(number: Number, by: Number) -> Number:
    """As tensors divide: a mean over no items at all is divided by 0."""
    if not isinstance(by, Tensor) and by == 1:
        return number
    if isinstance(number, Tensor) or isinstance(by, Tensor) or by:
        return _wide(number) / _wide(by)
    return math.inf if number else math.nan


def _wide(number: Number) -> Number:
    """Whole numbers in double precision, as Python divides them: torch does in single."""
    if not isinstance(number, Tensor) or number.is_floating_point() or number.device.type == "mps":
        return number
    return number.double()
