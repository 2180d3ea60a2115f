"""What an optimizer's step that fails has changed, put back: parameters, its state, its numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch

from gradfit._torch import is_out_of_memory
from gradfit.batches.model_tree import each_once
from gradfit.errors import StateError
from gradfit.fitting.tensor_copies import TensorCopies
from gradfit.fitting.write_watch import WriteWatch
from gradfit.tree import leaves


class UpdateSnapshot:
    """Around an optimizer's step: if it fails half-way, all that it changes is as before.

    Not `taken` where the copy does not fit into the budget, which is never broken for it. Then an
    operation for which memory runs out is tried once more by itself. If that fails, too, numbers
    and entries of the optimizer are put back, which take no room; but if a tensor was written to,
    `StateError` says so: a step that has half happened must not be repeated.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], optimizer: Any, *, taken: bool) -> None:
        self._optimizer, self._taken = optimizer, taken
        self._begun = False  # the copy is whole, and the optimizer may be at work
        self.done = False  # the optimizer has stepped: from here on nothing is taken back
        own = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        self._parameters: list[torch.Tensor] = each_once([*trained, *own])
        self._states = getattr(optimizer, "state", {})
        self._copies = TensorCopies()
        self._old_states: list[tuple[Any, Any]] = []
        self._old_groups: list[dict[str, Any]] = []
        self._old_numbers: dict[str, Any] = {}
        self._watch: WriteWatch | None = None

    def __enter__(self) -> None:
        groups = getattr(self._optimizer, "param_groups", ())
        self._old_groups = [
            _clone({k: v for k, v in group.items() if k != "params"}) for group in groups
        ]
        self._old_numbers = {
            k: v for k, v in vars(self._optimizer).items() if isinstance(v, int | float)
        }
        if self._taken:
            self._copy()
            self._begun = True
            return
        self._old_states = [(key, _same_tensors(state)) for key, state in self._states.items()]
        # Not only what is in `state`: some optimizers hold tensors as attributes.
        held = leaves([self._old_states, dict(vars(self._optimizer))])
        self._watch = WriteWatch(
            {id(tensor): tensor for tensor in (*self._parameters, *held)}.values()
        )
        self._watch.__enter__()

    def _copy(self) -> None:
        tensors = [*self._parameters]
        self._old_states = [(key, _marked(state, tensors)) for key, state in self._states.items()]
        self._copies = TensorCopies(tensors)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.done = kind is None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(kind, error, trace)
        if kind is not None and watch is not None and watch.wrote():
            what = (
                "Memory ran out in the optimizer's step"
                if is_out_of_memory(error)
                else "The optimizer's step failed"
            )
            raise StateError(
                f"{what} when it had changed some parameters, and the budget had no room for a copy"
                " to go back to. Load the last saved state, and raise `memory` or free some."
            ) from error
        if kind is not None:
            self._restore()
        self._begun = False
        self._copies, self._old_states, self._old_groups = TensorCopies(), [], []

    def undo(self) -> None:
        """Take back a step that was interrupted before it was `done`, wherever that was."""
        if self._begun and not self.done:
            self._restore()

    def _restore(self) -> None:
        contents = iter(self._copies.contents())
        old_states = self._old_states
        if self._taken:
            with torch.no_grad():
                for parameter in self._parameters:
                    parameter.copy_(next(contents))
                old_states = [(key, _filled(state, contents)) for key, state in old_states]
        # The dict stays the same object: an optimizer that has entries by default needs its own.
        self._states.clear()
        self._states.update(old_states)
        for group, old in zip(
            getattr(self._optimizer, "param_groups", ()), self._old_groups, strict=True
        ):
            group.update(old)
        vars(self._optimizer).update(self._old_numbers)


def _clone(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: _clone(item) for name, item in state.items()}
    return copy.copy(state)


_ALONE = object()  # stands for the name of a tensor beside which are others than tensors


class _Marks(NamedTuple):
    """Where some tensors were. Those that the optimizer replaces are not kept: the budget has no
    room for both.
    """

    names: tuple[Any, ...]
    tensors: list[weakref.ref[torch.Tensor]]


def _marked(state: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of a nest of dicts, with marks in the place of its tensors, which are added to
    `tensors`.
    """
    if not isinstance(state, dict):
        is_tensor = isinstance(state, torch.Tensor)
        return _marked({_ALONE: state}, tensors) if is_tensor else copy.copy(state)
    if all(map(isinstance, state.values(), repeat(torch.Tensor))):  # as most are: one look
        tensors.extend(state.values())
        return _Marks(tuple(state), [*map(weakref.ref, state.values())])
    return {name: _marked(item, tensors) for name, item in state.items()}


def _filled(state: Any, contents: Iterator[torch.Tensor]) -> Any:
    """The nest as it was: tensors that are still there get their content back."""
    if isinstance(state, _Marks):
        found = [_with_content(one(), next(contents)) for one in state.tensors]
        return found[0] if state.names == (_ALONE,) else dict(zip(state.names, found, strict=True))
    if isinstance(state, dict):
        return {name: _filled(item, contents) for name, item in state.items()}
    return state


def _with_content(tensor: torch.Tensor | None, content: torch.Tensor) -> torch.Tensor:
    if tensor is None or (tensor.shape, tensor.dtype) != (content.shape, content.dtype):
        return content
    return tensor.copy_(content)


def _same_tensors(state: Any) -> Any:
    """A copy of all but the tensors."""
    if isinstance(state, dict):
        return {name: _same_tensors(item) for name, item in state.items()}
    return state if isinstance(state, torch.Tensor) else copy.copy(state)
