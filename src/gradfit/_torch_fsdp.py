"""The only file that touches private or version-dependent API of torch's FSDP2 (`fully_shard`)."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradfit._torch import is_out_of_memory, storage_owners
from gradfit._torch_distributed import local_part


def param_groups(module: Any) -> list[Any]:
    """The groups of parameters that one `fully_shard` unit gathers and reduces together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # one a module, up to torch 2.10
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def units_of(model: torch.nn.Module) -> list[Any]:
    """All groups of parameters of all `fully_shard` units of a model; does not load torch's module
    if nobody has.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return []
    return [
        group
        for one in model.modules()
        if isinstance(one, fsdp.FSDPModule)
        for group in param_groups(one)
    ]


def is_unit(module: torch.nn.Module) -> bool:
    """Whether a module is a `fully_shard` unit."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def unit_bytes(unit: Any) -> int:
    """What a unit's full parameters take, padded as they are communicated, in the wider of the
    types involved.
    """
    return sum(
        kept.padded_sharded_param_size.numel()
        * shard_ranks(unit)
        * max(tensor.dtype.itemsize, (tensor.grad_dtype or tensor.dtype).itemsize)
        for tensor, kept in sharded_parameters(unit)
    )


def shard_ranks(unit: Any) -> int:
    """Over how many ranks a unit's parameters are sharded."""
    return int(getattr(unit.mesh_info, "shard_mesh_size", 1))


def gathered_into(module: Any) -> list[Tensor]:
    """Where a unit puts its full parameters whenever it gathers them; they have no memory in
    between.
    """
    return _full_parameters(param_groups(module))


def _full_parameters(units: list[Any]) -> list[Tensor]:
    return [
        tensor for unit in units for kept in unit.fsdp_params for tensor in kept.all_gather_outputs
    ]


def gathered_tensors(units: list[Any]) -> list[Tensor]:
    """Full parameters and full gradients that are on this rank now, and are none of the model's."""
    return _full_parameters(units) + gathered_gradients(units)


def gathered_gradients(units: list[Any]) -> list[Tensor]:
    """Full gradients that are on this rank now, not reduced yet."""
    gradients = [unsharded_gradient(kept) for unit in units for kept in unit.fsdp_params]
    return [gradient for gradient in gradients if gradient is not None]


def final_gradients(units: list[Any]) -> list[Tensor]:
    """Of these, those that stay as they are: where nothing is reduced, in the type that they add up
    in.
    """
    kept = [one for unit in units if not unit.reduce_grads for one in unit.fsdp_params]
    pairs = [(one.reduce_dtype, unsharded_gradient(one)) for one in kept]
    return [
        gradient
        for wide, gradient in pairs
        if gradient is not None and wide in (None, gradient.dtype)
    ]


def drop_gradients(model: torch.nn.Module) -> None:
    """Set all gradients to None, those that are not reduced yet, too."""
    for parameter in model.parameters():
        parameter.grad = None
    for unit in units_of(model):
        for kept in unit.fsdp_params:
            set_unsharded_gradient(kept, None)


def gradient_bytes(unit: Any) -> int:
    """What the gradients of a unit take once a backward has run: shards, or all of them where
    nothing is reduced.
    """
    trained = [(tensor, kept) for tensor, kept in sharded_parameters(unit) if tensor.requires_grad]
    if unit.reduce_grads:
        return sum(
            local_part(tensor).numel() * (tensor.grad_dtype or tensor.dtype).itemsize
            for tensor, _ in trained
        )
    return sum(tensor.numel() * _unreduced_dtype(tensor, kept).itemsize for tensor, kept in trained)


def _unreduced_dtype(tensor: Tensor, kept: Any) -> torch.dtype:
    """The type in which gradients add up that are not reduced yet."""
    wide = getattr(kept, "reduce_dtype", None) or getattr(kept, "param_dtype", None)
    return wide or tensor.dtype


