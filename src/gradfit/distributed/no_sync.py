"""Modules that would communicate by themselves: found by their parameters, and heard when they
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

_known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def modules_of(kind: type, tensors: list[Tensor]) -> list[Any]:
    """The living modules of that kind that hold any of these parameters, outer ones first, alike on
    every rank.
    """
    wanted = {id(tensor): position for position, tensor in enumerate(tensors)}
    found = _holding(list(_known), kind, wanted)
    if wanted.keys() - {id(tensor) for module in found for tensor in module.parameters()}:
        _known.update(_torch_distributed.live_modules((kind,)))
        found = _holding(list(_known), kind, wanted)
    inner = {id(one) for module in found for one in module.modules() if one is not module}
    roots = [module for module in found if id(module) not in inner]
    roots.sort(
        key=lambda module: min(
            wanted.get(id(tensor), len(wanted)) for tensor in module.parameters()
        )
    )
    return [module for root in roots for module in root.modules() if isinstance(module, kind)]


def _holding(
    modules: list[torch.nn.Module], kind: type, wanted: dict[int, int]
) -> list[torch.nn.Module]:
    return [
        module
        for module in modules
        if isinstance(module, kind) and any(id(tensor) in wanted for tensor in module.parameters())
    ]


class Hearer(Protocol):
    """Who wants to know about a module's forwards."""

    def before_forward(self, module: torch.nn.Module) -> None:
        """A forward that will be differentiated begins."""

    def after_forward(self, module: torch.nn.Module) -> None:
        """It has ended, one way or the other."""

    def failed(self, error: BaseException) -> None:
        """It has failed."""


class _Running(threading.local):
    """The forwards that are running in this thread: was each of them heard?"""

    def __init__(self) -> None:
        self.forwards: list[bool] = []


class Ear:
    """Hooks on modules' forwards that hold the hearer weakly and go with it; `inner` tells forwards
    inside forwards.
    """

    def __init__(self, modules: list[torch.nn.Module], hearer: Hearer) -> None:
        reference = weakref.ref(hearer)
        running = _Running()

        def before(module: torch.nn.Module, _: Any) -> None:
            alive = reference()
            # Not in a forward that runs inside a backward: that one recomputes, and belongs to a
            # forward before it.
            heard = alive is not None and torch.is_grad_enabled() and _torch.graph_task_id() == -1
            running.forwards.append(heard)
            if heard and alive is not None:
                alive.before_forward(module)

        def after(module: torch.nn.Module, *_: Any) -> None:
            alive = reference()
            if running.forwards and running.forwards.pop() and alive is not None:
                error = sys.exc_info()[1]
                if error is not None:
                    alive.failed(error)
                alive.after_forward(module)

        self._handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after, always_call=True),
            )
        ]
        weakref.finalize(hearer, _remove_all, self._handles)

    def close(self) -> None:
        """Stop listening."""
        _remove_all(self._handles)


def _remove_all(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
