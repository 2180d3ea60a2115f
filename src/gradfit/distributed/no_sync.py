"""Modules that would communicate by themselves: found by their parameters, and observed as they
begin a forward.

An accumulator is given parameters, not the module around them, and a parameter does not know its
module. So living modules are looked through, once; those found before are tried first.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from gradfit import _torch, _torch_distributed

_seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules that were looked up before


def modules_of(kind: tuple[type, ...], tensors: list[Tensor]) -> list[Any]:
    """The living modules of these kinds that hold any of these parameters, outer ones first, alike
    on every rank.
    """
    wanted = {id(tensor): position for position, tensor in enumerate(tensors)}
    holders = _holding(list(_seen), kind, wanted)
    if wanted.keys() - _parameter_ids(holders):
        _seen.update(_torch_distributed.live_modules(kind))
        holders = _holding(list(_seen), kind, wanted)
    roots = sorted(_outermost(holders), key=lambda module: _first_position(module, wanted))
    return [module for root in roots for module in root.modules() if isinstance(module, kind)]


def _parameter_ids(modules: list[torch.nn.Module]) -> set[int]:
    return {id(tensor) for module in modules for tensor in module.parameters()}


def _outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    inner = {id(one) for module in modules for one in module.modules() if one is not module}
    return [module for module in modules if id(module) not in inner]


def _first_position(module: torch.nn.Module, wanted: dict[int, int]) -> int:
    """That of the first parameter that a module holds."""
    return min(wanted.get(id(tensor), len(wanted)) for tensor in module.parameters())


def _holding(
    modules: list[torch.nn.Module], kind: tuple[type, ...], wanted: dict[int, int]
) -> list[torch.nn.Module]:
    return [
        module
        for module in modules
        if isinstance(module, kind) and any(id(tensor) in wanted for tensor in module.parameters())
    ]


class ForwardListener(Protocol):
    """Who wants to know about a module's forwards."""

    def before_forward(self, module: torch.nn.Module) -> None:
        """A forward that will be differentiated begins."""

    def after_forward(self, module: torch.nn.Module) -> None:
        """It has ended, one way or the other."""

    def failed(self, error: BaseException) -> None:
        """It has failed."""


class _Running(threading.local):
    """The forwards that are running in this thread: was the listener told of each?"""

    def __init__(self) -> None:
        self.forwards: list[bool] = []


class ForwardHooks:
    """Hooks on modules' forwards that hold the listener weakly and go with it."""

    def __init__(self, modules: list[torch.nn.Module], listener: ForwardListener) -> None:
        hooks = _Hooks(listener)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(hooks.before, prepend=True),
                module.register_forward_hook(hooks.after, always_call=True),
            ]
        # The modules outlive an accumulator that nobody closes: its hooks go when it does.
        weakref.finalize(listener, _remove_all, self._handles)

    def close(self) -> None:
        """Stop listening."""
        _remove_all(self._handles)


class _Hooks:
    def __init__(self, listener: ForwardListener) -> None:
        self._listener = weakref.ref(listener)
        self._running = _Running()

    def before(self, module: torch.nn.Module, _: Any) -> None:
        listener = self._listener()
        # Not in a forward that runs inside a backward: that one recomputes, and belongs to a
        # forward before it.
        is_of_window = torch.is_grad_enabled() and _torch.graph_task_id() == -1
        self._running.forwards.append(listener is not None and is_of_window)
        if listener is not None and is_of_window:
            listener.before_forward(module)

    def after(self, module: torch.nn.Module, *_: Any) -> None:
        listener, forwards = self._listener(), self._running.forwards
        if forwards and forwards.pop() and listener is not None:
            error = sys.exc_info()[1]
            if error is not None:
                listener.failed(error)
            listener.after_forward(module)


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
