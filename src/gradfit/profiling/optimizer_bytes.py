"""What an optimizer will hold and how much it takes for a moment, found before it has taken its
first step.

A copy of the optimizer steps stand-ins for one or two parameters at a time, so that no more than
their state exists twice, and neither the parameters nor the optimizer's state are touched.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gradfit._torch import is_out_of_memory, storage_key
from gradfit._torch_distributed import local_part
from gradfit.devices import devices_of, wait_for
from gradfit.errors import MisuseError
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.meter import meter, tensors_in
from gradfit.profiling.update_groups import (
    GroupBursts,
    UpdateInGroups,
    may_be_divided,
    ways_to_update,
)


class OptimizerCost(NamedTuple):
    state_bytes: int
    burst_bytes: int  # temporaries of one step()
    seconds: float
    # how a step can be run with fewer temporaries; the first is how the optimizer does it
    ways: tuple[UpdateInGroups, ...] = ()

    def and_then(self, other: OptimizerCost) -> OptimizerCost:
        """Of two groups that are stepped one after the other."""
        return OptimizerCost(
            self.state_bytes + other.state_bytes,
            max(self.burst_bytes, other.burst_bytes),
            self.seconds + other.seconds,
        )


def optimizer_cost(
    optimizer: Any,
    *,
    stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
    clock: Callable[[], float] = seconds_now,
    room_bytes: float = math.inf,
) -> OptimizerCost:
    """Bytes of the state after a step, bytes of a step's temporaries, and its seconds.

    `stand_in` makes the tensor that is stepped in a parameter's place, if that is not one like it:
    a shard, a fake one. The state that the optimizer has already is then not what is asked for.
    Where less than `room_bytes` are free, no more is taken than the smallest step will take.
    """
    make = stand_in or torch.zeros_like
    existing = {} if stand_in is not None else getattr(optimizer, "state", {})
    cost = OptimizerCost(0, 0, 0.0)
    groups: list[GroupBursts] = []
    for group in optimizer.param_groups:
        trained = _trained_of(group)
        if trained:
            probe = _Probe(optimizer, group, make, clock)
            of_group, bursts = _cost_of_group(probe, trained, existing, room_bytes)
            cost = cost.and_then(of_group)
            groups.append(bursts)
        else:
            groups.append(GroupBursts([0] * len(group["params"]), 0, False, False, 0.0))
    return cost._replace(ways=ways_to_update(groups))


def _trained_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of an optimizer's group that are trained."""
    return [parameter for parameter in group["params"] if parameter.requires_grad]


class _Probe(NamedTuple):
    """Steps a copy of the optimizer, with stand-ins for parameters of one group."""

    optimizer: Any
    group: dict[str, Any]
    make: Callable[[torch.Tensor], torch.Tensor]
    clock: Callable[[], float]

    def step(self, parameters: list[torch.Tensor]) -> OptimizerCost:
        contents = [self.make(parameter) for parameter in parameters]
        stand_ins = [torch.nn.Parameter(content) for content in contents]
        try:
            probe = probe_of(self.optimizer, self.group, stand_ins, parameters)
            return _step_alone(probe, stand_ins, self.clock)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise _cannot_step(self.optimizer, error) from error


def _cost_of_group(
    probe: _Probe,
    trained: list[torch.Tensor],
    existing: Mapping[torch.Tensor, Any],
    room_bytes: float,
) -> tuple[OptimizerCost, GroupBursts]:
    """What it takes as it is set, and how its temporaries are made up of its parameters'."""
    costs = _cost_of_each(probe, trained)
    there = [_bytes(existing.get(parameter)) for parameter in trained]
    state = sum(held or cost.state_bytes for held, cost in zip(there, costs, strict=True))
    bursts = [cost.burst_bytes for cost in costs]
    small = trained[_least_that_bursts(trained, bursts)]
    few, many = probe.step([small] * 3), probe.step([small] * 6)
    # what a step takes that is not any parameter's
    call = max(0.0, 2 * few.seconds - many.seconds)
    seconds = call + sum(max(0.0, cost.seconds - call) for cost in costs)
    together = _is_together(probe.group, few, many, elsewhere=trained[0].device.type != "cpu")
    divisible = may_be_divided(probe.optimizer, probe.group)
    if not any(bursts):
        burst = 0
    elif together:
        burst = sum(bursts)
    else:
        # what the smallest step takes beside the state that is there: in groups of one parameter if
        # it may be divided
        smallest = sum(map(_nbytes, trained)) + state - sum(there) + max(bursts)
        room = max(room_bytes, smallest) if divisible else math.inf
        by_id = dict(zip(map(id, trained), costs, strict=True))
        burst = max(
            _burst_of_row(probe, row, [by_id[id(one)] for one in row], room)
            for row in _worst_rows(trained, bursts)
        )
    return OptimizerCost(state, burst, seconds), GroupBursts(
        _of_all(probe.group, trained, bursts),
        burst,
        together,
        divisible=divisible,
        call_seconds=call,
    )


