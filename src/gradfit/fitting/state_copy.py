"""Parameters, and what an optimizer holds for them, copied so that they can be put back.

There are some three entries for each parameter, so that no line of Python runs for each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor

from gradfit.fitting.tensor_copies import CopyLayout, TensorCopies

_ALONE = object()  # stands for the name of an entry that has none
# whose objects stay as they are: those of most settings
UNCHANGING = frozenset({bool, int, float, str, type(None)})


class StateCopy:
    """Some parameters and an optimizer's state, as they are now.

    Tensors of the state that the optimizer replaces are not kept: the budget has room for a copy,
    not for them beside it.

    Args:
        parameters: each once.
        states: the optimizer's, by parameter.
        layout: of the copies of earlier steps, which is brought up to date.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: MutableMapping[Any, Any],
        layout: CopyLayout | None = None,
    ) -> None:
        self._parameters, self._keys = parameters, [*states]
        named = [*states.values()]
        if set(map(type, named)) != {dict}:
            named = [one if isinstance(one, dict) else {_ALONE: one} for one in named]
        self._names: list[tuple[Any, ...]] = [*map(tuple, named)]
        values = [*chain.from_iterable(map(dict.values, named))]
        self._count, tensors = len(values), values
        # by position among the values: numbers and nests, which are few
        self._rest: dict[int, Any] = {}
        if set(map(type, values)) != {Tensor}:
            are_tensors = [*map(isinstance, values, repeat(Tensor))]
            tensors = [*compress(values, are_tensors)]
            self._rest = {at: copy_of(one) for at, one in enumerate(values) if not are_tensors[at]}
        self._copies = TensorCopies([*parameters, *tensors], layout)
        self._tensors = self._copies.tensors[len(parameters) :]

    def restore(self, states: MutableMapping[Any, Any]) -> None:
        """Put everything back into the parameters and `states`, which stays the same object: an
        optimizer that has entries by default needs its own.
        """
        contents = iter(self._copies.contents())
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(next(contents))
            values = iter(self._old_values(contents))
        old = [dict(zip(names, values, strict=False)) for names in self._names]
        states.clear()
        states.update((key, one.get(_ALONE, one)) for key, one in zip(self._keys, old, strict=True))

    def _old_values(self, contents: Iterator[Tensor]) -> list[Any]:
        """Of all entries, in their order; the tensors among them get their content back."""
        tensors = iter(self._tensors)
        return [
            self._rest[at] if at in self._rest else _with_content(next(tensors)(), next(contents))
            for at in range(self._count)
        ]


def copy_of(state: Any) -> Any:
    """A copy of a nest of dicts, its tensors included."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: copy_of(item) for name, item in state.items()}
    return copy.copy(state)


def _with_content(tensor: Tensor | None, content: Tensor) -> Tensor:
    """The tensor with its old content, if it is still there and of its old shape."""
    if tensor is None or (tensor.shape, tensor.dtype) != (content.shape, content.dtype):
        return content
    return tensor.copy_(content)
