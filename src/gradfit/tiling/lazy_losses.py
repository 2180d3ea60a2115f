"""torch's losses on lazy logits: of each row, tile by tile, then added up as `reduction` says."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit.tiling.expression import Rows
from gradfit.tiling.label_probability import LabelLoss, may_use_up
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
    loss = _loss_of_rows(lazy, function, given, extra, flat)
    if reduction == "none":
        return lazy.reduce(*loss)[0].reshape(lazy.lead)
    if reduction == "sum":
        return _added_up(lazy, loss)
    return _added_up(lazy, loss, *_divisor(flat, given["weight"], given["ignore_index"]))


def _loss_of_rows(
    lazy: LazyLogits, function: Any, given: dict[str, Any], extra: dict[str, Any], flat: Tensor
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function that makes one number of each row, with its arguments."""
    is_labels = flat.dim() == 1
    if is_labels and _is_plain_cross_entropy(function, given) and may_use_up(lazy.expression):
        return LabelLoss(), _labels(lazy, flat, given["weight"], given["ignore_index"]), {}
    extra = {**extra, "weight": given["weight"], "reduction": "none"}
    return function, (lazy.expression, Rows(flat)), extra


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


def _added_up(
    lazy: LazyLogits,
    loss: Any,
    divisor: Tensor | int | None = None,
    is_empty: Tensor | bool | None = None,
) -> Tensor:
    """The sum of what a function makes of each row, divided, in the width of the sum, and rounded
    once. A mean over nothing is NaN, and has no gradient.
    """
    total, dtype = lazy.add_up(*loss)
    if divisor is None:
        return total.to(dtype)
    if total.requires_grad:
        nothing = divisor == 0 if is_empty is None else is_empty
        total.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: torch.where(torch.as_tensor(nothing), 0, gradient)
        )
        total.grad_fn.item_count = divisor  # type: ignore[union-attr]  # for `item_counts`
    return (total / divisor).to(dtype)


def _labels(
    lazy: LazyLogits, flat: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Any, ...]:
    """What a `LabelLoss` is of."""
    ignored = flat == ignore_index
    # An ignored label need not be a word (-100 by default): any word will do for it.
    label = torch.where(ignored, 0, flat).long()
    rows = [label.unsqueeze(-1), ignored, *([] if weight is None else [weight.detach()[label]])]
    return (lazy.expression, *map(Rows, rows))


def _divisor(
    flat: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[Tensor | int, Tensor | bool]:
    """What torch divides a mean by: the rows that count, or the weights of their classes; and
    whether no row counts.
    """
    if flat.dim() > 1:  # probabilities, of which every row counts
        return flat.shape[0], not flat.shape[0]
    counts = flat != ignore_index
    count = counts.sum()
    if weight is None:
        return count, count == 0
    return weight.detach()[torch.where(counts, flat, 0).long()].mul(counts).sum(), count == 0


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
    return _added_up(lazy, (_sum_of_row, (), extra), divisors[reduction])


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
