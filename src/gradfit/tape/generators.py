"""Random generators: what state an operation started from, and how to start from it again without a
trace.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradfit.interrupts import uninterrupted
from gradfit.tape.operators import OpInfo

State = tuple[Any, torch.Tensor]  # a generator (or a device, for its default one) and its state

# replays in several threads must not rewind the default generators at the same time
_global = threading.RLock()


def draws(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a random operation really draws: attention does not when its dropout probability is
    zero.

    Nothing does on the meta device.
    """
    if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
        return False
    if "device" in kwargs and _is_meta(kwargs["device"]):
        return False
    return info.dropout is None or _dropout_probability(info.dropout, args, kwargs) != 0.0


def _dropout_probability(place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    probability: float = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return probability


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def capture(args: Sequence[Any], kwargs: Mapping[str, Any]) -> State:
    """The generator that a random operation is about to use, and its state now."""
    usual = (
        bool(args)
        and isinstance(args[0], torch.Tensor)
        and args[0].is_cpu
        and len(args) < 3
        and type(args[-1]) is not torch.Generator
        and kwargs.get("generator") is None
    )
    source = torch.default_generator if usual else _source(args, kwargs)
    return source, get_state(source)


def get_state(source: Any) -> torch.Tensor:
    """The state of a generator, or of a device's default one."""
    if isinstance(source, torch.Generator):
        return source.get_state()
    state: torch.Tensor = torch.get_device_module(source).get_rng_state(*_which(source))
    return state


def set_state(source: Any, state: torch.Tensor) -> None:
    """Put a generator, or a device's default one, back to `state`."""
    if isinstance(source, torch.Generator):
        source.set_state(state)
    else:
        torch.get_device_module(source).set_rng_state(state, *_which(source))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """What a device's module is asked with: `torch.mps` knows one device, and takes none."""
    return () if device.type == "mps" else (device,)


def _source(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The generator that an operation is given, or else its device's default one."""
    arguments = (*args, *kwargs.values())
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return argument
    return _default_of(kwargs.get("device") or _first_device(arguments) or "cpu")


def _default_of(device: Any) -> Any:
    """A device's default generator, or, of one that is no CPU, the device itself."""
    device = torch.device(device)
    return torch.default_generator if device.type == "cpu" else with_index(device)


def _first_device(arguments: Sequence[Any]) -> torch.device | None:
    """Of the first tensor, or list of tensors."""
    for argument in arguments:
        first = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if isinstance(first, torch.Tensor):
            return first.device
    return None


def with_index(device: torch.device) -> torch.device:
    """The device that is meant now: `cuda` is another one at replay if the current device has
    changed since.
    """
    index: int | None = device.index
    if index is not None:
        return device
    current = getattr(torch.get_device_module(device), "current_device", None)
    return torch.device(device.type, 0 if current is None else current())


def _identity(source: Any) -> Any:
    """A generator is itself; an object that names a device is a new one at each asking."""
    return source if isinstance(source, torch.device) else id(source)


class Rewound:
    """Context manager for replays: `start(state)` before each random operation leaves no trace on
    any generator.

    An operation that takes a generator gets a private one, so that threads that draw at the same
    time are not disturbed. Others use the default generator, which is rewound, and put back at
    exit.
    """

    def __init__(self) -> None:
        self._present: dict[Any, State] = {}  # by `_identity`
        self._undisturbed = uninterrupted()  # from before the lock is taken until it is given back
        self._private: dict[torch.device, torch.Generator] = {}

    def start(self, state: State, takes_generator: bool) -> dict[str, Any]:
        """Rewind; returns the keyword argument to pass."""
        source, start = state
        if isinstance(source, torch.Generator) and takes_generator:
            generator = self._private.get(source.device)
            if generator is None:
                generator = self._private[source.device] = torch.Generator(source.device)
            generator.set_state(start)
            return {"generator": generator}
        if _identity(source) not in self._present:
            self._hold(source)
        set_state(source, start)
        return {}

    def _hold(self, source: Any) -> None:
        """Remember where a generator is, to put it back; until then no other replay may rewind
        one.
        """
        first = not self._present
        if first:
            self._undisturbed.__enter__()
            _global.acquire()
        try:
            self._present[_identity(source)] = (source, get_state(source))
        except BaseException:
            if first:
                self._let_go()
            raise

    def _let_go(self) -> None:
        _global.release()
        self._undisturbed.__exit__()

    def __enter__(self) -> Rewound:
        return self

    def __exit__(self, *_: object) -> None:
        if self._present:
            try:
                for source, present in self._present.values():
                    set_state(source, present)
            finally:
                self._present.clear()
                self._let_go()
