"""How long an operation would take on a machine that is not here: the roofline model.

An operation takes as long as its arithmetic at the machine's peak or its traffic at the memory's
bandwidth, whichever is longer, and a launch. That leaves out what real kernels lose (a matrix
product reaches some 60 to 80 % of the peak), caches, and overlap. A planner compares operations
with each other, which this says better than how long they all take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from gradfit._torch import overloads_of
from gradfit._torch_listen import DispatchMode
from gradfit.profiling.profile import Hardware
from gradfit.tape.operators import info_of
from gradfit.tape.storage import flatten

LAUNCH_SECONDS = 5e-6  # between one operation and the next, when nothing else takes longer


class Roofline:
    """Seconds of an operation on `hardware`.

    >>> machine = Roofline(Hardware(memory="1 GiB", flops=1e9, bandwidth=1e9))
    >>> a = torch.empty(100, 100)
    >>> round(machine.seconds(torch.ops.aten.mm.default, (a, a), {}, a), 6)  # 2 · 100³ flop
    0.002005
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        operator = overloads_of(func)
        if operator in _ALLOCATIONS or info_of(func).view:
            return 0.0
        formula = _FLOPS.get(operator) or flop_registry.get(operator)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
        nests = [out, out] if operator in _LOOKUPS else [args, list(kwargs.values()), out]
        nbytes = _bytes_of_traffic(nests)
        return max(flops / self._hardware.flops, nbytes / self._hardware.bandwidth) + LAUNCH_SECONDS


class Stopwatch(DispatchMode):
    """Adds up the roofline's seconds of what runs inside. Asked for what is in a fake number, it
    says one half.

    An optimizer asks that of the step it is at, or of a product of momenta, which changes factors
    and not its memory; 0 and 1 are what it could not divide by.
    """

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self.seconds = 0.0
        self._roofline = roofline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _some_number(args[0].dtype)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.seconds += self._roofline.seconds(func, args, kwargs, out)
        return out


def _some_number(dtype: torch.dtype) -> float | bool:
    return 0.5 if dtype.is_floating_point else dtype is torch.bool or 1


def this_machine(device: torch.device, dtype: torch.dtype) -> Hardware:
    """The machine that is here, measured in a moment: one matrix product and one copy."""
    factor = torch.ones(768, 768, device=device, dtype=dtype)
    source = torch.ones(1 << 22, device=device)
    target = torch.empty_like(source)
    return Hardware(
        memory=_memory_bytes(device),
        flops=2 * 768**3 / _least_seconds(lambda: factor @ factor, device),
        bandwidth=2 * source.nbytes / _least_seconds(lambda: target.copy_(source), device),
        name=f"this machine ({device.type})",
    )


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.accelerator.get_memory_info(device)[1])


def _bytes_of_traffic(nests: Any) -> int:
    return sum(_touched_bytes(item) for item in flatten(nests) if isinstance(item, torch.Tensor))


def _touched_bytes(tensor: torch.Tensor) -> int:
    """What is read or written of a tensor; an expanded one is smaller than it looks."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query.shape
    return int(2 * batch * heads * rows * key.shape[2] * (width + value.shape[3]))


def _attention_backward_flops(
    _: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any
) -> int:
    """Five matrix products where the forward has two."""
    return _attention_flops(query, key, value) * 5 // 2


def _grouped_product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left.numel() * right.shape[-1])


# Not in torch's registry.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten._grouped_mm: _grouped_product_flops,
}
_ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
}
# These read only as much of their first argument as they return.
_LOOKUPS = {
    torch.ops.aten.embedding,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
    torch.ops.aten.gather,
}
