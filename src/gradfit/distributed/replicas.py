"""Replicas without a wrapper: a plain module on every rank, kept the same by the accumulator alone.

DDP adds nothing under an accumulator but its buckets, which take the gradients' memory once more,
and a wrapper that hides the model's attributes from its loss function. `gradfit train` leaves the
model as it is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradfit.accumulate.processes import AllParts, WindowOfProcess
from gradfit.distributed.ddp import BUCKET_BYTES, Replicated
from gradfit.distributed.process_group import Group

_groups: weakref.WeakKeyDictionary[torch.nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def replicate(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> torch.nn.Module:
    """Say that this model is a replica on every rank of the group, and give all of them rank 0's
    content.

    Accumulators made for its parameters from then on add up over the ranks. Call it on all ranks.
    """
    handle = dist.group.WORLD if group is None else group
    assert handle is not None
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, group=handle, group_src=0)
    _groups[model] = handle
    return model


def replicas_of(tensors: list[Tensor], window: WindowOfProcess) -> Replicas | None:
    """The replicas that hold these parameters, if any were declared."""
    wanted = {id(tensor) for tensor in tensors}
    for model, group in _groups.items():
        if wanted <= {id(parameter) for parameter in model.parameters()}:
            return Replicas(model, Group(group), window)
    return None


class Replicas(Replicated):
    """The processes of a declared replica; nobody has to be kept silent."""

    def __init__(self, model: torch.nn.Module, group: Group, window: WindowOfProcess) -> None:
        super().__init__([], group, window)
        self._model = weakref.ref(model)

    @property
    def reduce_bytes(self) -> int:  # type: ignore[override]
        model = self._model()
        parameters = () if model is None else model.parameters()
        return min(
            2 * BUCKET_BYTES,
            sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        )

    def reduce(self, window: Any, whole: AllParts, factor: float) -> float:
        model = self._model()
        if model is not None and whole.active and self.size > 1:
            # running statistics: those of the first rank that has seen data
            for buffer in model.buffers():
                dist.broadcast(buffer, group=self.group.handle, group_src=whole.active[0])
        return super().reduce(window, whole, factor)
