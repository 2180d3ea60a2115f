"""How far the gradients of a batch's parts, added up, are from those of the whole batch: measured,
not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch import is_out_of_memory
from gradfit._torch_listen import eager_functions
from gradfit.batches.additivity import measure_additivity
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, count_rows, run_part
from gradfit.batches.shares import PartCounter, PartShare
from gradfit.batches.snapshot import Generators, trials_end, untouched
from gradfit.batches.weights import BatchWeights, may_count
from gradfit.errors import MisuseError
from gradfit.fitting.same_draws import CannotShare, WholeDraws

_WEIGHTED_BY = {
    "rows": "rows",
    "items": "items",
    "divisor": "items",
    "terms": "items",
    "sum": "sum",
}
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class FullBatchError:
    """The gradient of the parts beside that of the whole batch, in the same state and with the same
    random numbers.
    """

    error: float | None
    """The norm of the difference over the norm of the whole batch's gradient; None where it could
    not be measured.
    """
    tolerance: float
    """What the rounding of a float sum may amount to: the root of the gradients' machine
    epsilon.
    """
    weighted_by: str
    """What the parts' losses were weighted by: "items" where a count was returned or could be read,
    "rows", or "sum" where they are simply added.
    """
    reason: str = ""
    """Why it could not be measured."""

    @property
    def exact(self) -> bool:
        """Whether the parts were measured to give the whole batch's gradient, up to rounding."""
        return self.error is not None and self.error <= self.tolerance

    def __str__(self) -> str:
        if self.error is None:
            return f"not measured: {self.reason}"
        return f"relative error {self.error:.2g} of the gradient (by {self.weighted_by})"


def compare_with_full_batch(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    parts: Sequence[Any],
    split: Callable[[Any, int], Iterable[Any]] | None = None,
    *,
    part_loss_fn: LossFunction | None = None,
) -> FullBatchError:
    """Run the batch in one piece and in parts, plainly, and compare the gradients; leaves no trace.

    Args:
        model: The model, in the mode it is trained in.
        loss_fn: `(model, batch) -> loss`, as for `fit`.
        batch: The whole batch.
        parts: The same batch, cut.
        split: How it was cut, if not along dim 0.
        part_loss_fn: The loss as it is computed for the parts, in tiles; None: as for the whole.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    tolerance = max((math.sqrt(torch.finfo(p.dtype).eps) for p in parameters), default=0.0)
    weighted_by = "rows"
    try:
        with trials_end(), untouched(model) as before:
            additivity = measure_additivity(
                model, loss_fn, batch, split=split, rewind=before.rewind, gradient_rows=0
            )
        weighted_by = _WEIGHTED_BY.get(additivity.over or "", "rows")
        whole, draws = _whole_gradients(model, parameters, loss_fn, batch, count_rows(batch, split))
        in_parts = part_loss_fn or loss_fn
        shares = _count_shares(model, in_parts, parts, split, additivity)
        weights = BatchWeights(additivity, count_rows(batch, split), exact=False, shares=shares)
        sized = [(part, count_rows(part, split)) for part in parts]
        added, by_rows = _added_gradients(model, parameters, in_parts, sized, weights, draws)
        weighted_by = "items" if weighted_by == "rows" and not by_rows else weighted_by
        error = _relative_error(added, whole)
    except Exception as problem:
        return FullBatchError(None, tolerance, weighted_by, _why_not_measured(problem))
    if not math.isfinite(error):
        return FullBatchError(None, tolerance, weighted_by, "the gradients are not finite")
    return FullBatchError(error, tolerance, weighted_by)


def _why_not_measured(problem: Exception) -> str:
    if isinstance(problem, MisuseError):
        return str(problem)
    if isinstance(problem, CannotShare):
        return f"{problem}, so the parts cannot draw the same numbers"
    # the user's code on a whole batch, which may be more than it was written for
    if is_out_of_memory(problem):
        return "the batch in one piece runs out of memory"
    return f"the batch in one piece raised {type(problem).__name__}: {problem}"


def _count_shares(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    parts: Sequence[Any],
    split: Callable[[Any, int], Iterable[Any]] | None,
    additivity: Additivity,
) -> list[PartShare] | None:
    """Each part's share in the batch, where one weight for a part may not be right."""
    if not may_count(additivity, len(parts)):
        return None
    with untouched(model):
        return PartCounter(model, loss_fn, split, additivity.roles).shares(parts)


def _whole_gradients(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    loss_fn: LossFunction,
    batch: Any,
    rows: int,
) -> tuple[Gradients, WholeDraws]:
    draws = WholeDraws()
    with trials_end(), untouched(model):
        with eager_functions(), draws:
            part_loss = run_part(loss_fn, model, batch, rows)
        torch.autograd.backward(part_loss.loss)
        items = 1.0 if part_loss.count is None else float(part_loss.count)
        return _scaled(parameters, items), draws


def _added_gradients(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    loss_fn: LossFunction,
    parts: Sequence[tuple[Any, int]],
    weights: BatchWeights,
    draws: WholeDraws,
) -> tuple[Gradients, bool]:
    total, by_rows = 0.0, True
    # Python's and NumPy's draws are for the batch: each part gets the same
    generators = Generators()
    with trials_end(), untouched(model):
        for position, (part, rows) in enumerate(parts):
            generators.restore()
            with eager_functions(), draws.for_part():
                part_loss = run_part(loss_fn, model, part, rows)
            part_loss = weights.shared(part_loss, position)
            weight = weights.of(part_loss)
            items = float(weight.number)
            if items:  # a mean over no items is NaN, and contributes nothing
                torch.autograd.backward(
                    part_loss.loss * items if weight.reduction == "mean" else part_loss.loss
                )
            total += items
            by_rows = by_rows and items == rows
            del part_loss
        return _scaled(parameters, total), by_rows


def _scaled(parameters: list[torch.nn.Parameter], total: float) -> Gradients:
    return [None if p.grad is None else p.grad.detach() / total for p in parameters]


def _relative_error(added: Gradients, whole: Gradients) -> float:
    difference, norm = 0.0, 0.0
    for a, b in zip(added, whole, strict=True):
        if a is not None or b is not None:
            one, other = _dense(a), _dense(b)
            difference += float((one.double() - other.double()).square().sum())
            norm += float(other.double().square().sum())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    """One that is not there is zero."""
    if gradient is None:
        return torch.zeros((), device="cpu")
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
