"""When a storage dies: private torch API, as in `_torch.py`.

A weak reference to the storage's Python object would tell, but is not safe. When an object with several weak references
dies that have callbacks, CPython before 3.12 allocates a tuple for them (`PyObject_ClearWeakRefs`), which may start a
collection; and if that one frees some of the references, because they were garbage, the interpreter crashes. Who else
watches a storage we cannot know: torch does for every fake tensor it makes of a real one, a user may.

So each watcher gives the storage an object of its own to hold, a `_Life`, and watches that: it has one reference, for
which nothing is allocated. torch keeps a storage's Python object, and its attributes, exactly as long as the storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_ATTRIBUTE = "_gradfit_life"  # of a storage: the newest of its lives


class _Life:
    """Dies with the storage that holds it."""

    __slots__ = ("__weakref__", "older")

    def __init__(self, older: _Life | None) -> None:
        self.older = older


class StorageWatch(weakref.ref):  # type: ignore[type-arg]
    """Calls `callback(watch)` when a storage dies, whoever frees it, and before its address can be used again.

    It does not keep the storage alive, and forgets about it when it is dropped itself.
    """

    __slots__ = ("key",)
    key: int  # the storage's address; whoever makes the watch sets it

    def __new__(cls, storage: torch.UntypedStorage, callback: Callable[[Any], object]) -> StorageWatch:
        life: _Life | None = getattr(storage, _ATTRIBUTE, None)
        while life is not None and _watched(life):
            life = life.older
        if life is None:
            life = _Life(getattr(storage, _ATTRIBUTE, None))
            setattr(storage, _ATTRIBUTE, life)
        watch: StorageWatch = _new(cls, life, callback)
        return watch


_new: Any = weakref.ref.__new__
_watched = weakref.getweakrefcount
