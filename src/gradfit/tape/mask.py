"""Dropout's masks, kept in a quarter of their bytes.

On the CPU a mask is as wide as what it masks, though it holds nothing but zeros and ones when it is drawn; and drawing
it again is dear, a third of a matrix product. So a profile shows the drawing of a mask as two operations: one that
makes the bits, and one that makes the wide mask of them. A plan that keeps the bits need never draw them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradfit.tape.ops import OpInfo
from gradfit.tape.storage import fills_storage

MASK = "gradfit.mask"  # the operation that makes the bits, in profiles and plans


def draws_mask(info: OpInfo, results: list[Any]) -> bool:
    """Whether an operation is one that fills its tensor with zeros and ones, wider than they need to be."""
    return info.mask and len(results) == 1 and results[0].element_size() > 1 and fills_storage(results[0])


def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a mask's bits; returns the function that makes the mask of them."""
    bits, dtype = tensor.to(torch.bool).view(torch.uint8), tensor.dtype  # which widens four times faster than bool
    return lambda: bits.to(dtype)