def _burst_of_row(
    probe: _Probe, row: list[torch.Tensor], costs: list[OptimizerCost], room_bytes: float
) -> int:
    """Temporaries of parameters that are stepped one after the other; no less than they are, where
    there is no room to see it.
    """
    most = sum(cost.burst_bytes for cost in costs)
    taken = most + sum(map(_nbytes, row)) + sum(cost.state_bytes for cost in costs)
    return most if taken > room_bytes else probe.step(row).burst_bytes


def _nbytes(parameter: torch.Tensor) -> int:
    return local_part(parameter).nbytes


def _of_all(group: Mapping[str, Any], trained: list[torch.Tensor], bursts: list[int]) -> list[int]:
    """By each parameter of the group, those that are not trained among them."""
    by_id = dict(zip(map(id, trained), bursts, strict=True))
    return [by_id.get(id(parameter), 0) for parameter in group["params"]]


def _cost_of_each(probe: _Probe, trained: list[torch.Tensor]) -> list[OptimizerCost]:
    """Of each parameter alone; those of one kind cost the same."""
    kinds = [(parameter.shape, parameter.dtype, parameter.device) for parameter in trained]
    costs: dict[Any, OptimizerCost] = {}
    for kind, parameter in zip(kinds, trained, strict=True):
        if kind not in costs:
            costs[kind] = probe.step([parameter])
    return [costs[kind] for kind in kinds]


def _least_that_bursts(trained: list[torch.Tensor], bursts: list[int]) -> int:
    """The parameter that takes the fewest bytes for a moment, and some if any does."""
    return min(
        range(len(trained)), key=lambda at: (not bursts[at], bursts[at], trained[at].numel())
    )


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


class _StatesOfStandIns(collections.defaultdict[torch.Tensor, dict[str, Any]]):
    """A probe's state, empty as before a first step.

    Some optimizers make their state when they are made, torch's Adagrad before 2.13 for one
    (torch/optim/adagrad.py), and look it up in the first step. They get an entry like the one that
    the parameter has.
    """

    def __init__(self, states: Mapping[torch.Tensor, Any], pairs: Mapping[int, torch.Tensor]):
        super().__init__(dict)
        self._states, self._pairs = states, pairs

    def __missing__(self, stand_in: torch.Tensor) -> dict[str, Any]:
        parameter = self._pairs.get(id(stand_in))
        held = None if parameter is None else self._states.get(parameter)
        entry: dict[str, Any] = {}
        if parameter is not None and isinstance(held, dict):
            entry = _EntryOfStandIn(held, parameter, stand_in)
        self[stand_in] = entry
        return entry

    def copy(self) -> Any:
        return collections.defaultdict(dict, self)

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return collections.defaultdict, (dict, dict(self))


