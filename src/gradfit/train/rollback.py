"""What a failed attempt changed, put back: buffers and generators, and the parameters if the update itself failed."""

from __future__ import annotations

import copy
from typing import Any

import torch

from gradfit.profiling.state import Generators


class Snapshot:
    """Buffers and generators as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._live = dict(model.named_buffers())
        self.buffers = {name: buffer.detach().clone() for name, buffer in self._live.items()}
        self._generators = Generators()

    def restore(self) -> None:
        with torch.no_grad():
            for name, buffer in self._live.items():
                buffer.copy_(self.buffers[name])
        self._generators.restore()


class UpdateSnapshot:
    """Around an optimizer's step: if it fails half-way, parameters and state are as before it.

    Not `taken` where the copy does not fit into the budget, which is never broken for it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, taken: bool) -> None:
        self._taken = taken
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._states = getattr(optimizer, "state", {})
        self._copies: list[torch.Tensor] = []
        self._old_states: dict[Any, Any] = {}

    def __enter__(self) -> None:
        if self._taken:
            self._copies = [parameter.detach().clone() for parameter in self._parameters]
            self._old_states = {key: _clone(state) for key, state in self._states.items()}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._taken and kind is not None:
            with torch.no_grad():
                for parameter, content in zip(self._parameters, self._copies, strict=True):
                    parameter.copy_(content)
            for key in list(self._states):
                if key in self._old_states:
                    self._states[key] = self._old_states[key]
                else:
                    del self._states[key]
        self._copies, self._old_states = [], {}


def _clone(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _clone(item) for name, item in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else copy.copy(state)
