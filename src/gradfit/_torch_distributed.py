"""The only file that touches private or version-dependent API of torch's DDP and FSDP2."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradfit._torch import is_out_of_memory
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
    return [one for one in gc.get_objects() if type(one) in wanted]


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be for a group's collectives: on the CPU if it can, else on the accelerator."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def all_gather_flat(output: Tensor, piece: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """Everybody's piece, one after the other; torch has renamed it."""
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
    return torch._C._distributed_c10d.TCPStore(host, port, is_master=hosts, multi_tenant=True)


# -- sharded tensors ---------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks; does not load torch's module for that if nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, without a graph."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This rank's part of a tensor that is spread over ranks, and where in the whole it begins; None for any other.

    Runs no operation on the whole: a step is saved where such are not to be seen.
    """
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spread: Any = tensor
    if any(type(one).__name__ == "_StridedShard" for one in spread.placements):
        raise StateError(
            f"A tensor of shape {tuple(tensor.shape)} is sharded by tensor parallelism and by fully_shard "
            f"({spread.placements}), which a state file cannot hold. Save it with torch.distributed.checkpoint."
        )
    _, offset = compute_local_shape_and_global_offset(spread.shape, spread.device_mesh, spread.placements)
    return local_part(tensor).detach(), tuple(int(at) for at in offset)


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


def broadcast_buffers(module: Any, rank: int) -> None:
    """Make all replicas' buffers those of one rank of the group."""
    with torch.no_grad():
        module._assign_modules_buffers()
        module._sync_module_buffers(rank)


def ddp_bucket_bytes(module: DistributedDataParallel) -> int:
    """What DDP's own communication buckets take: each gradient once, from its construction on."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in its storage without holes, in whatever order of the dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


def param_groups(module: Any) -> list[Any]:
    """The groups of parameters that one `fully_shard` unit gathers and reduces together."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def units_of(model: torch.nn.Module) -> list[Any]:
    """All groups of parameters of all `fully_shard` units of a model; does not load torch's module if nobody has."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return []
    return [group for one in model.modules() if isinstance(one, fsdp.FSDPModule) for group in param_groups(one)]


def is_unit(module: torch.nn.Module) -> bool:
    """Whether a module is a `fully_shard` unit."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def unit_bytes(unit: Any) -> int:
    """What a unit's full parameters take, padded as they are communicated, in the wider of the types involved."""
    return sum(
        kept.padded_sharded_param_size.numel()
        * shard_ranks(unit)
        * max(tensor.dtype.itemsize, (tensor.grad_dtype or tensor.dtype).itemsize)
        for tensor, kept in sharded_parameters(unit)
    )


def shard_ranks(unit: Any) -> int:
    """Over how many ranks a unit's parameters are sharded."""
    return int(getattr(unit.mesh_info, "shard_mesh_size", 1))


def gathered_tensors(units: list[Any]) -> list[Tensor]:
    """Full parameters and full gradients that are on this rank now, and are none of the model's."""
    full = [tensor for unit in units for kept in unit.fsdp_params for tensor in kept.all_gather_outputs]
    return full + gathered_gradients(units)


def gathered_gradients(units: list[Any]) -> list[Tensor]:
    """Full gradients that are on this rank now, not reduced yet."""
    found = [unsharded_gradient(kept) for unit in units for kept in unit.fsdp_params]
    return [gradient for gradient in found if gradient is not None]


def drop_gradients(model: torch.nn.Module) -> None:
    """Set all gradients to None, those that are not reduced yet, too."""
    for parameter in model.parameters():
        parameter.grad = None
    for unit in units_of(model):
        for kept in unit.fsdp_params:
            set_unsharded_gradient(kept, None)


def gradient_bytes(unit: Any) -> int:
    """What the gradients of a unit take once a backward has run: shards, or all of them where nothing is reduced."""
    total = 0
    for tensor, kept in sharded_parameters(unit):
        if tensor.requires_grad and unit.reduce_grads:
            total += local_part(tensor).numel() * (tensor.grad_dtype or tensor.dtype).itemsize
        elif tensor.requires_grad:
            wide = getattr(kept, "reduce_dtype", None) or getattr(kept, "param_dtype", None) or tensor.dtype
            total += tensor.numel() * wide.itemsize
    return total


_resize_ears: list[Callable[[Tensor], None]] = []
_resizers = [
    (f"torch.distributed.fsdp._fully_shard.{module}", name)
    for module in ("_fsdp_param", "_fsdp_param_group")
    for name in ("alloc_storage", "free_storage")
]
_original_resizers: dict[tuple[str, str], Any] = {}


