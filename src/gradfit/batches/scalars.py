"""Single numbers of a forward pass that its graph does not hold: values of terms, and counts before
they were clamped.

Autograd's nodes say what a loss was divided by, but not what its terms were, and of
`mask.sum().clamp(min=1)` they have the result alone. So a forward that is only run to be read is
watched from above autograd, where each function's result still has its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfit._torch import let_go_of_graph, storage_key

_CLAMPS = {
    getattr(space, name)
    for space in (torch, Tensor)
    for name in ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")
    if hasattr(space, name)
}
# What gives the same number in another type or shape.
_SAME = {
    Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type,
    Tensor.detach, Tensor.clone, Tensor.squeeze, Tensor.unsqueeze, Tensor.view, Tensor.reshape,
    torch.squeeze, torch.reshape, torch.clone,
}  # fmt: skip


class Floor(NamedTuple):
    """A number that was clamped from below: what it was, what it became, and the least that it can
    become.
    """

    before: float
    after: float
    least: float = 0.0
    is_whole: bool = True
    """It was of a type for whole numbers."""


class _Clamped:
    """A call of a clamp before it is made; it may write over its argument."""

    def __init__(self, number: Any, args: Any, kwargs: Any) -> None:
        least = kwargs.get("min", args[1] if len(args) > 1 else None)
        self._before, self._is_whole = float(number), not number.is_floating_point()
        self._least = 0.0 if least is None else float(least)

    def floor(self, after: Tensor) -> Floor:
        return Floor(self._before, float(after), self._least, self._is_whole)


class ScalarReader(TorchFunctionMode):
    """Notes, of each result that is one number, its value by its node, and clamps of numbers
    without a graph.
    """

    def __init__(self) -> None:
        super().__init__()
        # by node; the keys keep the nodes' Python objects alive
        self._values: dict[Any, Tensor] = {}
        # by storage, which the tensor keeps alive
        self._floors: dict[int, tuple[Tensor, Floor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        floor_after = self._floor_after(func, args, kwargs)
        out = func(*args, **kwargs)
        if _is_number(out):
            self._note(out, floor_after)
        return out

    def _note(self, out: Tensor, floor_after: Callable[[Tensor], Floor] | None) -> None:
        if out.grad_fn is not None:
            self._values[out.grad_fn] = out.detach()
        elif floor_after is not None:
            self._floors[storage_key(out)] = out, floor_after(out)

    def _floor_after(self, func: Any, args: Any, kwargs: Any) -> Callable[[Tensor], Floor] | None:
        """How the result of a function that is about to be called will have been clamped; None if
        it is not, or has a graph that tells.
        """
        first = args[0] if args else None
        if not _is_number_without_graph(first):
            return None
        if func in _CLAMPS:
            return _Clamped(first, args, kwargs).floor
        floor = self.floor_of(first) if func in _SAME else None
        return None if floor is None else lambda _: floor

    def let_go(self) -> None:
        """Forget the numbers and their nodes, the last one first; nobody else holds the loss."""
        nodes = [*reversed(self._values)]
        self._values.clear()
        let_go_of_graph(nodes)

    def value_of(self, node: Any) -> float | None:
        """What the node's operation returned, if that was one number and was seen."""
        value = self._values.get(node)
        return None if value is None else float(value)

    def floor_of(self, number: Any) -> Floor | None:
        """How this very number was clamped, if it was and that was seen."""
        clamped = self._floors.get(storage_key(number)) if _is_number(number) else None
        return None if clamped is None else clamped[1]


def _is_number_without_graph(item: Any) -> bool:
    return isinstance(item, Tensor) and item.numel() == 1 and not item.requires_grad


def _is_number(item: Any) -> bool:
    """Whether it is a tensor of one number, with a storage."""
    return isinstance(item, Tensor) and item.layout is torch.strided and item.numel() == 1
