"""The norm of many gradients taken as one vector, in a precision that can hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradfit._torch import norms_of
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
    return norm_of(norms_of_each(list(gradients), p), p)


def norm_of(norms: Sequence[Tensor], p: float = 2.0) -> Tensor:
    """The p-norm of parts whose norms these are."""
    if not norms:
        return torch.zeros((), device="cpu")
    widest = reduce(torch.promote_types, [one.dtype for one in norms])
    together = torch.stack([one.to(norms[0].device, widest) for one in norms])
    norm: Tensor = vector_norm(together, p)
    return norm


def norms_of_each(gradients: list[Tensor], p: float = 2.0) -> list[Tensor]:
    """The p-norm of each, where it is, in few calls."""
    if _in_one_call(gradients):
        return norms_of(gradients, p, _wide(gradients[0]))
    return [_norm(gradient, p) for gradient in gradients]


def _norm(gradient: Tensor, p: float) -> Tensor:
    norm: Tensor = vector_norm(values_of(gradient), p, dtype=_wide(gradient))
    # a DTensor's norm is over all ranks
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _wide(gradient: Tensor) -> torch.dtype | None:
    return torch.float32 if gradient.dtype in _NARROW else None


def _in_one_call(gradients: list[Tensor]) -> bool:
    """Dense ones of one kind on an accelerator, where each call is a kernel to launch."""
    kinds = {(one.device, one.dtype) for one in gradients}
    return len(kinds) == 1 and not gradients[0].is_cpu and all(map(_is_dense, gradients))


def _is_dense(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.layout is torch.strided
