"""A budget as it is asked for: bytes, a part of what the machine has, what is free, or none."""

from __future__ import annotations

import re
from typing import Any

import torch

from gradfit.devices import counted_device
from gradfit.errors import MisuseError
from gradfit.machine import available_bytes, total_bytes
from gradfit.profiling.meter import meter
from gradfit.units import NO_BUDGET, parse_bytes

_AUTO = 0.9


def read_budget(memory: Any, model: torch.nn.Module, optimizer: Any) -> int:
    """The budget in bytes.

    Args:
        memory: a number of bytes or text of it; "80%" of the device's memory, or of what the
            process may have; "auto", nine tenths of what is free, beside what model and optimizer
            hold by now; None for no budget.
        model: on the device whose memory it is.
        optimizer: with the state it has by now.
    """
    if memory is None:
        return NO_BUDGET
    device = next(model.parameters()).device
    if memory == "auto":
        free = _required(available_bytes(device), device)
        return (
            int(_AUTO * free) + meter(model, optimizer, device=counted_device(model)).current_bytes
        )
    percent = _read_percent(memory)
    if percent is None:
        return parse_bytes(memory)
    return int(percent / 100 * _required(total_bytes(device), device))


def _read_percent(memory: Any) -> float | None:
    """None if it is none."""
    pattern = r"\s*([0-9]*\.?[0-9]+)\s*%\s*"
    matched = re.fullmatch(pattern, memory) if isinstance(memory, str) else None
    if matched is None:
        return None
    percent = float(matched.group(1))
    if not 0 < percent <= 100:
        raise MisuseError(
            f"memory={memory!r} is not a part of what there is. Pass more than '0%', at most"
            " '100%'."
        )
    return percent


def _required(count: int | None, device: torch.device) -> int:
    if count is None:
        raise MisuseError(
            f"How much memory {device} has is not known here. Pass memory= a number of bytes."
        )
    return count
