"""Do the gradients of parts make the gradient of the whole? Measured on a few rows, with both
passes.

Values may add up where gradients do not: an embedding that scales them by how often a word is in
the batch, a hook that clamps or normalises them.

The parts are backpropagated 1,024 times larger, and their sum is divided by it: what is linear does
not notice, and what clamps does. The sum is then negated in place, and the whole's gradient added
to it, so that there is one set of gradients and no copy of it.

Cost: one forward and one backward of a few rows, twice. What fails is run once more, to say why.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfit._torch_distributed import local_part
from gradfit._torch_fsdp import (
    drop_gradients,
    set_unsharded_gradient,
    units_of,
    unsharded_gradient,
)
from gradfit.batches.loss import PartLoss
from gradfit.batches.passes import BetweenPasses
from gradfit.batches.snapshot import unreduced_gradients
from gradfit.batches.weights import BatchWeights

_LARGE = 2.0**10  # a power of two, by which numbers are multiplied and divided without rounding
# Of all gradients' norm: what is added to a parameter's own before its error is divided by it.
# Gradients that should be 0 (of a key's bias in attention) are rounding alone.
_FLOOR = 0.01


_MOST_NOISE = 8  # times what other last bits change


@dataclass(frozen=True, slots=True)
class FewRows:
    """What is compared.

    Args:
        model: whose gradients.
        whole: some rows.
        parts: the same rows, cut.
        nudged: inside, some parameters are different in their last bits, which tells how large
            rounding is.
        forward: runs rows, and reads their loss.
        rewind: makes buffers and generators what they were at first.
        passes: what both passes of these rows run in.
        quiet: what a backward runs in; a checkpoint of torch's runs its forward again there, which
            must be the one that it was.
        begins_anew: the whole's passes begin without gradients, as a step does, with the sum of the
            parts' set aside.
    """

    model: nn.Module
    whole: Any
    parts: Sequence[Any]
    nudged: Callable[[], contextlib.AbstractContextManager[object]]
    forward: Callable[[Any], PartLoss]
    rewind: Callable[[], None]
    passes: Callable[[Any], contextlib.AbstractContextManager[BetweenPasses]]
    quiet: Callable[[], contextlib.AbstractContextManager[object]]
    begins_anew: bool = False


class GradientError(NamedTuple):
    """How far the parts' gradients are from the whole's, where they are furthest."""

    error: float
    """Relative; NaN where it cannot be told."""
    parameter: str
    reason: str = ""


def gradient_error(
    rows: FewRows, weights: Callable[[], BatchWeights], tolerance: float, *, narrow: bool
) -> GradientError:
    """Compare, and find out why if the error is above the tolerance; gradients come back as they
    were.

    Args:
        rows: what to run.
        weights: for each run of the parts, what weighs them.
        tolerance: relative errors below it are rounding.
        narrow: gradients have few exponents, and are not made larger.
    """
    large = 1.0 if narrow else _LARGE
    with _own_gradients(rows.model):
        worst = _compare(rows, weights(), large)
        if math.isnan(worst.error) and large > 1:
            worst = _compare(rows, weights(), 1.0)
        if not worst.error > tolerance or worst.error <= _MOST_NOISE * _rounding_error(rows):
            return worst
        as_they_are = worst if large == 1 else _compare(rows, weights(), 1.0)
        return _explain(worst, as_they_are, tolerance)


def _explain(worst: GradientError, as_they_are: GradientError, tolerance: float) -> GradientError:
    """Why the gradients of parts that were made larger do not make the whole's: those of parts as
    they are do not either, or only these do.
    """
    if as_they_are.error > tolerance:
        return as_they_are._replace(reason=_joined(as_they_are.parameter))
    return worst._replace(reason=_not_linear(worst.parameter))


def _rounding_error(rows: FewRows) -> float:
    """What the last bits of some parameters change: where gradients are next to nothing beside the
    numbers that they are made of, rounding is all of them.
    """
    gradients = _Gradients(rows.model)
    gradients.drop()
    with rows.nudged():
        _add_whole(rows)
    gradients.note_size()
    return _compare_with_whole(rows, gradients, 1.0).error


def _not_linear(parameter: str) -> str:
    return (
        f"the losses of parts make that of the whole, but the gradient of {parameter!r} is not"
        " linear in them: a hook or an autograd Function clamps or normalises it, which would be"
        " done in each micro-batch. Remove it, and pass clip= for the whole gradient"
    )


def _joined(parameter: str) -> str:
    return (
        "the losses of parts make that of the whole, but their gradients do not (most of all"
        f" that of {parameter!r}): a hook, an autograd Function, an option as"
        " Embedding(scale_grad_by_freq=True) or a small term of the loss (a balance of experts)"
        " joins rows. Remove it, and pass clip= to clip the whole gradient"
    )


def _compare(rows: FewRows, weights: BatchWeights, large: float) -> GradientError:
    """The parts' gradients minus the whole's."""
    gradients = _Gradients(rows.model)
    gradients.drop()
    total = 0.0
    for position, part in enumerate(rows.parts):
        rows.rewind()
        total += _add_part(rows, weights, part, position, large)
        gradients.note_size()
    return _compare_with_whole(rows, gradients, total * large)


def _compare_with_whole(rows: FewRows, gradients: _Gradients, divisor: float) -> GradientError:
    """What is left of the gradients there are, divided, beside the whole's."""
    gradients.divide(-divisor)
    with gradients.set_aside() if rows.begins_anew else contextlib.nullcontext():
        _add_whole(rows)
    worst = gradients.worst()
    gradients.drop()
    return worst


