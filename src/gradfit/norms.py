"""The norm of many gradients taken as one vector, in a precision that can hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradfit.errors import MisuseError

_NARROW = (torch.float16, torch.bfloat16)


def values_of(gradient: Tensor) -> Tensor:
    """The numbers a gradient holds: all of a dense one, the stored ones of a sparse one, the local
    ones of a shard.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def total_norm(gradients: Iterable[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of all gradients taken as one vector.

    float16 and bfloat16 are summed in float32: 65504² is beyond float16, and a norm that overflows
    clips everything to zero.
    """
    if math.isnan(p) or p <= 0:
        raise MisuseError(f"p={p!r} is not the order of a norm. Pass 2, 1 or float('inf').")
    norms: list[Tensor] = []
    for gradient in gradients:
        wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
        one = vector_norm(values_of(gradient), p, dtype=wide)
        # a DTensor's norm is over all ranks
        norms.append(one.full_tensor() if hasattr(one, "full_tensor") else one)
    if not norms:
        return torch.zeros((), device="cpu")
    widest = norms[0].dtype
    for one in norms[1:]:
        widest = torch.promote_types(widest, one.dtype)
    together = torch.stack([one.to(norms[0].device, widest) for one in norms])
    norm: Tensor = vector_norm(together, p)
    return norm