_resize_lock = threading.RLock()  # a meter in one thread may begin while one in another ends
_resize_observers: list[Callable[[Tensor], None]] = []
# Where they are called: the second module imports from the first by name, so each has its own.
_resizers = [
    (f"torch.distributed.fsdp._fully_shard.{module}", name)
    for module in ("_fsdp_param", "_fsdp_param_group")
    for name in ("alloc_storage", "free_storage")
]
_original_resizers: dict[tuple[str, str], Any] = {}


def observe_resizes(observer: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call `observer(tensor)` when FSDP2 has given a full parameter its memory, or taken it away;
    returns what ends that.

    It resizes storages, which is no operation: no dispatch mode sees it.
    """
    with _resize_lock:
        if not _resize_observers:
            _replace_resizers()
        _resize_observers.append(observer)
    return partial(_end_observing, observer)


def _end_observing(observer: Callable[[Tensor], None]) -> None:
    with _resize_lock:
        _resize_observers.remove(observer)
        if not _resize_observers:
            for (where, name), call in _original_resizers.items():
                setattr(sys.modules[where], name, call)
            _original_resizers.clear()


def _replace_resizers() -> None:
    for where, name in _resizers:
        call = getattr(sys.modules.get(where), name, None)
        if call is not None:
            _original_resizers[where, name] = call
            setattr(sys.modules[where], name, _telling_of_resizes(call))


def _telling_of_resizes(call: Any) -> Any:
    def telling(tensor: Tensor) -> None:
        call(tensor)
        for observer in tuple(_resize_observers):
            observer(tensor)

    return telling


def sharded_parameters(group: Any) -> list[tuple[Tensor, Any]]:
    """A group's parameters as the optimizer sees them, each with what FSDP2 keeps about it."""
    return [(one.sharded_param, one) for one in group.fsdp_params]


def data_parallel_group(group: Any) -> dist.ProcessGroup:
    """All processes over which a group's gradients are added up: those of the shards, and of their
    replicas.
    """
    mesh = group.mesh_info.mesh
    # Two dimensions: shards, and replicas of them (HSDP). Both together are a mesh of their own.
    handle: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return handle


def set_reduces(group: Any, value: bool) -> bool:
    """Whether backward reduces this group's gradients by itself; gives what it was before."""
    before: bool = group.reduce_grads
    group.reduce_grads = value
    return before


# Gradients of a state that was loaded before the first gather: torch 2.15 has no other place for
# them than the full parameter, which is not there yet.
_before_first_gather: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()


def unsharded_gradient(kept: Any) -> Tensor | None:
    """The full gradient that adds up on this rank while nothing is reduced; it is not in the
    parameter's `.grad`.
    """
    if kept in _before_first_gather:
        return _before_first_gather[kept]
    if kept.unsharded_accumulated_grad is not None:
        gradient: Tensor | None = kept.unsharded_accumulated_grad
    else:
        gradient = kept._unsharded_param.grad if hasattr(kept, "_unsharded_param") else None
    return gradient


def set_unsharded_gradient(kept: Any, gradient: Tensor | None) -> None:
    """Put a full gradient where the next backward adds to it."""
    _before_first_gather.pop(kept, None)
    full = getattr(kept, "_unsharded_param", None)
    owns_gradient = _full_parameter_owns_gradient(kept)
    if full is not None:
        full.grad = None
    if not owns_gradient:
        kept.unsharded_accumulated_grad = None
    if gradient is None:
        return
    if full is not None and owns_gradient:
        _set_gradient_of_any_type(full, gradient)
    elif full is not None and full.dtype == gradient.dtype:
        full.grad = gradient
    elif not owns_gradient:
        kept.unsharded_accumulated_grad = gradient
    else:
        _before_first_gather[kept] = gradient


def hand_over_gradient(kept: Any) -> None:
    """After the first gather: the full parameter gets the gradient that was there before it."""
    full = unsharded_parameter(kept)
    if kept in _before_first_gather and full is not None:
        _set_gradient_of_any_type(full, _before_first_gather[kept])
        del _before_first_gather[kept]


def _set_gradient_of_any_type(full: Any, gradient: Tensor) -> None:
    if full.grad_dtype not in (None, gradient.dtype):
        full.grad_dtype = gradient.dtype
    full.grad = gradient


def _full_parameter_owns_gradient(kept: Any) -> bool:
    """Whether gradients of every type add up in the full parameter's `.grad`, as in torch 2.15.

    Before, those of another type than the parameter's were in an attribute of their own.
    """
    return isinstance(getattr(type(kept), "unsharded_accumulated_grad", None), property)


def unsharded_parameter(kept: Any) -> Tensor | None:
    """The full parameter that autograd sees; None before the first forward."""
    return getattr(kept, "_unsharded_param", None)


def unsharded_size(kept: Any) -> torch.Size:
    """The full parameter's shape."""
    size: torch.Size = kept._orig_size
    return size


def accumulate_in(kept: Any, dtype: torch.dtype) -> None:
    """Add up this parameter's unreduced gradients in a wider type than its own."""
    # `fully_shard` does not hand on what a parameter's `grad_dtype` says
    # (https://github.com/pytorch/pytorch/issues/170648).
    kept.reduce_dtype = dtype
    full = unsharded_parameter(kept)
    if (
        _full_parameter_owns_gradient(kept)
        and full is not None
        and full.grad_dtype not in (None, dtype)
    ):
        gradient, full.grad = full.grad, None
        full.grad_dtype = dtype
        full.grad = None if gradient is None else gradient.to(dtype)


def reduce_group(group: Any, dtype: torch.dtype | None) -> None:
    """Run FSDP2's own reduction of what has added up, as a sum over the ranks, by the policy it was
    given.

    Every parameter of the group must have a full gradient, or none may: the ranks must reduce the
    same.
    """
    with _attributes_restored(group, _REDUCTION_FLAGS, _type_attributes(group)) as type_attributes:
        # A sum and no mean: each rank has multiplied its part by its share of the whole.
        group.reduce_grads = group.all_reduce_grads = group.force_sum_reduction_for_comms = True
        group.gradient_divide_factor = 1.0
        for owner, name in type_attributes if dtype is not None else ():
            setattr(owner, name, dtype)
        state = group._training_state
        try:
            group.post_backward()
            group.finalize_backward()
            _drop_reduced_inputs(group.comm_ctx)
        finally:
            group._training_state = state
    for tensor, _ in sharded_parameters(group):
        if _is_described_wrongly(tensor.grad):
            tensor.grad = _of_its_own_type(tensor.grad)


_REDUCTION_FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
)
_Attributes = list[tuple[Any, str]]


