"""What an optimizer will hold and how much it takes for a moment, found before it has taken its
first step.

A copy of the optimizer steps stand-ins for one or two parameters at a time, so that no more than
their state exists twice, and neither the parameters nor the optimizer's state are touched.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradfit._torch import storage_key
from gradfit.devices import devices_of, wait_for
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

    `stand_in` makes the tensor that is stepped in a parameter's place, if that is not one like it:
    a shard, a fake one. The state that the optimizer has already is then not what is asked for.
    """
    make = stand_in or torch.zeros_like
    state = burst = 0
    seconds = 0.0
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        seen: dict[Any, OptimizerCost] = {}
        costs = []
        for parameter in trained:
            kind = (parameter.shape, parameter.dtype, parameter.device)
            if kind not in seen:
                seen[kind] = _step_alone(optimizer, group, [make(parameter)], clock)
            costs.append(seen[kind])
            existing = (
                optimizer.state.get(parameter)
                if stand_in is None and hasattr(optimizer, "state")
                else None
            )
            state += _bytes(existing) if existing else seen[kind].state_bytes
        if not trained:
            continue
        bursts = [cost.burst_bytes for cost in costs]
        small = min(
            range(len(trained)), key=lambda at: (not bursts[at], bursts[at], trained[at].numel())
        )
        alike = [make(trained[small]) for _ in range(6)]
        few, many = (_step_alone(optimizer, group, some, clock) for some in (alike[::2], alike))
        # what a step takes that is not any parameter's
        call = max(0.0, 2 * few.seconds - many.seconds)
        seconds += call + sum(max(0.0, cost.seconds - call) for cost in costs)
        if not bursts[small]:
            continue
        if _is_together(group, few, many, elsewhere=trained[0].device.type != "cpu"):
            burst = max(burst, sum(bursts))
            continue
        for row in _worst_rows(trained, bursts):
            burst = max(
                burst, _step_alone(optimizer, group, [make(one) for one in row], clock).burst_bytes
            )
    return OptimizerCost(state, burst, seconds)


def _is_together(
    group: dict[str, Any], few: OptimizerCost, many: OptimizerCost, *, elsewhere: bool
) -> bool:
    """Whether it makes the temporaries of all parameters before it uses the first, as with
    `foreach`.
    """
    if group.get("foreach") is None and not group.get("fused") and elsewhere:
        return True  # torch's default on accelerators, which need not be here
    return many.burst_bytes > 1.5 * few.burst_bytes


def _worst_rows(parameters: list[torch.Tensor], bursts: list[int]) -> list[list[torch.Tensor]]:
    """What to step one after the other to see the most that such a loop takes.

    A parameter's temporaries still have their names when the next one's are made. Which come next
    to each other depends on which have a gradient; none are worse than the two that take most. What
    is only made for matrices, or only for vectors, lives on through parameters of the other kind:
    so there are rows with one of those in between.
    """
    order = [parameters[at] for at in sorted(range(len(parameters)), key=lambda at: -bursts[at])]
    pair = order[:2]
    between = [one for one in order if (one.dim() > 1) != (order[0].dim() > 1)][:1]
    rows = [[*pair[:1], *middle, *pair[1:]] for middle in ([], between)]
    return [row for one in rows if one for row in (one, one[::-1])]


def probe_of(optimizer: Any, group: dict[str, Any], stand_ins: list[torch.nn.Parameter]) -> Any:
    """A copy of the optimizer with one group, of these parameters in place of its own, that has not
    stepped yet.
    """
    probe = copy.copy(optimizer)  # by what a checkpoint has of it
    shared = {
        id(parameter): parameter for one in optimizer.param_groups for parameter in one["params"]
    }
    for name, own in vars(optimizer).items():
        # a model, or the `step` that a scheduler puts there
        if name not in vars(probe) and not callable(own):
            setattr(probe, name, copy.deepcopy(own, dict(shared)))
    probe.param_groups = [{**group, "params": stand_ins}]
    probe.state = collections.defaultdict(dict)
    return probe


def _step_alone(
    optimizer: Any, group: dict[str, Any], contents: list[torch.Tensor], clock: Callable[[], float]
) -> OptimizerCost:
    stand_ins = [torch.nn.Parameter(content) for content in contents]
    for stand_in in stand_ins:
        # One memory for both, whose content is of no interest: so this takes no more than the real
        # step will.
        stand_in.grad = stand_in.detach()
    probe = probe_of(optimizer, group, stand_ins)
    try:
        with torch.no_grad(), meter(stand_ins) as live:
            before = live.current_bytes
            probe.step()  # the first step makes the state …
            kept = live.current_bytes
            live.reset_peak()
            probe.step()  # … and the second shows what a step takes beside it
        with torch.no_grad():
            seconds = min(_seconds(probe.step, clock, devices_of(stand_ins)) for _ in range(2))
    except TypeError as error:
        raise MisuseError(
            f"{type(optimizer).__name__}.step() cannot be called without arguments ({error}); an"
            " optimizer that needs a closure evaluates the loss itself. Use one that steps on"
            " gradients, such as torch.optim.AdamW."
        ) from None
    # Some hold tensors of their own, outside of the state.
    return OptimizerCost(
        max(kept - before, _bytes(list(probe.state.values()))),
        max(0, live.peak_bytes - kept),
        seconds,
    )


def _seconds(
    step: Callable[[], Any], clock: Callable[[], float], devices: set[torch.device]
) -> float:
    wait_for(devices)
    started = clock()
    step()
    wait_for(devices)
    return clock() - started


def _bytes(state: Any) -> int:
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(state)}
    return sum(sizes.values())
