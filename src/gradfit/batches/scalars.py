"""Single numbers of a forward pass that its graph does not hold: values of terms, and counts before
they were clamped.

Autograd's nodes say what a loss was divided by, but not what its terms were, and of
`mask.sum().clamp(min=1)` they have the result alone. So a forward that is only run to be read is
watched from above autograd, where each function's result still has its node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfit._torch import storage_key

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

    def floor(self, after: float) -> Floor:
        return Floor(self._before, after, self._least, self._is_whole)


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
        first = args[0] if args and isinstance(args[0], Tensor) and args[0].numel() == 1 else None
        constant = first is not None and not first.requires_grad
        floor = self.floor_of(first) if constant and func in _SAME else None
        clamped = _Clamped(first, args, kwargs) if constant and func in _CLAMPS else None
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.layout is torch.strided and out.numel() == 1:
            if out.grad_fn is not None:
                self._values[out.grad_fn] = out.detach()
            elif clamped is not None:
                self._floors[storage_key(out)] = out, clamped.floor(float(out))
            elif floor is not None:
                self._floors[storage_key(out)] = out, floor
        return out

    def value_of(self, node: Any) -> float | None:
        """What the node's operation returned, if that was one number and was seen."""
        value = self._values.get(node)
        return None if value is None else float(value)

    def floor_of(self, number: Any) -> Floor | None:
        """How this very number was clamped, if it was and that was seen."""
        if (
            not isinstance(number, Tensor)
            or number.numel() != 1
            or number.layout is not torch.strided
        ):
            return None
        known = self._floors.get(storage_key(number))
        return None if known is None else known[1]
