"""Modules that would communicate by themselves, found by their parameters and kept silent while a window fills.

DDP reads its flags when a forward begins, so they are changed for the time of the forward alone: whoever looks at them
at any other moment sees what the user has set.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from gradfit import _torch_distributed as private
from gradfit.accumulate.ranks import Window
from gradfit.distributed.group import Group

_known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_listeners: weakref.WeakKeyDictionary[torch.nn.Module, Listener] = weakref.WeakKeyDictionary()


def modules_of(kind: type, tensors: list[Tensor]) -> list[Any]:
    """The living modules of that kind that hold any of these parameters.

    An accumulator is given parameters, not the module around them, and a parameter does not know its module. Those
    found before are tried first, since looking at all living objects takes some ten milliseconds.
    """
    wanted = {id(tensor) for tensor in tensors}
    found = _holding(list(_known), kind, wanted)
    missing = wanted - {id(tensor) for module in found for tensor in module.parameters()}
    if missing:
        _known.update(private.live_modules((kind,)))
        found = _holding(list(_known), kind, wanted)
    return found


def _holding(modules: list[torch.nn.Module], kind: type, wanted: set[int]) -> list[torch.nn.Module]:
    return [
        module
        for module in modules
        if isinstance(module, kind) and any(id(tensor) in wanted for tensor in module.parameters())
    ]


class Listener:
    """Two hooks on a module's forward: silence before it, the flags back after it, word left if it fails."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self._before: list[dict[str, Any]] = []
        self._handles = [
            module.register_forward_pre_hook(self._enter, prepend=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def active(self) -> bool:
        """Whether a window is filling from this module."""
        return any(window.enabled for window in list(self.groups))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        silent = self.active and torch.is_grad_enabled()
        self._before.append(private.silence_ddp(module) if silent else {})

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if self._before:
            private.restore_flags(module, self._before.pop())
        error = sys.exc_info()[1]
        if error is not None:
            for group in list(self.groups.values()):
                group.leave_word(error)


def listen(modules: list[torch.nn.Module], window: Window, group: Group | None) -> None:
    """Begin to keep modules silent for a window; end it if there is no group."""
    for module in modules:
        listener = _listeners.get(module)
        if listener is None:
            if group is None:
                continue
            listener = _listeners[module] = Listener(module)
        if group is not None:
            listener.groups[window] = group
        else:
            listener.groups.pop(window, None)
            if not listener.groups:
                listener.remove()
                del _listeners[module]
