"""The only file that touches private or version-dependent API of torch's process groups, sharded
tensors and DDP.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradfit.errors import StateError

__all__ = ["DistributedDataParallel"]


def live_modules(kinds: tuple[type, ...]) -> list[Any]:
    """Every living object of these classes or their subclasses."""
    wanted: set[type] = set()
    queue = list(kinds)
    while queue:
        kind = queue.pop()
        wanted.add(kind)
        below: list[type] = type.__subclasses__(kind)
        queue += [one for one in below if one not in wanted]
    # By type and not `isinstance`, which asks proxies for a `__class__` and so wakes them up.
    return [one for one in gc.get_objects() if type(one) in wanted]


def is_running() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be for a group's collectives: on the CPU if it can, else on the
    accelerator.
    """
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def all_gather_flat(
    output: Tensor, piece: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Everybody's piece, one after the other; torch has renamed it."""
    # torch 2.13 has both names
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output, piece, group=group, async_op=async_op)


def group_name(group: dist.ProcessGroup) -> str:
    """What all processes call this group."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def default_store() -> Any:
    """The store through which the processes have found each other."""
    return dist.distributed_c10d._get_default_store()


def tcp_store(host: str, port: int, hosts: bool) -> Any:
    """A store that processes on other machines can reach."""
    # With `multi_tenant` a process that has a server at that port already shares it.
    return torch._C._distributed_c10d.TCPStore(host, port, is_master=hosts, multi_tenant=True)


def flat_sharding_class() -> type | None:
    """`FullyShardedDataParallel`, the elder of torch's two ways to shard; None if nobody has loaded
    it.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    return None if module is None else module.FullyShardedDataParallel


# -- sharded tensors -----------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks; does not load torch's module for that if nobody
    has.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, without a graph."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This rank's part of a tensor that is spread over ranks, and where in the whole it begins;
    None for any other.

    Runs no operation on the whole: a step is saved where such are not to be seen.
    """
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread: Any = tensor
    if any(type(one).__name__ == "_StridedShard" for one in spread.placements):
        raise StateError(
            f"A tensor of shape {tuple(tensor.shape)} is sharded by tensor parallelism and by"
            f" fully_shard ({spread.placements}), which a state file cannot hold. Save it with"
            " torch.distributed.checkpoint."
        )
    _, offset = compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    return local_part(tensor).detach(), tuple(int(at) for at in offset)


# -- DDP -----------------------------------------------------------------------------------------

_DDP_FLAGS = (
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "_static_graph_delay_allreduce_enqueued",
)


def ddp_group(module: DistributedDataParallel) -> dist.ProcessGroup:
    """The processes that hold a replica."""
    group: dist.ProcessGroup = module.process_group
    return group


def silence_ddp(module: DistributedDataParallel) -> dict[str, Any]:
    """Let DDP's next forward prepare nothing to be communicated; gives the flags that were changed,
    as they were.
    """
    before = {name: getattr(module, name) for name in _DDP_FLAGS if hasattr(module, name)}
    module.require_backward_grad_sync = module.require_forward_param_sync = False
    if "_static_graph_delay_allreduce_enqueued" in before:
        # Else the first backward reduces, silenced or not (torch 2.13, `_DDPSink` in
        # torch/nn/parallel/distributed.py).
        module._static_graph_delay_allreduce_enqueued = True
    return before


def restore_flags(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Put flags back."""
    for name, value in before.items():
        setattr(module, name, value)


def communication_hooks(module: DistributedDataParallel) -> list[str]:
    """Names of what the user has told DDP to do in the place of its all-reduce."""
    return [getattr(hook, "__name__", repr(hook)) for hook, _ in module._comm_hooks]


def is_joining(module: DistributedDataParallel) -> bool:
    """Whether a `with model.join():` is entered."""
    return bool(module._join_config.enable)


def broadcasts_buffers(module: DistributedDataParallel) -> bool:
    """Whether DDP would make all replicas' buffers (running statistics) the same before a
    forward.
    """
    return bool(module.broadcast_buffers) and len(module.modules_buffers) > 0


def broadcast_buffers(module: Any, rank: int) -> None:
    """Make all replicas' buffers those of one rank of the group."""
    with torch.no_grad():
        module._assign_modules_buffers()
        module._sync_module_buffers(rank)


def ddp_bucket_bytes(module: DistributedDataParallel) -> int:
    """What DDP's own communication buckets take: each gradient once, from its construction on."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in its storage without holes, in whatever order of the
    dimensions.
    """
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
