"""What a `loss_fn` may return, and the one reader of it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfit.arguments import invalid, read_count, read_flag, read_tensor
from gradfit.batches.denominator import Denominator, read_denominator
from gradfit.errors import MisuseError

_FORMS = (
    "Return a mean loss, (loss_sum, count), (loss, {name: value}) or gf.Loss(sum=…, count=…,"
    " logs={…})."
)


@dataclass(frozen=True)
class Loss:
    """A loss as a sum over items, with the number of items and anything to log.

    Args:
        sum: the loss added up over the items; one number with a graph.
        count: how many items there are: an int, or an integer tensor on any device. 0 contributes
            nothing.
        logs: numbers by name, each the mean over the same items, or a count; the step's result has
            their mean over the batch, and the sum of counts.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> Loss(sum=weight.sum(), count=3, logs={"accuracy": 0.5}).count
    3
    """

    sum: Tensor
    count: int | Tensor
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartLoss:
    """The loss of one micro-batch, as it was returned."""

    loss: Tensor
    count: int | Tensor | None
    """Items of a sum; None for a mean."""
    rows: int
    logs: Mapping[str, Any]

    @property
    def denominator(self) -> Denominator | None:
        """What the loss was divided by, if that can be read."""
        return read_denominator(self.loss)


def read_loss(result: Any, rows: int) -> PartLoss:
    """Read what `loss_fn` returned for `rows` rows.

    Args:
        result: a mean loss, `(loss_sum, count)`, `(loss, logs)` or a `Loss`.
        rows: how many rows it is of.

    Raises:
        MisuseError: it is something else, has no graph, or its count is no whole number.
    """
    loss, count, logs = _read_form(result)
    return PartLoss(_check_scalar(loss), count, rows, _check_logs(logs))


def _read_form(result: Any) -> tuple[Any, int | Tensor | None, Any]:
    """The loss, its count and its logs, of which there may be none."""
    if isinstance(result, Loss):
        return result.sum, read_item_count(result.count), result.logs
    return _read_pair(result) if isinstance(result, tuple) else (result, None, {})


def _read_pair(result: tuple[Any, ...]) -> tuple[Any, int | Tensor | None, Any]:
    """From a loss with a count, or with logs."""
    if len(result) != 2:
        raise MisuseError(f"loss_fn returned a tuple of {len(result)}. {_FORMS}")
    loss, second = result
    if isinstance(second, Mapping):
        return loss, None, second
    return loss, read_item_count(second), {}


def read_item_count(count: Any) -> int | Tensor:
    """A number of items: an int, or an integer tensor of one element, which stays on its device."""
    if isinstance(count, Tensor):
        return _read_count_tensor(count)
    number = -1
    if not isinstance(count, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(count)
    if number >= 0:
        return number
    raise _no_count(repr(count) if isinstance(count, int | float) else f"a {type(count).__name__}")


def _read_count_tensor(count: Tensor) -> Tensor:
    if count.numel() != 1:
        raise MisuseError(
            f"The count has shape {tuple(count.shape)}, expected one number. Return mask.sum()."
        )
    if not _is_of_whole_numbers(count.dtype):
        raise _no_count(f"a {count.dtype} tensor")
    return count.detach()


def _is_of_whole_numbers(kind: torch.dtype) -> bool:
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _no_count(shown: str) -> MisuseError:
    return MisuseError(
        f"loss_fn returned (loss, {shown}). As (loss_sum, count) the second must be a whole number"
        " of items, an int or an integer tensor of 0 or more: return (loss_sum, mask.sum()). To"
        ' log a number beside a mean loss, return (loss, {"accuracy": value}).'
    )


def _check_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise _no_tensor(loss)
    if loss.numel() != 1:
        raise MisuseError(
            f"loss_fn must return one number; it returned a tensor of shape {tuple(loss.shape)}."
            f" Take .mean(), or .sum() and count. {_FORMS}"
        )
    if loss.is_complex():
        raise MisuseError(
            "loss_fn returned a complex number, which cannot be made small. Return its .real or"
            f" .abs(). {_FORMS}"
        )
    if not loss.requires_grad:
        raise MisuseError(
            "The loss has no graph: nothing that requires a gradient went into it. Do not"
            " detach() it, and call this outside of torch.no_grad() and torch.inference_mode()."
        )
    return loss


def _no_tensor(loss: Any) -> MisuseError:
    hint = " Return its .loss." if isinstance(getattr(loss, "loss", None), Tensor) else ""
    return MisuseError(f"loss_fn returned a {type(loss).__name__}.{hint} {_FORMS}")


def _check_logs(logs: Any) -> Mapping[str, Any]:
    if not isinstance(logs, Mapping):
        raise MisuseError(f"logs is a {type(logs).__name__}. Pass logs={{name: number}}.")
    for name, value in logs.items():
        if not isinstance(name, str) or not _is_loggable(value):
            raise MisuseError(
                f"logs[{name!r}] is a {type(value).__name__}. Log numbers by name, each the mean"
                " over the items."
            )
    return logs


def _is_loggable(value: Any) -> bool:
    """Whether it is one number: Python's, torch's or NumPy's."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) or _is_numpy_number(value)


def _is_numpy_number(value: Any) -> bool:
    return callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1


def count_tokens(labels: Tensor, ignore_index: int = -100, shift: bool = True) -> Tensor:
    """How many labels a loss over tokens averages over, as an integer tensor on the labels' device.

    Args:
        labels: token numbers, of any shape; the last dimension is the sequence.
        ignore_index: labels that do not count.
        shift: the model predicts the next token, so that the first label of each sequence has no
            prediction.

    >>> count_tokens(torch.tensor([[5, 6, -100], [7, 8, 9]]))
    tensor(3)
    """
    if not _is_of_whole_numbers(read_tensor(labels, "labels").dtype):
        raise invalid(
            "labels", labels, f"is {labels.dtype}, not token numbers", "labels of type torch.int64"
        )
    if read_flag(shift, "shift") and not labels.dim():
        raise invalid(
            "labels",
            labels,
            "has no dimension that is the sequence",
            "labels of shape (batch, length)",
        )
    ignored = read_count(ignore_index, "ignore_index", minimum=-(2**63))
    return ((labels[..., 1:] if shift else labels) != ignored).sum()
