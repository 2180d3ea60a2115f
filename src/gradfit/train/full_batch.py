"""How far the gradients of a batch's parts, added up, are from those of the whole batch: measured, not assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch import is_out_of_memory
from gradfit.batches.snapshot import Generators, untouched
from gradfit.profiling.measure import LossFunction, run_loss
from gradfit.train.same_draws import CannotShare, WholeDraws

Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class FullBatchError:
    """The gradient of the parts beside that of the whole batch, in the same state and with the same random numbers."""

    error: float | None
    """The norm of the difference over the norm of the whole batch's gradient; None where it could not be measured."""
    tolerance: float
    """What the rounding of a float sum may amount to: the root of the gradients' machine epsilon."""
    weighted_by: str
    """What the parts' mean losses were weighted by: "rows", or "items" where a count was returned or could be read."""
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
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, parts: Sequence[Any], rows: Sequence[int]
) -> FullBatchError:
    """Run the batch in one piece and in parts, plainly, and compare the gradients; leaves no trace.

    Args:
        model: The model, in the mode it is trained in.
        loss_fn: `(model, batch) -> loss`, as for `fit`.
        batch: The whole batch.
        parts: The same batch, cut.
        rows: How many rows each part has.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    tolerance = max((math.sqrt(torch.finfo(p.dtype).eps) for p in parameters), default=0.0)
    weighted_by = "rows"
    try:
        whole, draws = _whole_gradients(model, parameters, loss_fn, batch)
        added, weighted_by = _added_gradients(model, parameters, loss_fn, parts, rows, draws)
        error = _relative_error(added, whole)
    except CannotShare as problem:
        return FullBatchError(None, tolerance, weighted_by, f"{problem}, so the parts cannot draw the same numbers")
    except Exception as problem:  # the user's code on a whole batch, which may be more than it was written for
        said = "runs out of memory" if is_out_of_memory(problem) else f"raised {type(problem).__name__}: {problem}"
        return FullBatchError(None, tolerance, weighted_by, f"the batch in one piece {said}")
    if not math.isfinite(error):
        return FullBatchError(None, tolerance, weighted_by, "the gradients are not finite")
    return FullBatchError(error, tolerance, weighted_by)


def _whole_gradients(
    model: torch.nn.Module, parameters: list[torch.nn.Parameter], loss_fn: LossFunction, batch: Any
) -> tuple[Gradients, WholeDraws]:
    draws = WholeDraws()
    with untouched(model):
        with draws:
            loss, count = run_loss(loss_fn, model, batch)
        torch.autograd.backward(loss)
        total = 1.0 if count is None else float(count)
        return _scaled(parameters, total), draws


def _added_gradients(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    loss_fn: LossFunction,
    parts: Sequence[Any],
    rows: Sequence[int],
    draws: WholeDraws,
) -> tuple[Gradients, str]:
    total, weighted_by = 0.0, "rows"
    generators = Generators()  # Python's and NumPy's draws are for the batch: each part gets the same
    with untouched(model):
        for part, size in zip(parts, rows, strict=True):
            generators.restore()
            with draws.for_part():
                loss, count = run_loss(loss_fn, model, part)
            weight = float(size) if count is None else float(count)
            weighted_by = "rows" if count is None else "items"
            torch.autograd.backward(loss * weight if count is None else loss)
            total += weight
            del loss
        return _scaled(parameters, total), weighted_by


def _scaled(parameters: list[torch.nn.Parameter], total: float) -> Gradients:
    return [None if p.grad is None else p.grad.detach() / total for p in parameters]


def _relative_error(added: Gradients, whole: Gradients) -> float:
    difference, norm = 0.0, 0.0
    for a, b in zip(added, whole, strict=True):
        if a is None and b is None:
            continue
        one = torch.zeros(()) if a is None else a.to_dense() if a.layout is not torch.strided else a
        other = torch.zeros(()) if b is None else b.to_dense() if b.layout is not torch.strided else b
        difference += float((one.double() - other.double()).square().sum())
        norm += float(other.double().square().sum())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return math.sqrt(difference / norm)
