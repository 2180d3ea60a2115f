"""The losses and logs of a batch's parts, left on their device and read together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from gradfit.batches.device_numbers import DeviceNumbers
from gradfit.batches.loss import PartLoss
from gradfit.batches.weights import Weight


class LossTotals:
    """Adds up parts; `read` gives the numbers.

    Args:
        loss: the sum so far.
        items: so far.
        logs: their sums so far.
        summed: names of logs that are counts, and no means over items.

    >>> import torch
    >>> totals = LossTotals()
    >>> loss = torch.tensor(2.0, requires_grad=True)
    >>> totals.add(PartLoss(loss, None, 3, {"accuracy": 0.5}), Weight(3, "mean"))
    >>> totals.read()
    {'loss': 6.0, 'items': 3.0, 'log accuracy': 1.5}
    """

    def __init__(
        self,
        loss: float = 0.0,
        items: float = 0.0,
        logs: Mapping[str, float] | None = None,
        summed: Collection[str] = (),
    ) -> None:
        self._summed = summed
        self._numbers = {
            "loss": loss,
            "items": items,
            **{_LOG + name: value for name, value in (logs or {}).items()},
        }
        # name, value, weight, whether it is a mean; numbers as `DeviceNumbers.add` gives them
        self._waiting: list[tuple[str, Any, Any, bool]] = []
        self._on_device = DeviceNumbers()

    def add(self, part: PartLoss, weight: Weight) -> None:
        """Take in one part; nothing is read from a device."""
        add = self._on_device.add
        number = add(weight.number)
        self._waiting.append(("items", number, number, False))
        self._waiting.append(("loss", add(part.loss), number, weight.reduction == "mean"))
        logged = number if weight.of_logs is None else add(weight.of_logs)
        for name, value in part.logs.items():
            self._add_log(name, add(value), logged)

    def _add_log(self, name: str, value: Any, weight: Any) -> None:
        is_mean = name not in self._summed
        self._waiting.append((_LOG + name, value, weight if is_mean else 1, is_mean))

    def read(self) -> dict[str, float]:
        """The sums: "loss", "items", and each log's as "log …", by one copy from each device. A
        part of weight 0 adds nothing, NaN or not.
        """
        self._on_device.read()
        read = self._on_device.of
        for name, value, weight, is_mean in self._waiting:
            number = read(weight)
            added = read(value) * (number if is_mean else 1.0) if number else 0.0
            self._numbers[name] = self._numbers.get(name, 0.0) + added
        self._waiting.clear()
        self._on_device = DeviceNumbers()
        return dict(self._numbers)


_LOG = "log "


def means_of(
    sums: Mapping[str, float], summed: Collection[str] = ()
) -> tuple[float, dict[str, float]]:
    """The mean loss and the mean of each log, from sums over all processes; of logs that are
    `summed`, the sum.
    """
    items = sums["items"]
    logs = {
        name: value if name in summed else _mean(value, items, math.nan)
        for name, value in logs_of(sums).items()
    }
    return _mean(sums["loss"], items, 0.0), logs


def _mean(total: float, items: float, of_none: float) -> float:
    return total / items if items else of_none


def logs_of(sums: Mapping[str, float]) -> dict[str, float]:
    """The logs' sums by the names they were returned under."""
    return {name.removeprefix(_LOG): value for name, value in sums.items() if name.startswith(_LOG)}
