"""What an update asks a device's allocator for, in its order: found by stepping a copy of the
optimizer, whose stand-ins take the place of the gradients.

Where the optimizer's state comes to lie, between what a step's passes have left free, decides what
the next step finds: sizes alone do not say it.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory
from gradfit._torch_distributed import local_part
from gradfit._torch_memory_history import RequestHistory, Requests
from gradfit.accumulate.loss_scaling import UpdateScaling, scale_of
from gradfit.batches.device_numbers import DeviceNumbers
from gradfit.batches.model_tree import ModelTree
from gradfit.devices import free_cached_memory
from gradfit.fitting.grouped_step import GroupedStep
from gradfit.norms import norms_of_each, total_norm
from gradfit.profiling.meter import tensors_in
from gradfit.profiling.optimizer_bytes import probe_of_all

Sizes = list[tuple[int, int]]  # bytes and device
# Names of what is on paper alone, counting down; those of the passes are positive.
_STATES, _TEMPORARIES, _ASKED = -(1 << 40), -(3 << 40), -(1 << 60)


class UpdateOnDevice(Protocol):
    """What the first update asks for (0), and each later one (1)."""

    def copies(self, number: int) -> Sizes:
        """What is copied before, to go back to."""

    def of_norm(self, number: int) -> Requests:
        """What is asked for until the losses are read."""

    def requests(self, number: int) -> Requests:
        """What it asks for and gives back after that."""

    @property
    def stays(self) -> Container[int]:
        """Names of what stays: the optimizer's state."""


@dataclass(frozen=True)
class UpdateSizes:
    """An update of which only sizes are known: as large as its parameters, again and again.

    Attributes:
        parameters: (bytes, device) of each.
        states: of those that there are.
        waiting_bytes: of state that the first update makes.
        burst_bytes: of temporaries.
    """

    parameters: Sizes
    states: Sizes
    waiting_bytes: int
    burst_bytes: int

    @staticmethod
    def of(model: torch.nn.Module, optimizer: Any, waiting: int, burst: int) -> UpdateSizes:
        return UpdateSizes(_sizes_of(_trained_in(model)), _states_of(optimizer), waiting, burst)

    def copies(self, number: int) -> Sizes:
        return [*self.parameters, *self.states, *(self._new_states() if number else ())]

    def of_norm(self, number: int) -> Requests:
        return []

    def requests(self, number: int) -> Requests:
        states = [] if number else named(self._new_states(), _STATES)
        temporaries = _pieces(sorted(self.parameters, reverse=True), self.burst_bytes)
        return [*states, *named(temporaries, _TEMPORARIES)]

    @property
    def stays(self) -> Container[int]:
        return {name for name, *_ in named(self._new_states(), _STATES)}

    def _new_states(self) -> Sizes:
        """As large as the parameters they belong to, as often as the bytes go."""
        return _pieces(sorted(self.parameters, reverse=True), self.waiting_bytes)


@dataclass(frozen=True)
class RecordedUpdate:
    """An update whose requests were recorded.

    Attributes:
        parameters: (bytes, device) of each.
        states: of the optimizer's, when it has them all.
        first: what the update asks for that makes the state; None if it is there.
        later: each other one.
        norm_ends: so many requests of the first and of a later one are the norm's.
    """

    parameters: Sizes
    states: Sizes
    first: Requests | None
    later: Requests
    norm_ends: tuple[int, int]

    def copies(self, number: int) -> Sizes:
        has_state = number or self.first is None
        return [*self.parameters, *(self.states if has_state else ())]

    def of_norm(self, number: int) -> Requests:
        requests, end = self._one(number)
        return requests[:end]

    def requests(self, number: int) -> Requests:
        requests, end = self._one(number)
        return requests[end:]

    def _one(self, number: int) -> tuple[Requests, int]:
        if number or self.first is None:
            return self.later, self.norm_ends[1]
        return self.first, self.norm_ends[0]

    @property
    def stays(self) -> Container[int]:
        held: set[int] = set()
        for name, nbytes, _ in self.first or ():
            (held.add if nbytes >= 0 else held.discard)(name)
        return held