class _EntryOfStandIn(dict[str, Any]):
    """One stand-in's entry, and what it is like."""

    def __init__(
        self, held: Mapping[str, Any], parameter: torch.Tensor, stand_in: torch.Tensor
    ) -> None:
        super().__init__()
        self._held, self._parameter, self._stand_in = held, parameter, stand_in

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._like(self._held[name])
        return value

    def _like(self, value: Any) -> Any:
        """None of the tensors that are held: a probe's step writes to what it gets."""
        if isinstance(value, torch.Tensor):
            return self._zeros_like(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._like, value))
        if type(value) is dict:
            return {name: self._like(item) for name, item in value.items()}
        return copy.deepcopy(value)

    def _zeros_like(self, value: torch.Tensor) -> torch.Tensor:
        like = self._stand_in
        if value.shape == self._parameter.shape:
            return torch.zeros_like(like, dtype=value.dtype)
        # torch's own keep the number of steps on the CPU
        device = like.device if value.device == self._parameter.device else value.device
        return torch.zeros(value.shape, dtype=value.dtype, device=device)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def probe_of(
    optimizer: Any,
    group: Mapping[str, Any],
    stand_ins: list[torch.nn.Parameter],
    parameters: list[torch.Tensor],
) -> Any:
    """A copy of the optimizer with one group, of stand-ins for these parameters, that has not
    stepped yet. Optimizers that it holds are such copies, too, and nothing in it is the original's.
    """
    probe = copy.copy(optimizer)  # by what a checkpoint has of it
    in_their_place = _stand_ins_by_id(optimizer, stand_ins, parameters)
    for name, own in vars(optimizer).items():
        # what the copy has made anew stays: it has no hooks of the original's, say
        if name in ("param_groups", "state") or vars(probe).get(name, own) is not own:
            continue
        if is_optimizer(own):
            inner = probe_of(own, _group_of(own, parameters) or group, stand_ins, parameters)
            setattr(probe, name, inner)
        elif not callable(own):  # a model, or the `step` that a scheduler puts there
            setattr(probe, name, copy.deepcopy(own, dict(in_their_place)))
    pairs = dict(zip(map(id, stand_ins), parameters, strict=True))
    states = _StatesOfStandIns(getattr(optimizer, "state", {}), pairs)
    _set(probe, "param_groups", [{**group, "params": stand_ins}])
    _set(probe, "state", states)
    return probe


def probe_of_all(optimizer: Any, pairs: Mapping[torch.Tensor, torch.nn.Parameter]) -> Any:
    """A copy of the optimizer with all its groups, of stand-ins for these parameters, that has not
    stepped yet.

    Args:
        optimizer: what is copied.
        pairs: each parameter that is stepped, and its stand-in.
    """
    probe = probe_of(optimizer, {}, [*pairs.values()], [*pairs])
    groups = [
        {**group, "params": [pairs.get(one, one) for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    _set(probe, "param_groups", groups)
    return probe


def is_optimizer(value: Any) -> bool:
    """Whether something steps groups of parameters."""
    return callable(getattr(value, "step", None)) and hasattr(value, "param_groups")


def _set(probe: Any, name: str, value: Any) -> None:
    """Nothing where the class has a property of that name: what that looks at has been set."""
    if not isinstance(getattr(type(probe), name, None), property):
        setattr(probe, name, value)


def _group_of(optimizer: Any, parameters: list[torch.Tensor]) -> Mapping[str, Any] | None:
    """The group that holds the first of these parameters."""
    wanted = id(parameters[0])
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    return next((one for one in groups if wanted in map(id, one["params"])), None)


def _stand_ins_by_id(
    optimizer: Any, stand_ins: list[torch.nn.Parameter], parameters: list[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """For `copy.deepcopy`: what is in the place of each parameter that the optimizer steps. The
    others have an empty one, so that whatever the copy does, it does to none of them.
    """
    nothing: torch.Tensor = torch.nn.Parameter(torch.empty(0, device="cpu"))
    every = {id(one): nothing for group in optimizer.param_groups for one in group["params"]}
    every.update(zip(map(id, parameters), stand_ins, strict=True))
    return every


def _cannot_step(optimizer: Any, error: Exception) -> MisuseError:
    return MisuseError(
        f"optimizer: a copy of the {type(optimizer).__name__} with some parameters alone, by which"
        f" its bytes are measured, raised {type(error).__name__} ({error}). One that wants a"
        " closure, or looks at all parameters together, cannot be planned for. Pass one that steps"
        " on gradients alone, such as torch.optim.AdamW or what it wraps, or use"
        " GradientAccumulator(optimizer), which holds no budget."
    )


def _step_alone(
    probe: Any, stand_ins: list[torch.nn.Parameter], clock: Callable[[], float]
) -> OptimizerCost:
    for stand_in in stand_ins:
        # One memory for both, whose content is of no interest: so this takes no more than the real
        # step will.
        stand_in.grad = stand_in.detach()
    with torch.no_grad(), meter(stand_ins) as live:
        before = live.current_bytes
        probe.step()  # the first step makes the state …
        kept = live.current_bytes
        live.reset_peak()
        probe.step()  # … and the second shows what a step takes beside it
    with torch.no_grad():
        seconds = min(_seconds(probe.step, clock, devices_of(stand_ins)) for _ in range(2))
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
