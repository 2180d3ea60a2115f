"""When a storage dies: private torch API, as in `_torch.py`.

A weak reference to the storage's Python object would tell, but is not safe. When an object with
several weak references dies that have callbacks, CPython before 3.12 allocates a tuple for them
(`PyObject_ClearWeakRefs`), which may start a collection; and if that one frees some of the
references, because they were garbage, the interpreter crashes. From 3.12 on no allocation starts a
collection (https://github.com/python/cpython/issues/97922). Who else watches a storage we cannot
know: torch does for every fake tensor it makes of a real one, a user may.

So each watcher gives the storage an object of its own to hold, a `Life`, and watches that: it has
one reference, for which nothing is allocated. torch keeps a storage's Python object, and its
attributes, exactly as long as the storage. A `Life` is the dictionary of these attributes itself,
and mostly empty: one more, for an attribute, would take four times the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Life(dict[str, Any]):
    """Dies with the storage that holds it, as its `__dict__`. True, though empty, as the dictionary
    of a storage that nobody watches is not.
    """

    __slots__ = ("__weakref__",)
    older: Life | None = None

    def __bool__(self) -> bool:
        return True


class _AnotherLife(Life):
    """For one more who watches at the same time."""

    __slots__ = ("older",)

    def __init__(self, older: Life) -> None:
        super().__init__(older)
        self.older = older


class StorageWatch(weakref.ref):  # type: ignore[type-arg]
    """What `watch_storage` gives: drop it, and nobody is told any more."""

    __slots__ = ("key",)
    key: int  # the storage's address; whoever watches sets it


def watch_storage(
    storage: Any, callback: Callable[[Any], object], kind: type[StorageWatch] = StorageWatch
) -> Any:
    """Call `callback(watch)` when a storage dies, whoever frees it, and before its address can be
    used again.

    The watch that it gives is of this kind: a `StorageWatch`, or a subclass with more slots.
    """
    if not storage.__dict__:
        life = storage.__dict__ = Life()
        return kind(life, callback)
    newest = newest_life(storage)
    if newest is None:  # it has attributes that somebody else has set
        newest = storage.__dict__ = Life(storage.__dict__)
    free: Life | None = newest
    while free is not None and weakref.getweakrefcount(free):
        free = free.older
    if free is None:
        free = storage.__dict__ = _AnotherLife(newest)
        newest.clear()
    return kind(free, callback)


def newest_life(storage: Any) -> Life | None:
    """The one that was given last to a storage that was ever watched."""
    attributes = storage.__dict__
    return attributes if isinstance(attributes, Life) else None