def _add_whole(rows: FewRows) -> None:
    rows.rewind()
    with rows.passes(rows.whole) as passes:
        whole = rows.forward(rows.whole)
        passes.end_forward()
        count = 1.0 if whole.count is None else float(whole.count)
        _backward(rows, passes, whole.loss, 1.0 / count)
        del whole


def _add_part(
    rows: FewRows, weights: BatchWeights, part: Any, position: int, large: float
) -> float:
    """Both passes of a part; gives what it weighs."""
    with rows.passes(part) as passes:
        loss = weights.shared(rows.forward(part), position)
        passes.end_forward()
        weight = weights.of(loss)
        number = float(weight.number)
        if number:  # a mean over no items is NaN, and contributes nothing
            factor = number if weight.reduction == "mean" else 1.0
            _backward(rows, passes, loss.loss, large * factor)
        del loss, weight  # its graph holds what the passes run in
    return number


def _backward(rows: FewRows, passes: BetweenPasses, loss: Tensor, factor: float) -> None:
    gradient = torch.full_like(loss, factor)
    passes.begin_backward(loss)
    # Not from the tensor: for a tensor torch hands the whole call to the function mode that is
    # entered here, and runs the pass outside of it (seen in 2.13).
    edge = torch.autograd.graph.get_gradient_edge(loss)
    with rows.quiet():
        torch.autograd.backward(edge, gradient)


class _Gradients:
    """The model's gradients, by parameter, and how large they were on the way."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sizes: dict[str, float] = {}

    def drop(self) -> None:
        drop_gradients(self._model)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside there are none; what comes in is added to them."""
        held = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        drop_gradients(self._model)
        yield
        for parameter, gradient in held:
            if gradient is not None:
                new = parameter.grad
                parameter.grad = gradient if new is None else gradient.add_(new)

    def note_size(self) -> None:
        """Remember the largest norm that each gradient has had."""
        for name, gradient in self._each():
            self._sizes[name] = _larger(_norm(gradient), self._sizes.get(name, 0.0))

    def divide(self, by: float) -> None:
        for _, gradient in self._each():
            gradient.mul_(1.0 / by)
        self._sizes = {name: size / abs(by) for name, size in self._sizes.items()}

    def worst(self) -> GradientError:
        """The largest of what is left, relative to what the gradients were."""
        floor = _FLOOR * math.hypot(*self._sizes.values())
        left = [
            GradientError(_ratio(_norm(gradient), self._sizes.get(name, 0.0) + floor), name)
            for name, gradient in self._each()
        ]
        unclear = [one for one in left if math.isnan(one.error)]
        return unclear[0] if unclear else max(left, default=GradientError(0.0, ""))

    def _each(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                yield name, local_part(parameter.grad)
        yield from _each_unreduced(self._model)


def _each_unreduced(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradients that FSDP2 has not reduced."""
    for number, unit in enumerate(units_of(model)):
        for place, kept in enumerate(unit.fsdp_params):
            gradient = unsharded_gradient(kept)
            if gradient is not None:
                yield f"unit {number}, parameter {place}", gradient


def _larger(one: float, other: float) -> float:
    return one if math.isnan(one) or one > other else other


def _ratio(left: float, size: float) -> float:
    if not math.isfinite(left) or not math.isfinite(size):
        return math.nan
    if not size:
        return math.inf if left else 0.0
    return left / size


def _norm(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = torch.promote_types(values.dtype, torch.float32)
    return float(torch.linalg.vector_norm(values.detach(), dtype=wide))


@contextlib.contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, the gradients that were there are out of the way."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    unreduced = unreduced_gradients(model)
    try:
        yield
    finally:
        drop_gradients(model)
        for parameter, gradient in held:
            parameter.grad = gradient
        for kept, gradient in unreduced:
            set_unsharded_gradient(kept, gradient)
