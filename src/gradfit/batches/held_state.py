"""What a forward changes inside of what modules hold: lists, dicts and sets, and random generators
of their own.

An attribute that is put back is the same list as before, with what a forward has put into it. So
the contents go back, too: a counter in a dict would otherwise be further after trials than
training is, and a list of losses that somebody adds up would hold those of a pass that failed.
Other objects may be anything (a trainer, a data set), and stay as they are.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from gradfit._torch_native import core

_TORCHS_OWN = frozenset(vars(torch.nn.Module()))  # tables that a snapshot puts back itself
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MADE_BY_CLASS = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE
_HOLDERS = (dict, list, set, deque, tuple, *_GENERATORS)

_PutBack = Callable[[], object]


class HoldersByType:
    """Which of many values hold something, told by their types, each of which is looked at once: a
    step asks this of the same values as the step before.

    A type that a forward makes is looked at again: whoever remembers it holds what it closes over.
    """

    def __init__(self) -> None:
        self._without: set[type] = set()  # that stay as long as the process

    def in_attributes(self, attributes: list[dict[str, Any]]) -> list[Any]:
        """Of all that modules have beside torch's own tables; `attributes` are those of each."""
        return self.among(_values_beside(attributes, _TORCHS_OWN, self._without))

    def among(self, values: Iterable[Any]) -> list[Any]:
        """Those that hold something. Hot: a module has some twenty attributes."""
        without = self._without
        found = [value for value in values if type(value) not in without]
        new = {kind for kind in set(map(type, found)) if not issubclass(kind, _HOLDERS)}
        without.update(filter(_stays, new))
        return [value for value in found if type(value) not in new] if new else found


def _values_beside(
    attributes: list[dict[str, Any]], own: frozenset[str], without: set[type]
) -> list[Any]:
    """The values whose names are not among `own`, and whose types not `without`."""
    native = core()
    values = None if native is None else native.values_beside(attributes, own, without)
    if values is not None:
        return values  # type: ignore[no-any-return]
    return [
        value
        for names in attributes
        if len(names) > len(own)
        for name, value in names.items()
        if name not in own and type(value) not in without
    ]


def _stays(kind: type) -> bool:
    """Whether a type is there as long as the process: it is of C, or its module has it."""
    if not kind.__flags__ & _MADE_BY_CLASS:
        return True
    names = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    return names.get(kind.__name__) is kind


class HeldState:
    """The contents of lists, dicts, sets and generators that modules hold, as they are now.

    >>> module = torch.nn.Module()
    >>> module.counts = {"calls": [1]}
    >>> held = HeldState([vars(module)])
    >>> module.counts["calls"].append(2)
    >>> held.restore()
    >>> module.counts
    {'calls': [1]}
    """

    def __init__(
        self, attributes: Iterable[dict[str, Any]], holders: HoldersByType | None = None
    ) -> None:
        """Look at everything. `attributes` are those of each module; `holders` knows the types that
        earlier ones had.
        """
        self._put_back: dict[int, _PutBack] = {}
        holders = holders or HoldersByType()
        left = holders.in_attributes([*attributes])
        while left:
            inside: list[Any] = []
            for thing in left:
                if id(thing) not in self._put_back:
                    held, self._put_back[id(thing)] = _contents_of(thing)
                    inside += held
            left = holders.among(inside)

    def restore(self) -> None:
        """Put the contents back into the same objects."""
        for put_back in self._put_back.values():
            put_back()


def held_tensors(attributes: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules hold as attributes, or in lists and dicts, by the attribute's name;
    neither parameters nor buffers. `attributes` are those of each module, by its name.
    """
    for module, names in attributes.items():
        for name in names.keys() - _TORCHS_OWN:
            left, seen = [names[name]], set[int]()
            while left:
                thing = left.pop()
                kind = type(thing)  # a proxy says that it is what it stands for
                if issubclass(kind, torch.Tensor):
                    yield f"{module}.{name}".lstrip("."), thing
                elif issubclass(kind, _HOLDERS) and id(thing) not in seen:
                    seen.add(id(thing))
                    left += _contents_of(thing)[0]


def _contents_of(thing: Any) -> tuple[Iterable[Any], _PutBack]:
    """What is in it, and how that is put back. Methods are those of Python's own types, since a
    subclass may do more: `Counter.update` adds.
    """
    if isinstance(thing, dict):
        kind: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        items = dict(kind.items(thing))
        return items.values(), partial(_refill, thing, kind.clear, kind.update, items)
    if isinstance(thing, list):
        listed = list.copy(thing)
        return listed, partial(_refill, thing, list.clear, list.extend, listed)
    if isinstance(thing, set):
        return (), partial(_refill, thing, set.clear, set.update, set(thing))
    if isinstance(thing, deque):
        queued = [*thing]
        return queued, partial(_refill, thing, deque.clear, deque.extend, queued)
    if isinstance(thing, tuple):
        return thing, _nothing
    return (), _generator_put_back(thing)


def _nothing() -> None: ...


def _refill(thing: Any, clear: Any, fill: Any, content: Any) -> None:
    clear(thing)
    fill(thing, content)


def _generator_put_back(thing: Any) -> _PutBack:
    """How a random generator draws once more what it is about to draw."""
    if isinstance(thing, torch.Generator):
        before = thing.clone_state()
        return lambda: thing.set_state(before.get_state())
    if isinstance(thing, np.random.Generator):
        return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return partial(thing.set_state, thing.get_state())
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return partial(thing.setstate, thing.getstate())
    return _nothing
