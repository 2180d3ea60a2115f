"""Who is told of the names that a model gives to its values (`gf.name`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

NameObserver = Callable[[torch.Tensor, str], object]


class _Observers(threading.local):
    def __init__(self) -> None:
        self.entered: list[NameObserver] = []  # in this thread


_observers = _Observers()


def note_name(tensor: torch.Tensor, name: str) -> None:
    """Tell whoever observes names in this thread."""
    for observer in _observers.entered:
        observer(tensor, name)


@contextlib.contextmanager
def observing_names(observer: NameObserver) -> Iterator[None]:
    """Inside, `observer` is told of each tensor that gets a name, and of the name."""
    _observers.entered = [*_observers.entered, observer]
    try:
        yield
    finally:
        _observers.entered = [one for one in _observers.entered if one is not observer]
