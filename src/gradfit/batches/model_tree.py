"""A model's modules and parameters: walked over once, and from then on only compared.

A walk over a few dozen modules takes longer than most of what a short step does beside its passes.
Whether anything has changed since is told by identities, with no line of Python per module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch

from gradfit._torch import global_module_hooks, is_own_hook
from gradfit._torch_native import core
from gradfit.batches.held_state import HoldersByType

_NAMES = ("_modules", "_parameters")
_registries, _registries_by_name = itemgetter(*_NAMES), attrgetter(*_NAMES)
_values = methodcaller("values")
_hooks_of_module = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_hooks_of_parameter = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_own_forward = methodcaller("get", "forward")


class ModelTree:
    """The modules and parameters of a model, each once.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> tree = ModelTree(model)
    >>> model.append(torch.nn.Linear(2, 2))[0].bias = None
    >>> tree.renew()
    >>> len(tree.modules), len(tree.parameters)
    (3, 3)
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.walks = 0  # how often modules or parameters were found to be others
        self.holders = HoldersByType()
        self._walk()

    def _walk(self) -> None:
        self.walks += 1
        self.modules = modules_of(self.model)
        self._held = _held_by(self.modules)
        parameters = (p for module in self.modules for p in module._parameters.values())
        self.parameters: list[torch.nn.Parameter] = each_once(
            parameter for parameter in parameters if parameter is not None
        )

    def renew(self) -> None:
        """Walk once more, if a module or a parameter has come, gone or been replaced."""
        if not _hold_the_same(self.modules, self._held):
            self._walk()

    def hooks(self) -> tuple[Any, ...]:
        """The code that runs in a pass beside that of the modules' classes: hooks on modules, on
        parameters and on all modules there are, and forwards that were put in. Empty for most.
        """
        tables = chain(
            chain.from_iterable(map(_hooks_of_module, self.modules)),
            chain.from_iterable(map(_hooks_of_parameter, self.parameters)),
            global_module_hooks(),
        )
        there = [table for table in tables if table]
        forwards = filter(None, map(_own_forward, map(vars, self.modules)))
        hooks = chain(chain.from_iterable(map(_values, there)), forwards)
        return tuple(_code_of(hook) for hook in hooks if not is_own_hook(hook))


def _code_of(hook: Any) -> Any:
    """A loop that defines and registers the same hook in each step changes nothing by it."""
    return getattr(hook, "__code__", hook)


def each_once(tensors: Iterable[Any]) -> list[Any]:
    """Each object once, by identity, in the order in which they come."""
    held = list(tensors)
    return list(dict(zip(map(id, held), held, strict=True)).values())


def joined(first: list[Any], second: Sequence[Any]) -> list[Any]:
    """Those of both, each once; those of `first` are. Usually the two hold the same."""
    if len(first) == len(second) and all(map(is_, first, second)):
        return [*first]
    return each_once([*first, *second])


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each module once, in the order of `model.modules()`, which takes several times as long.

    The order is that of `model.parameters()`, too, and so of most optimizers: lists of the same
    parameters in the same order are seen to be the same at once.
    """
    by_id: dict[int, torch.nn.Module] = {}
    left = [model]
    while left:
        module = left.pop()
        if id(module) not in by_id:
            by_id[id(module)] = module
            children = [*module._modules.values()]
            left.extend(child for child in reversed(children) if child is not None)
    return list(by_id.values())


def _hold_the_same(modules: list[torch.nn.Module], before: list[Any]) -> bool:
    """Whether `_held_by` gives what it gave before."""
    native = core()
    is_same = None if native is None else native.hold_the_same([*map(vars, modules)], before)
    if is_same is None:
        now = _held_by(modules)
        return len(before) == len(now) and all(map(is_, before, now))
    return bool(is_same)


def _held_by(modules: list[torch.nn.Module]) -> list[Any]:
    """All children and parameters of the modules, None where a name stands for nothing."""
    try:
        registries = chain.from_iterable(map(_registries, map(vars, modules)))
        return [*chain.from_iterable(map(dict.values, registries))]
    except (KeyError, TypeError):  # a scripted module, which has them elsewhere
        registries = chain.from_iterable(map(_registries_by_name, modules))
        return [*chain.from_iterable(map(_values, registries))]