def _type_attributes(group: Any) -> _Attributes:
    """Where FSDP2 has the types that it reduces in."""
    types = [(group, "_orig_dtype"), (group, "_reduce_dtype")]
    # in place of `_orig_dtype`, in torch 2.15
    types += [(kept, "sharded_grad_dtype") for kept in group.fsdp_params]
    return [(owner, name) for owner, name in types if hasattr(owner, name)]


@contextmanager
def _attributes_restored(
    group: Any, names: Iterable[str], others: _Attributes
) -> Iterator[_Attributes]:
    """Afterwards these attributes of the group, and the others, are as they were."""
    changed = [(group, name) for name in names] + others
    before = [(owner, name, getattr(owner, name)) for owner, name in changed]
    try:
        yield others
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _drop_reduced_inputs(communication: Any) -> None:
    """Wait for the reduction, and let go of what was reduced, which FSDP2 holds until its next
    one.
    """
    # torch 2.15 does not wait for its own
    events = getattr(communication, "_last_post_reduce_events", {})
    for event in events.values():
        communication.device_handle.current_stream().wait_event(event)
    events.clear()
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None  # up to torch 2.10


def _is_described_wrongly(gradient: Any) -> bool:
    return gradient is not None and gradient._spec.tensor_meta.dtype != gradient.dtype