def hear_resizes(ear: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `ear(tensor)` when FSDP2 has given a full parameter its memory, or taken it away; returns what ends that.

    It resizes storages, which is no operation: no dispatch mode sees it.
    """
    if not _resize_ears:
        for where, name in _resizers:
            call = getattr(sys.modules.get(where), name, None)
            if call is not None:
                _original_resizers[where, name] = call
                setattr(sys.modules[where], name, _telling_of_resizes(call))
    _resize_ears.append(ear)

    def end() -> None:
        _resize_ears.remove(ear)
        if not _resize_ears:
            for (where, name), call in _original_resizers.items():
                setattr(sys.modules[where], name, call)
            _original_resizers.clear()

    return end


def _telling_of_resizes(call: Any) -> Any:
    def telling(tensor: Tensor) -> None:
        call(tensor)
        for ear in tuple(_resize_ears):
            ear(tensor)

    return telling


def sharded_parameters(group: Any) -> list[tuple[Tensor, Any]]:
    """A group's parameters as the optimizer sees them, each with what FSDP2 keeps about it."""
    return [(one.sharded_param, one) for one in group.fsdp_params]


def data_parallel_group(group: Any) -> dist.ProcessGroup:
    """All processes over which a group's gradients are added up: those of the shards, and of their replicas."""
    mesh = group.mesh_info.mesh
    handle: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return handle


def set_reduces(group: Any, value: bool) -> bool:
    """Whether backward reduces this group's gradients by itself; gives what it was before."""
    before: bool = group.reduce_grads
    group.reduce_grads = value
    return before


def unsharded_gradient(kept: Any) -> Tensor | None:
    """The full gradient that adds up on this rank while nothing is reduced; it is not in the parameter's `.grad`."""
    if kept.unsharded_accumulated_grad is not None:
        gradient: Tensor | None = kept.unsharded_accumulated_grad
    else:
        gradient = kept._unsharded_param.grad if hasattr(kept, "_unsharded_param") else None
    return gradient


def set_unsharded_gradient(kept: Any, gradient: Tensor | None) -> None:
    """Put a full gradient where the next backward adds to it."""
    full = getattr(kept, "_unsharded_param", None)
    kept.unsharded_accumulated_grad = None
    if full is not None:
        full.grad = None
    if gradient is not None:
        if full is not None and full.dtype == gradient.dtype:
            full.grad = gradient
        else:
            kept.unsharded_accumulated_grad = gradient


def unsharded_parameter(kept: Any) -> Tensor | None:
    """The full parameter that autograd sees; None before the first forward."""
    return getattr(kept, "_unsharded_param", None)


def unsharded_size(kept: Any) -> torch.Size:
    """The full parameter's shape."""
    size: torch.Size = kept._orig_size
    return size


def accumulate_in(kept: Any, dtype: torch.dtype) -> None:
    """Add up this parameter's unreduced gradients in a wider type than its own."""
    kept.reduce_dtype = dtype


def reduce_group(group: Any, dtype: torch.dtype | None) -> None:
    """Run FSDP2's own reduction of what has added up, as a sum over the ranks, by the policy it was given.

    Every parameter of the group must have a full gradient, or none may: the ranks must reduce the same.
    """
    names = ("reduce_grads", "all_reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms")
    types = ("_orig_dtype", "_reduce_dtype")
    before = {name: getattr(group, name) for name in names + types}
    group.reduce_grads = group.all_reduce_grads = group.force_sum_reduction_for_comms = True
    group.gradient_divide_factor = 1.0
    if dtype is not None:
        group._orig_dtype = group._reduce_dtype = dtype
    state = group._training_state
    try:
        group.post_backward()
        group.finalize_backward()
        group.comm_ctx.reduce_scatter_states.clear()
    finally:
        group._training_state = state
        for name, value in before.items():
            setattr(group, name, value)


def initialise(modules: list[Any]) -> None:
    """What FSDP2 does at the first forward, for a rank that has not had one yet; outer modules come first."""
    for module in modules:
        module._get_fsdp_state()._lazy_init()


def forget_pass(modules: list[Any]) -> None:
    """Let FSDP2 forget a pass that failed half-way: parameters are sharded again, gradients stay as they are."""
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()


def never_gathered(unit: Any) -> bool:
    """Whether a unit's full parameters have never been here."""
    return not all(hasattr(kept, "_unsharded_param") for kept in unit.fsdp_params)


def take_part(unit: Any) -> None:
    """Gather a unit's parameters because other ranks do, and let go of them at once."""
    unit._to_sharded()  # one that was left unsharded would not gather
    unit.unshard()
    unit.wait_for_unshard()
    unit._to_sharded()


_Listeners = list[tuple["weakref.ref[Any]", int]]
_before_gather: weakref.WeakKeyDictionary[Any, _Listeners] = weakref.WeakKeyDictionary()


def before_gather(units: list[Any], listener: Any) -> None:
    """Call `listener.gathering(number)` before the unit of that number gathers its parameters, as long as both live."""
    for number, unit in enumerate(units):
        if unit not in _before_gather:
            _before_gather[unit] = []
            unit.unshard = _telling(weakref.ref(unit), type(unit).unshard)
        alive = [(one, at) for one, at in _before_gather[unit] if one() is not None]
        _before_gather[unit] = [*alive, (weakref.ref(listener), number)]


def _telling(reference: weakref.ref[Any], unshard: Any) -> Any:
    def telling(async_op: bool = False) -> None:
        unit = reference()
        if unit is None:
            return
        if unit._all_gather_result is None and not unit.is_unsharded:
            for listener, number in _before_gather[unit]:
                alive = listener()
                if alive is not None:
                    alive.gathering(number)
        try:
            unshard(unit, async_op)
        except RuntimeError as error:
            hearing = [alive for listener, _ in _before_gather[unit] if (alive := listener()) is not None]
            if not hearing or is_out_of_memory(error):
                raise
            raise hearing[0].failed(error) from error

    return telling
