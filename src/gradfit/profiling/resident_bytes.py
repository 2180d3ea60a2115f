"""Bytes on this rank that a step holds from its beginning to its end."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradfit import _torch_fsdp as fsdp
from gradfit._torch import storage_key
from gradfit.profiling.meter import tensors_in


def gradient_bytes(model: torch.nn.Module) -> int:
    """What the gradients take once all are there; of a sharded parameter what a backward leaves on
    this rank.

    >>> gradient_bytes(torch.nn.Linear(3, 2, dtype=torch.float32))
    32
    """
    units = fsdp.units_of(model)
    sharded = _sharded_ids(units)
    whole = [p for p in model.parameters() if p.requires_grad and id(p) not in sharded]
    return sum(map(whole_gradient_bytes, whole)) + sum(map(fsdp.gradient_bytes, units))


def _sharded_ids(units: Iterable[torch.nn.Module]) -> set[int]:
    return {id(tensor) for unit in units for tensor, _ in fsdp.sharded_parameters(unit)}


def whole_gradient_bytes(parameter: torch.Tensor) -> int:
    """What the gradient of a parameter that is not sharded takes."""
    return parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What these tensors take here, each storage once; of a sharded one this rank's part.

    >>> x = torch.zeros(4, dtype=torch.float64)
    >>> storage_bytes([x, x[1:]])
    32
    """
    parts = (part for tensor in tensors for part in tensors_in(tensor.detach()))
    return sum({storage_key(part): part.untyped_storage().nbytes() for part in parts}.values())
