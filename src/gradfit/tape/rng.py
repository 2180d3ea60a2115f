"""Random generators: what state an operation started from, and how to start from it again without a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

State = tuple[Any, torch.Tensor]  # a generator (or a device, for its default one) and its state


def capture(args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
    """The generator that a random operation is about to use, and its state now."""
    source = _source(args, kwargs)
    return source, get_state(source)


def get_state(source: Any) -> torch.Tensor:
    """The state of a generator, or of a device's default one."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    state: torch.Tensor = torch.get_device_module(source).get_rng_state(source)
    return state


def set_state(source: Any, state: torch.Tensor) -> None:
    """Put a generator, or a device's default one, back to `state`."""
    if isinstance(source, torch.Generator):
        source.set_state(state)
    else:
        torch.get_device_module(source).set_rng_state(state, source)


def _source(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    device: torch.device | None = None
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Generator):
            return argument
        if device is None:
            if isinstance(argument, torch.Tensor):
                device = argument.device
            elif isinstance(argument, list | tuple) and argument and isinstance(argument[0], torch.Tensor):
                device = argument[0].device
    device = torch.device(kwargs.get("device") or device or "cpu")
    return torch.default_generator if device.type == "cpu" else device


class Rewound:
    """Context manager for replays: `start(state)` before each random operation; the present states come back at exit."""

    def __init__(self) -> None:
        self._present: dict[int, State] = {}

    def start(self, state: State) -> None:
        source, start = state
        if id(source) not in self._present:
            self._present[id(source)] = (source, get_state(source))
        set_state(source, start)

    def __enter__(self) -> Rewound:
        return self

    def __exit__(self, *_: object) -> None:
        for source, present in self._present.values():
            set_state(source, present)
