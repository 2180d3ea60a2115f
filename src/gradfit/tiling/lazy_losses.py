"""torch's losses on lazy logits: of each row, tile by tile, then added up as `reduction` says."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit.tiling.expression import Rows
from gradfit.tiling.label_probability import LabelLogProbability, may_use_up
from gradfit.tiling.lazy import LazyLogits, handlers
from gradfit.tiling.lazy_handlers import handles, has_refused, operand

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NLL_LOSS = inspect.signature(F.nll_loss)
_LABEL_TYPES = (torch.int64, torch.uint8)  # others torch refuses


@handles("cross_entropy")
def _cross_entropy(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    given = _arguments(_CROSS_ENTROPY, args, kwargs)
    extra = {"ignore_index": given["ignore_index"], "label_smoothing": given["label_smoothing"]}
    return _class_loss(lazy, F.cross_entropy, given, extra)


@handles("nll_loss")
def _nll_loss(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    given = _arguments(_NLL_LOSS, args, kwargs)
    return _class_loss(lazy, F.nll_loss, given, {"ignore_index": given["ignore_index"]})


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


def _is_deprecated(given: dict[str, Any]) -> bool:
    """Whether a loss is called as before torch 0.4.1, which had these in the place of
    `reduction`.
    """
    return given.get("size_average") is not None or given.get("reduce") is not None


def _class_loss(
    lazy: LazyLogits, function: Any, given: dict[str, Any], extra: dict[str, Any]
) -> Any:
    """A loss of each row by its label, or by its probabilities, added up as `reduction` says."""
    if given["input"] is not lazy or _is_deprecated(given) or not _is_target(given["target"], lazy):
        return NotImplemented
    reduction = given["reduction"]
    if reduction not in ("mean", "sum", "none"):
        return NotImplemented  # torch says what is wrong
    flat = _flat_target(given["target"], lazy)
    losses = _losses_of_rows(lazy, function, given, extra, flat)
    if reduction == "none":
        return losses.reshape(lazy.lead)
    if reduction == "sum":
        return _added_up(losses)
    return _added_up(losses, _divisor(flat, given["weight"], given["ignore_index"]))


def _losses_of_rows(
    lazy: LazyLogits, function: Any, given: dict[str, Any], extra: dict[str, Any], flat: Tensor
) -> Tensor:
    is_labels = flat.dim() == 1
    if is_labels and _is_plain_cross_entropy(function, given) and may_use_up(lazy.expression):
        return _label_losses(lazy, flat, given["weight"], given["ignore_index"])
    extra = {**extra, "weight": given["weight"], "reduction": "none"}
    return lazy.reduce(function, (lazy.expression, Rows(flat)), extra)[0]


def _class_dim_of_loss(lazy: LazyLogits) -> int:
    """Where torch's losses expect the words."""
    return 0 if lazy.dim() == 1 else 1


def _is_target(target: Any, lazy: LazyLogits) -> bool:
    """Whether these are labels or probabilities of the logits' rows, and the words where a loss
    expects them; if not, torch says what is wrong.
    """
    if isinstance(target, LazyLogits) or lazy.class_dim != _class_dim_of_loss(lazy):
        return False
    if tuple(target.shape) == lazy.lead:
        return target.dtype in _LABEL_TYPES
    return tuple(target.shape) == tuple(lazy.shape)


def _flat_target(target: Tensor, lazy: LazyLogits) -> Tensor:
    """Labels, or probabilities with the words last, of the flat rows."""
    if tuple(target.shape) == lazy.lead:
        return target.reshape(-1)
    return target.movedim(_class_dim_of_loss(lazy), -1).reshape(-1, lazy.shape[lazy.class_dim])


def _is_plain_cross_entropy(function: Any, given: dict[str, Any]) -> bool:
    return function is F.cross_entropy and not given["label_smoothing"]


def _added_up(losses: Tensor, divisor: Tensor | int | None = None) -> Tensor:
    """In the width of the sum, as torch's own kernels add, and rounded once."""
    wide = losses.float() if losses.dtype in (torch.float16, torch.bfloat16) else losses
    total = wide.sum() if divisor is None else wide.sum() / divisor
    return total.to(losses.dtype)


def _label_losses(
    lazy: LazyLogits, flat: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """Minus the logarithm of each label's probability, which is what a cross-entropy of labels adds
    up.
    """
    ignored = flat == ignore_index
    # An ignored label need not be a word (-100 by default): any word will do for it.
    label = torch.where(ignored, 0, flat).long().unsqueeze(-1)
    losses = -lazy.reduce(LabelLogProbability(), (lazy.expression, Rows(label)), {})[0].squeeze(-1)
    if weight is not None:
        losses = losses * weight.detach()[label.squeeze(-1)]
    return losses.masked_fill(ignored, 0)


def _divisor(flat: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | int:
    """What torch divides a mean by: the rows that count, or the weights of their classes."""
    if flat.dim() > 1:  # probabilities, of which every row counts
        return flat.shape[0]
    counts = flat != ignore_index
    if weight is None:
        return counts.sum()
    return weight.detach()[torch.where(counts, flat, 0).long()].mul(counts).sum()


def _loss_of_single_numbers(
    function: Any, signature: inspect.Signature, lazy: LazyLogits, args: Any, kwargs: Any
) -> Any:
    """A loss that compares number with number, and adds up as `reduction` says."""
    given = _arguments(signature, args, kwargs)
    reduction = given.pop("reduction")
    operands = {name: operand(lazy, item) for name, item in given.items()}
    if _is_deprecated(given) or not _are_alike(given) or has_refused(((), operands)):
        return NotImplemented
    if reduction == "none":
        origin = (function, (), {**given, "reduction": "none"})
        return lazy.apply(function, (), {**operands, "reduction": "none"}, origin)
    divisors = {"mean": lazy.numel(), "batchmean": lazy.shape[0], "sum": None}
    if reduction not in divisors or (reduction == "batchmean" and function is not F.kl_div):
        return NotImplemented  # torch says what is wrong
    extra = {**operands, "function": function}
    return _added_up(lazy.reduce(_sum_of_row, (), extra)[0], divisors[reduction])


def _are_alike(given: dict[str, Any]) -> bool:
    """Whether numbers are compared one with one: torch warns of a target of another shape."""
    return bool(given["input"].shape == given["target"].shape)


def _sum_of_row(*, function: Any, **given: Any) -> Tensor:
    loss: Tensor = function(**given, reduction="none")
    return loss.sum(-1)


for _loss in (
    F.kl_div,
    F.binary_cross_entropy_with_logits,
    F.binary_cross_entropy,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
):
    handlers[_loss] = functools.partial(_loss_of_single_numbers, _loss, inspect.signature(_loss))
