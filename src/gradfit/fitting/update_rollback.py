"""What an optimizer's step that fails has changed, put back: parameters, its state, its numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from gradfit._torch import is_out_of_memory
from gradfit.batches.model_tree import joined
from gradfit.errors import StateError
from gradfit.fitting.state_copy import UNCHANGING, StateCopy, copy_of
from gradfit.fitting.tensor_copies import CopyLayout
from gradfit.fitting.write_watch import CountedWrites, WriteWatch, all_are_counted
from gradfit.tree import leaves

_parameters_of = itemgetter("params")
_is_trained = attrgetter("requires_grad")
_NUMBER = (int, float)
_KNOWN = {torch.Tensor, *UNCHANGING}


class UpdateSnapshot:
    """Around an optimizer's step: if it fails half-way, all that it changes is as before.

    Not `taken` where the copy does not fit into the budget, which is never broken for it. Then
    numbers and entries of the optimizer are put back, which take no room; but if a tensor was
    written to, `StateError` says so: a step that has half happened must not be repeated. Where
    writes must be heard (`write_watch.py`), an operation for which memory runs out is tried once
    more by itself before.

    Args:
        tensors: each once; those that are trained belong to it, beside the optimizer's own.
        optimizer: any object with `step`; `param_groups` and `state` are those of torch's.
        taken: whether there is room for a copy.
        layout: how the copies of earlier steps were made.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        optimizer: Any,
        *,
        taken: bool,
        layout: CopyLayout | None = None,
    ) -> None:
        self._optimizer, self._taken, self._layout = optimizer, taken, layout
        self._begun = False  # the copy is whole, and the optimizer may be at work
        self.done = False  # the optimizer has stepped: from here on nothing is taken back
        groups = getattr(optimizer, "param_groups", ())
        own = [*chain.from_iterable(map(_parameters_of, groups))]
        self._parameters: list[torch.Tensor] = joined([*filter(_is_trained, tensors)], own)
        self._states = getattr(optimizer, "state", {})
        self._copy: StateCopy | None = None
        self._old_states: list[tuple[Any, Any]] = []
        self._old_groups: list[dict[str, Any]] = []
        self._old_numbers: dict[str, Any] = {}
        self._watch: CountedWrites | WriteWatch | None = None

    def __enter__(self) -> None:
        groups = getattr(self._optimizer, "param_groups", ())
        self._old_groups = [_settings_of(group) for group in groups]
        self._old_numbers = _numbers_of(self._optimizer)
        if self._taken:
            self._copy = StateCopy(self._parameters, self._states, self._layout)
            self._begun = True
            return
        self._old_states = [(key, _same_tensors(state)) for key, state in self._states.items()]
        held = _tensors_of(self._optimizer)
        tensors = {id(tensor): tensor for tensor in (*self._parameters, *held)}.values()
        if all_are_counted(tensors, self._optimizer):
            self._watch = CountedWrites(tensors)
            return
        self._watch = WriteWatch(tensors)
        self._watch.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.done = kind is None
        watch, self._watch = self._watch, None
        if isinstance(watch, WriteWatch):
            watch.__exit__(kind, error, trace)
        if kind is not None:
            if watch is not None and watch.wrote():
                raise _half_stepped(error) from error
            self._restore()
        self._begun = False
        self._copy, self._old_states, self._old_groups = None, [], []

    def undo(self) -> None:
        """Take back a step that was interrupted before it was `done`, wherever that was."""
        if self._begun and not self.done:
            self._restore()

    def _restore(self) -> None:
        if self._copy is not None:
            self._copy.restore(self._states)
        else:
            self._states.clear()
            self._states.update(self._old_states)
        for group, old in zip(
            getattr(self._optimizer, "param_groups", ()), self._old_groups, strict=True
        ):
            group.update(old)
        vars(self._optimizer).update(self._old_numbers)


def _settings_of(group: dict[str, Any]) -> Any:
    """A copy of all but the parameters."""
    return {
        name: value if type(value) in UNCHANGING else copy_of(value)
        for name, value in group.items()
        if name != "params"
    }


def _numbers_of(optimizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, _NUMBER)}


def _tensors_of(optimizer: Any) -> Iterable[torch.Tensor]:
    """Those of its state; and of its attributes, which some hold beside it."""
    states = getattr(optimizer, "state", {})
    own = {name: one for name, one in vars(optimizer).items() if one is not states}
    plain = [state for state in states.values() if type(state) is dict]
    values = [*chain.from_iterable(map(dict.values, plain))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(plain) == len(states) and all(type(value) in _KNOWN for value in values):
        return chain(tensors, leaves(own))
    return leaves([states, own])


def _half_stepped(error: BaseException) -> StateError:
    what = (
        "Memory ran out in the optimizer's step"
        if is_out_of_memory(error)
        else "The optimizer's step failed"
    )
    return StateError(
        f"{what} when it had changed some parameters, and the budget had no room for a copy"
        " to go back to. Load the last saved state, and raise `memory` or free some."
    )


def _same_tensors(state: Any) -> Any:
    """A copy of all but the tensors."""
    if isinstance(state, dict):
        return {name: _same_tensors(item) for name, item in state.items()}
    return state if isinstance(state, torch.Tensor) else copy.copy(state)
