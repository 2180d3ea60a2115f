"""The only file that touches private or version-dependent API of torch's DDP and FSDP2."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]


def live_modules(kinds: tuple[type, ...]) -> list[Any]:
    """Every living object of these classes or their subclasses."""
    wanted: set[type] = set()
    queue = list(kinds)
    while queue:
        kind = queue.pop()
        wanted.add(kind)
        queue += [one for one in kind.__subclasses__() if one not in wanted]
    return [one for one in gc.get_objects() if type(one) in wanted]


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be for a group's collectives: on the CPU if it can, else on the accelerator."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def all_gather_flat(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> None:
    """Everybody's piece, one after the other; torch has renamed it."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, piece, group=group)


def group_name(group: dist.ProcessGroup) -> str:
    """What all processes call this group."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def default_store() -> Any:
    """The store through which the processes have found each other."""
    return dist.distributed_c10d._get_default_store()


# -- DDP ---------------------------------------------------------------------------------------------------------------

_DDP_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync", "_static_graph_delay_allreduce_enqueued")


def ddp_group(module: DistributedDataParallel) -> dist.ProcessGroup:
    """The processes that hold a replica."""
    group: dist.ProcessGroup = module.process_group
    return group


def silence_ddp(module: DistributedDataParallel) -> dict[str, Any]:
    """Let DDP's next forward prepare nothing to be communicated; gives the flags that were changed, as they were."""
    before = {name: getattr(module, name) for name in _DDP_FLAGS if hasattr(module, name)}
    module.require_backward_grad_sync = module.require_forward_param_sync = False
    if "_static_graph_delay_allreduce_enqueued" in before:
        module._static_graph_delay_allreduce_enqueued = True  # else the first backward reduces, silenced or not
    return before


def restore_flags(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Put flags back."""
    for name, value in before.items():
        setattr(module, name, value)


def broadcasts_buffers(module: DistributedDataParallel) -> bool:
    """Whether DDP would make all replicas' buffers (running statistics) the same before a forward."""
    return bool(module.forward_sync_buffers) and len(module.modules_buffers) > 0


def broadcast_buffers(module: DistributedDataParallel, rank: int) -> None:
    """Make all replicas' buffers those of one rank of the group."""
    with torch.no_grad():
        module._assign_modules_buffers()
        with torch.autograd._unsafe_preserve_version_counter(tuple(module.modules_buffers)):
            module._sync_module_buffers(rank)


def ddp_bucket_bytes(module: DistributedDataParallel) -> int:
    """What DDP's own communication buckets take: each gradient once, from its construction on."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in its storage without holes, in whatever order of the dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
