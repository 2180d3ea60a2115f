"""Whoever wants to know of every operation that runs, beside the recorder: meters, profiles,
audits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gradfit._torch_listen import listening, thread_settings
from gradfit.tape import process_settings
from gradfit.tape.operators import view_names


class _EnteredListeners(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Any] = []  # of all listeners that are entered in this thread


_entered = _EnteredListeners()


class OperationListener:
    """Observes this thread's operators, below autograd, while it is entered; in a backward pass,
    the engine's threads too.

    Views need not be observed. What it runs itself is observed by those who were entered before.
    """

    about_fakes = False  # whether it is about fake tensors, which only dispatch modes learn of

    _looks_inside = False  # whether it is told of what runs inside of one operation

    def __init__(self) -> None:
        self._contexts: list[Any] = []

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)`, and return what it returned."""
        raise NotImplementedError

    def _begins_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Inside of one operation, another one is about to run."""

    def _made_inside(self, tensor: torch.Tensor) -> None:
        """Inside of one operation, a tensor was made."""

    def __enter__(self) -> Any:
        context = listening(
            self._observe,
            view_names,
            in_engine=True,
            as_mode=self.about_fakes,
            count=self if self._looks_inside else None,
        )
        try:
            process_settings.recording_begins(context)
            _entered.contexts.append(context)
            context.__enter__()
        except BaseException:
            _end(context)
            raise
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        context = self._contexts.pop()
        try:
            context.__exit__(*error)
        finally:
            _end(context)


def _end(context: Any) -> None:
    if context in _entered.contexts:
        _entered.contexts.remove(context)
    process_settings.recording_ends(context)


def _open_listeners() -> Callable[[], None]:
    count = len(_entered.contexts)

    def end_later_ones() -> None:
        for context in _entered.contexts[count:]:
            _end(context)

    return end_later_ones


thread_settings.append(_open_listeners)
