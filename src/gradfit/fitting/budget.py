"""A budget as it is asked for: bytes, a part of what the machine has, what is free, or none."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import torch

from gradfit._torch import FakeTensor
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
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    held = 0
    if memory == "auto":
        held = meter(model, optimizer, device=counted_device(model)).current_bytes
    return _read(memory, device) + held


def read_budget_of_all(
    memory: Any, model: torch.nn.Module | None = None
) -> tuple[int, torch.device | None]:
    """A budget for all tensors of the process, in bytes, and the kind of device whose memory it is;
    None for the CPU's.

    Args:
        memory: as for `read_budget`, but there must be one; "auto" is beside all that is there.
        model: on the device whose memory it is; None: the accelerator's, if there is one.
    """
    counted = None if model is None else counted_device(model)
    if model is None:
        counted = torch.accelerator.current_accelerator(check_available=True)
        counted = None if counted is None else torch.device(counted.type)
    held = 0
    if memory == "auto":
        held = meter(list(live_tensors()), device=counted).current_bytes
    return _read(memory, counted or torch.device("cpu")) + held, counted


def live_tensors() -> Iterator[torch.Tensor]:
    """All that Python knows of and that have memory, which fake ones say of themselves and have
    not; by their type, since some objects run code when they are asked for their class.
    """
    for one in gc.get_objects():
        kind = type(one)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, FakeTensor):
            continue
        if one.device.type != "meta":
            yield one


def _read(memory: Any, device: torch.device) -> int:
    if memory == "auto":
        return int(_AUTO * _required(available_bytes(device), device))
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
