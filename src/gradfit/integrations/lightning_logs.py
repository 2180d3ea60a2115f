"""What a `training_step` logs for the parts of a batch, logged once for the batch: with the mean
over its items.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradfit._torch_listen import unseen
from gradfit.batches.denominator import Denominator, Number, read_denominator

_PICKED: dict[Any, Callable[[Any, Any], Any]] = {
    "max": max, torch.max: max, "min": min, torch.min: min,
}  # fmt: skip
_ADDED = ("sum", torch.sum)


@dataclass
class _Logged:
    """One call of `log`, in one part."""

    name: str
    value: Any
    options: dict[str, Any]
    weight: Number | None
    """Of how many items it is the mean, if that can be told; None: of as many as the loss."""
    adds: bool
    """Whether it is a sum, so that parts' values add up."""
    source: torch.Tensor | None = None
    """A loss, or made of one: with its graph, which is read once the part's forward is over."""


@dataclass
class _Total:
    """One name, over the parts so far."""

    options: dict[str, Any]
    value: Any
    weight: float | None  # None where values are not averaged
    rows: int = 0


class BatchLogs:
    """Collects what is logged part by part.

    Args:
        log: The module's own `log`.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self._log, self._signature = log, inspect.signature(log)
        self._part: list[_Logged] = []
        self._totals: dict[str, _Total] = {}

    def take(self, *args: Any, **kwargs: Any) -> None:
        """In the place of `log(name, value, …)`."""
        bound = self._signature.bind(*args, **kwargs)
        name, value = bound.arguments.pop("name"), bound.arguments.pop("value")
        options = dict(bound.arguments)
        source = value if isinstance(value, torch.Tensor) and value.requires_grad else None
        if isinstance(value, torch.Tensor):
            with unseen():  # it is no operation of the plan's
                value = value.detach().clone()
        adds = options.get("reduce_fx") in _ADDED
        self._part.append(_Logged(name, value, options, options.get("batch_size"), adds, source))

    def end_part(self, weight: float, *, adds: bool = False) -> None:
        """The part is over; its loss was of so many items, or `adds` up with those of the
        others.
        """
        for one in self._part:
            _read_source(one, adds)
            items = float(weight if one.weight is None else one.weight)
            rows = int(one.options.get("batch_size") or 0)
            total = self._totals.get(one.name)
            if total is None:
                weighs = items if _is_averaged(one) else None
                self._totals[one.name] = _Total(one.options, one.value, weighs, rows)
            else:
                self._totals[one.name] = _joined(total, one, items, rows)
        self._part = []

    def drop_part(self) -> None:
        """The part is run again."""
        self._part = []

    def drop_all(self) -> None:
        """The batch is run again."""
        self._part, self._totals = [], {}

    def log_all(self) -> None:
        """Log each name once."""
        totals, self._totals = self._totals, {}
        for name, total in totals.items():
            options = dict(total.options)
            if options.get("batch_size") is not None:
                options["batch_size"] = total.rows
            self._log(name, total.value, **options)


def _read_source(one: _Logged, adds: bool) -> None:
    """What a logged loss was divided by; `adds`: losses of this module are added up as they are."""
    source, one.source = one.source, None
    if source is None:
        return
    read = read_denominator(source)
    if read is not None and not read.unknown:
        _take_weight(one, read)
    one.adds = one.adds or adds


def _take_weight(one: _Logged, read: Denominator) -> None:
    """Weigh a mean by the one number that it was divided by; a sum is added up."""
    if read.is_sum:
        one.adds = True
        return
    counts = {float(term.divisor) for term in read.terms}
    if one.weight is None and len(counts) == 1:
        one.weight = counts.pop()


def _is_averaged(one: _Logged) -> bool:
    is_picked = one.options.get("reduce_fx") in _PICKED
    return _is_number(one.value) and not one.adds and not is_picked


def _joined(total: _Total, one: _Logged, items: float, rows: int) -> _Total:
    value, weight = one.value, total.weight
    if not _is_number(value):  # a metric, which has seen all parts itself
        return _Total(one.options, value, None, total.rows + rows)
    if weight is not None:
        value = _mean_of_two(total.value, weight, value, items)
        weight += items
    elif one.adds:
        value = total.value + value
    else:
        value = _PICKED[one.options["reduce_fx"]](total.value, value)
    return _Total(one.options, value, weight, total.rows + rows)


def _mean_of_two(first: Any, weight: float, second: Any, items: float) -> Any:
    """A mean over nothing, which may be NaN, does not count."""
    if not items:
        return first
    return (first * weight + second * items) / (weight + items) if weight else second


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor)
