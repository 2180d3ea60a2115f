"""Dropout's masks, kept as bits: a thirty-second of their bytes.

On the CPU a mask is as wide as what it masks, though it holds nothing but zeros and ones when it is
drawn; and drawing it again is dear, a third of a matrix product. So a profile shows the drawing of
a mask as two operations: one that makes the bits, and one that makes the wide mask of them. A plan
that keeps the bits need never draw them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradfit.tape.operators import OpInfo
from gradfit.tape.storage import fills_storage

MASK = "gradfit.mask"  # the operation that makes the bits, in profiles and plans
# a word of eight bytes, each 0 or 1, times this has its eight bits in the highest byte
_GATHER = 0x0102040810204080


def draws_mask(info: OpInfo, results: list[Any]) -> bool:
    """Whether an operation is one that fills its tensor with zeros and ones, wider than they need
    to be.
    """
    return (
        info.mask
        and len(results) == 1
        and results[0].element_size() > 1
        and fills_storage(results[0])
    )


def packed_bytes(tensor: torch.Tensor) -> int:
    """What a mask's bits take."""
    return -(-tensor.numel() // 8)


def packing_bytes(tensor: torch.Tensor) -> int:
    """What making the bits, or a mask of them, takes beside both: a byte for each, in words."""
    return 8 * packed_bytes(tensor)


def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Copy a mask's bits; returns the function that makes the mask of them."""
    size, stride, dtype, count = tensor.size(), tensor.stride(), tensor.dtype, tensor.numel()
    narrow = torch.empty(packing_bytes(tensor), dtype=torch.bool, device=tensor.device)
    narrow[count:] = False
    narrow[:count].copy_(tensor.as_strided((count,), (1,)))  # in the order of memory
    bits = _gathered(narrow.view(torch.int64))
    return lambda: _spread(bits)[:count].to(dtype).as_strided(size, stride)


def _gathered(words: torch.Tensor) -> torch.Tensor:
    return words.mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def _all_words() -> torch.Tensor:
    """By its eight bits, each word."""
    cpu = torch.device("cpu")  # and not what torch.set_default_device says
    bits = torch.arange(256, device=cpu)[:, None] >> torch.arange(8, device=cpu) & 1
    words = bits.to(torch.uint8).view(torch.int64).flatten()
    return words[_gathered(words.clone()).argsort()]


_words = {torch.device("cpu"): _all_words()}


def _spread(bits: torch.Tensor) -> torch.Tensor:
    """A byte for each bit."""
    if bits.device not in _words:
        _words[bits.device] = _words[torch.device("cpu")].to(bits.device)
    return _words[bits.device].index_select(0, bits.to(torch.int32)).view(torch.uint8)