class DeviceUpdates:
    """What a model's updates ask their devices for; each kind of update is recorded once.

    Args:
        model: whose parameters are trained.
        optimizer: theirs.
        devices: the model's.
        limit_bytes: what a step may take: recording takes no more.
        scaler: steps the optimizer, if one does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        devices: Sequence[torch.device],
        limit_bytes: int,
        scaler: Any = None,
    ) -> None:
        self._model, self._optimizer, self._devices = model, optimizer, devices
        self._limit_bytes, self._scaler = limit_bytes, scaler
        # by groups, bytes that are trained, and whether the first is meant, which makes the state
        self._known: dict[tuple[tuple[int, ...], int, bool], RecordedUpdate | None] = {}

    def of(
        self, groups: tuple[int, ...], waiting: int, burst: int, live_bytes: int
    ) -> UpdateOnDevice:
        """As a copy of the optimizer does it; by sizes alone where the budget has no room for that
        copy.

        Args:
            groups: that it is run in.
            waiting: bytes of state that the first update makes.
            burst: bytes of temporaries.
            live_bytes: of all that is there in an update.
        """
        by_size = UpdateSizes.of(self._model, self._optimizer, waiting, burst)
        changed = sum(nbytes for nbytes, _ in by_size.parameters)
        there = sum(nbytes for nbytes, _ in by_size.states)
        key = (groups, changed, waiting > 0)
        if key not in self._known:
            taken = live_bytes + changed + max(waiting, there) + burst
            self._known[key] = None
            if taken <= self._limit_bytes and not distributed.is_running():
                self._known[key] = self._recorded(groups, has_state=not waiting)
        return self._known[key] or by_size

    def _recorded(self, groups: Sequence[int], *, has_state: bool) -> RecordedUpdate | None:
        """None where nobody says what was asked for, or memory runs out."""
        history = RequestHistory(self._devices)
        of_what = (self._model, self._optimizer, groups, history)
        try:
            return recorded_update(*of_what, has_state=has_state, scaler=self._scaler)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        free_cached_memory()
        return None


def recorded_update(
    model: torch.nn.Module,
    optimizer: Any,
    groups: Sequence[int],
    history: RequestHistory,
    *,
    has_state: bool,
    scaler: Any = None,
) -> RecordedUpdate | None:
    """Step a copy of the optimizer twice, in these groups; None where that is not recorded.

    It takes as much as the parameters and the optimizer's state once more. Nothing is changed.

    Args:
        model: whose parameters are trained.
        optimizer: theirs.
        groups: as `GroupedStep` takes them; empty: as the optimizer does it.
        history: of the devices.
        has_state: the optimizer has its state already.
        scaler: steps the optimizer, if one does; it has its numbers already.
    """
    pairs = {parameter: _stand_in(parameter) for parameter in _trained_in(model)}
    probe = probe_of_all(optimizer, pairs)
    stepper: _Stepper = _step
    if scaler is not None and scaler.is_enabled():
        scaler = _copy_of(scaler)
        if scaler is None:
            return None
        make_numbers(scaler, model)
        stepper = partial(_step_scaled, scaler)
    found: list[Requests] = []
    ends: list[int] = []
    for _ in range(2):
        history.begin()
        try:
            ends.append(stepper(probe, groups, [*pairs.values()], history))
        finally:
            requests = history.end()
        if requests is None:
            return None
        found.append([(_ASKED - at, nbytes, device) for at, nbytes, device in requests])
    return RecordedUpdate(
        _sizes_of([*pairs]),
        _states_of(probe),
        None if has_state else found[0],
        found[1],
        (ends[0], ends[1]),
    )


def _stand_in(parameter: torch.Tensor) -> torch.nn.Parameter:
    """With a gradient in the same memory: what is in them is of no interest."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter, requires_grad=False))
    stand_in.grad = stand_in.detach()
    return stand_in


def make_numbers(scaler: Any, model: torch.nn.Module) -> None:
    """Let a scaler hold by now what its first loss would make it hold: torch's has its scale on the
    device.
    """
    device = next((one.device for one in _trained_in(model)), None)
    scaler.scale(torch.zeros((), device=device))


def _copy_of(scaler: Any) -> Any:
    """None where it cannot be copied: torch's refuses between an optimizer's unscaling and its
    update.
    """
    try:
        return copy.deepcopy(scaler)
    except Exception:
        return None


_Stepper = Callable[[Any, Sequence[int], list[torch.nn.Parameter], RequestHistory], int]


def _step(
    probe: Any,
    groups: Sequence[int],
    stand_ins: list[torch.nn.Parameter],
    history: RequestHistory,
) -> int:
    """As in a step: the norms have been sent when the optimizer works. Gives how many requests
    were theirs.
    """
    with torch.no_grad():
        numbers = DeviceNumbers()
        numbers.add_together(norms_of_each([one.grad for one in stand_ins if one.grad is not None]))
        numbers.send()
        end = history.so_far()
        with GroupedStep(probe, groups) if groups else contextlib.nullcontext():
            probe.step()
    return end


def _step_scaled(
    scaler: Any,
    probe: Any,
    groups: Sequence[int],
    stand_ins: list[torch.nn.Parameter],
    history: RequestHistory,
) -> int:
    """As in a step with a scaler: the losses are read when gradients are unscaled."""
    gradients = [one.grad for one in stand_ins if one.grad is not None]
    scaling = UpdateScaling(scaler, probe)
    with torch.no_grad(), GroupedStep(probe, groups) if groups else contextlib.nullcontext():
        numbers = DeviceNumbers()
        numbers.add_together([scale_of(scaler), *scaling.unscale(), total_norm(gradients)])
        numbers.read()
        end = history.so_far()
        scaling.step(False)
    return end


def _trained_in(model: torch.nn.Module) -> list[torch.Tensor]:
    """In the order in which a step copies them."""
    return [parameter for parameter in ModelTree(model).parameters if parameter.requires_grad]


def _states_of(optimizer: Any) -> Sizes:
    """Of what the optimizer holds."""
    return _sizes_of([*tensors_in(list(getattr(optimizer, "state", {}).values()))])


def _sizes_of(tensors: Sequence[torch.Tensor]) -> Sizes:
    parts = [*map(local_part, tensors)]
    return [(part.nbytes, part.get_device()) for part in parts]


def _pieces(sizes: Sizes, total: int) -> Sizes:
    """So many bytes in pieces of these sizes, over and over, the last one smaller."""
    pieces: Sizes = []
    for nbytes, device in cycle([one for one in sizes if one[0]]):
        if total <= 0:
            break
        pieces.append((min(nbytes, total), device))
        total -= nbytes
    return pieces


def named(sizes: Sizes, first: int) -> Requests:
    """Allocations of these sizes, with names that no storage has: counting down from `first`."""
    return [(first - place, nbytes, device) for place, (nbytes, device) in enumerate(sizes)]