def _of_its_own_type(gradient: Any) -> Tensor:
    """FSDP2 describes every gradient as if it had its parameter's type, which optimizers stumble
    over.
    """
    # torch 2.13 gives it the parameter's `_sharding_spec`
    # (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    shape, stride = gradient.shape, gradient.stride()
    typed: Tensor = type(gradient).from_local(
        gradient._local_tensor,
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return typed


def initialise(modules: list[Any]) -> None:
    """What FSDP2 does at the first forward, for a rank that has not had one yet; outer modules come
    first.
    """
    for module in modules:
        module._get_fsdp_state()._lazy_init()


def forget_pass(modules: list[Any]) -> None:
    """Let FSDP2 forget a pass that failed half-way: parameters are sharded again, gradients stay as
    they are.
    """
    for module in modules:
        state = module._get_fsdp_state()
        # The root does it for all: `_reset_iter_state` refuses to be called on any other.
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
        elif state._is_root:
            _forget_pass_of(state)


def _forget_pass_of(root: Any) -> None:
    """What `_reset_iter_state` does in later versions; torch 2.10 has no such function."""
    communication, context = root._comm_ctx, root._state_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        _wait_for(getattr(communication, name), root._device_handle)
        setattr(communication, name, None)
    communication.post_forward_order.clear()
    idle = type(root._training_state).IDLE
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        if state._fsdp_param_group is not None:
            _forget_pass_of_group(state._fsdp_param_group, idle)
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _wait_for(under_way: Any, device_handle: Any) -> None:
    if under_way is not None and under_way.event is not None:
        device_handle.current_stream().wait_event(under_way.event)


def _forget_pass_of_group(group: Any, idle: Any) -> None:
    group.finalize_backward()  # waits for what this group communicates
    group._partial_reduce_output = None
    group._training_state = idle
    group._to_sharded()


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
    """Call `listener.gathering(number)` before the unit of that number gathers its parameters, as
    long as both live.
    """
    for number, unit in enumerate(units):
        if unit not in _before_gather:
            _before_gather[unit] = []
            # On the instance, and by a weak reference: a method of it that holds it is a cycle.
            unit.unshard = _telling(weakref.ref(unit), type(unit).unshard)
        alive = [(one, at) for one, at in _before_gather[unit] if one() is not None]
        _before_gather[unit] = [*alive, (weakref.ref(listener), number)]


def _telling(reference: weakref.ref[Any], unshard: Any) -> Any:
    def telling(async_op: bool = False) -> None:
        unit = reference()
        if unit is not None:
            _tell_of_gather(unit)
            _unshard_or_explain(unit, unshard, async_op)
            _let_go(unit._all_gather_result)

    return telling


def _listeners_of(unit: Any) -> list[tuple[Any, int]]:
    """Those that are alive, each with its number for the unit."""
    listeners = [(reference(), number) for reference, number in _before_gather[unit]]
    return [(listener, number) for listener, number in listeners if listener is not None]


def _tell_of_gather(unit: Any) -> None:
    if unit._all_gather_result is None and not unit.is_unsharded:
        for listener, number in _listeners_of(unit):
            listener.gathering(number)


def _unshard_or_explain(unit: Any, unshard: Any, async_op: bool) -> None:
    try:
        unshard(unit, async_op)
    except RuntimeError as error:
        listeners = _listeners_of(unit)
        if not listeners or is_out_of_memory(error):
            raise
        raise listeners[0][0].failed(error) from error


def _let_go(gathered: Any) -> None:
    """Wait until the thread that has communicated lets go of its tensors; gloo's waits for the
    interpreter to do so.

    Until then memory that FSDP2 frees is not free, and the peak of a step would depend on the
    scheduler.
    """
    if gathered is None or not _is_done_on_cpu(gathered):
        return
    end = time.monotonic() + 0.01  # at most: whoever else holds it may do so for good
    while storage_owners(gathered.all_gather_output) > 1 and time.monotonic() < end:
        time.sleep(0)


def _is_done_on_cpu(gathered: Any) -> bool:
    return gathered.all_gather_work is None and gathered.all_gather_output.device.type == "cpu"
