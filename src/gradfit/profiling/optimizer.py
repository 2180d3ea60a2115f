"""What an optimizer will hold and how much it takes for a moment, found before it has taken its first step.

A copy of the optimizer steps one stand-in parameter at a time, so that no more than one parameter's state exists twice,
and neither the parameters nor the optimizer's state are touched.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradfit._torch import storage_key
from gradfit.errors import MisuseError
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import meter, tensors_in


class OptimizerCost(NamedTuple):
    state_bytes: int
    burst_bytes: int  # temporaries of one step()
    seconds: float


def optimizer_cost(
    optimizer: Any,
    *,
    stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
    clock: Callable[[], float] = seconds_now,
) -> OptimizerCost:
    """Bytes of the state after a step, bytes of a step's temporaries, and its seconds.

    `stand_in` makes the tensor that is stepped in a parameter's place, if that is not one like it: a shard, a fake one.
    The state that the optimizer has already is then not what is asked for.
    """
    make = stand_in or torch.zeros_like
    seen: dict[Any, OptimizerCost] = {}
    state = burst = 0
    seconds = 0.0
    for group in optimizer.param_groups:
        together = group.get("foreach") or group.get("fused")
        if together is None and any(p.device.type != "cpu" for p in group["params"]):
            together = True  # torch's default on accelerators
        largest = summed = 0
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            kind = (id(group), parameter.shape, parameter.dtype, parameter.device)
            if kind not in seen:
                seen[kind] = _step_alone(optimizer, group, make(parameter), clock, times=1 if together else 2)
            cost = seen[kind]
            existing = optimizer.state.get(parameter) if stand_in is None and hasattr(optimizer, "state") else None
            state += _bytes(existing) if existing else cost.state_bytes
            largest = max(largest, cost.burst_bytes)
            summed += cost.burst_bytes
            seconds += cost.seconds
        burst = max(burst, summed if together and not group.get("fused") else largest)
    return OptimizerCost(state, burst, seconds)


def _step_alone(
    optimizer: Any, group: dict[str, Any], content: torch.Tensor, clock: Callable[[], float], times: int
) -> OptimizerCost:
    """One after the other, a parameter's temporaries still have their names when the next one's are made.

    So the stand-in goes through that loop as its own successor, `times` times in a row.
    """
    stand_in = torch.nn.Parameter(content)
    stand_in.grad = torch.zeros_like(content)
    probe = copy.copy(optimizer)
    probe.param_groups = [{**group, "params": [stand_in] * times}]
    probe.state = collections.defaultdict(dict)
    try:
        with torch.no_grad(), meter() as live:
            probe.step()  # the first step makes the state …
            kept = live.current_bytes
            live.reset_peak()
            started = clock()
            probe.step()  # … and the second shows what a step takes beside it
            seconds = (clock() - started) / times
    except TypeError as error:
        raise MisuseError(
            f"{type(optimizer).__name__}.step() cannot be called without arguments ({error}); an optimizer that needs "
            "a closure evaluates the loss itself. Use one that steps on gradients, such as torch.optim.AdamW."
        ) from None
    return OptimizerCost(_bytes(probe.state.get(stand_in, {})), max(0, live.peak_bytes - kept), seconds)


def _bytes(state: Any) -> int:
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(state)}
    return sum(sizes.values())
