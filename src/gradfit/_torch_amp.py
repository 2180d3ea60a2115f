"""What torch's `GradScaler` holds on its device, for whoever reads it together with other numbers.

`get_scale()` and `step()` read one number each, for which the host waits. Their private parts are
used where the class's own methods are at work; seen in 2.10 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

_READING = ("get_scale", "unscale_", "_unscale_grads_", "step", "_maybe_opt_step", "update")
_FOUND = "found_inf_per_device"


def is_torchs_own(scaler: Any) -> bool:
    """Whether an enabled scaler does what torch's does, and not what a subclass (FSDP's, XLA's) or
    somebody's replacement of a method does.
    """
    if not isinstance(scaler, GradScaler) or not scaler.is_enabled():
        return False
    kind, replaced = type(scaler), vars(scaler).keys() - {"unscale_"}  # which gradfit counts
    own = all(getattr(kind, name) is getattr(GradScaler, name) for name in _READING)
    return own and replaced.isdisjoint(_READING)


def scale_of_torchs(scaler: Any) -> Tensor | None:
    """The scale itself, where it is; None before the first loss was scaled."""
    scale: Tensor | None = scaler._scale
    return scale


def found_by_torchs(scaler: Any, optimizer: Any) -> list[Tensor]:
    """What unscaling an optimizer's gradients has found, one number for each device: above 0 if one
    of them is not finite.
    """
    return [*scaler._per_optimizer_states[id(optimizer)][_FOUND].values()]


@contextlib.contextmanager
def nothing_was_found(scaler: Any, optimizer: Any) -> Iterator[None]:
    """Inside, `scaler.step(optimizer)` does not read what its unscaling has found: all was finite.
    `scaler.update()` comes after it, and looks at the device's own number.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        yield  # the update's own kernels look at the device's number
        return
    state = scaler._per_optimizer_states[id(optimizer)]
    on_device = state[_FOUND]
    state[_FOUND] = dict.fromkeys(on_device, torch.zeros((), device="cpu"))
    try:
        yield
    finally:
        state[_FOUND] = on_device


def are_others_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether gradients of another optimizer than this were unscaled, and it has not stepped."""
    states = scaler._per_optimizer_states.items()
    return any(one["stage"].name == "UNSCALED" for key, one in states if key != id(optimizer))


def unscales_in_step(optimizer: Any) -> bool:
    """Whether a scaler has just handed its scale to a fused optimizer, whose kernels unscale."""
    return getattr(optimizer, "grad_scale", None) is not None


def forget_unscaled(scaler: Any, optimizer: Any) -> None:
    """Let an optimizer's gradients be unscaled again: those that were are gone."""
    scaler._per_optimizer_states.pop(id(optimizer), None)
