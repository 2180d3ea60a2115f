"""Operations that look at a tensor's shape and not at what is in it: replayed without the tensor.

On the CPU a dropout mask begins as `empty_like(x)`. Recorded as it was called, rebuilding the mask
would first rebuild `x`, with the matrix product that made it, only to ask for its size.
"""

from __future__ import annotations

from typing import Any

import torch

from gradfit.tape.operators import OpInfo, info_of
from gradfit.tape.storage import PLAIN

_aten = torch.ops.aten
_EMPTY = {"empty_like", "new_empty", "new_empty_strided"}
_FILLED = {
    "zeros_like": 0,
    "new_zeros": 0,
    "ones_like": 1,
    "new_ones": 1,
    "full_like": None,
    "new_full": None,
}
_RANDOM = {"rand_like": _aten.rand.generator, "randn_like": _aten.randn.generator}


def without_content(
    info: OpInfo, args: Any, kwargs: Any, out: Any
) -> tuple[OpInfo, Any, dict[str, Any]] | None:
    """An operator and arguments, no tensor among them, that make what `info` made; None if it read
    its arguments.
    """
    if not info.shape_only or not _is_plain(out):
        return None
    options = {"dtype": out.dtype, "device": out.device}
    name = info.shape_only
    if name in _EMPTY:
        return info_of(_aten.empty_strided.default), (out.size(), torch.Size(out.stride())), options
    if not _is_usual(out):
        return None
    if name in _RANDOM:
        # No generator: the device's own, unless replay has a private one to give, as it has on the
        # CPU.
        return info_of(_RANDOM[name]), (out.size(),), {"generator": None, **options}
    return info_of(_aten.full.default), (out.size(), _number_in(name, args, kwargs)), options


def _number_in(name: str, args: Any, kwargs: Any) -> Any:
    """What a constant tensor is filled with."""
    if _FILLED[name] is not None:
        return _FILLED[name]
    return kwargs["fill_value"] if "fill_value" in kwargs else args[-1]


def _is_plain(out: Any) -> bool:
    return type(out) in PLAIN and out.layout is torch.strided and not out.is_nested


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor of this size; a contiguous one's need not be
    where a size is 1.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.size()), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
