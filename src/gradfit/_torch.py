"""The only file that touches private or version-dependent torch API."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as _pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.optim.optimizer import (
    _foreach_supported_types,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from gradfit._torch_native import core

__all__ = ["FakeTensor", "FakeTensorMode"]

# (class, tensor): an alias without a graph that shares the version counter
make_alias = torch.Tensor._make_subclass
_plain_tensor = torch.Tensor

# The address of a tensor's StorageImpl, which views share. Not `data_ptr()`: that is 0 for every
# empty storage, and the same for two of one piece of memory (`from_numpy` of one array).
storage_key: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward pass
# whether the backward pass that runs now was called with `retain_graph`
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


# Operators that torch's own Python functions call with the very same arguments: those read their
# arguments in half the time that `OpOverload` takes. A test checks that each arrives at its
# operator.
_BINDINGS: dict[str, Any] = {
    "aten::" + name: getattr(torch, name.split(".")[0]) for name in ( "_log_softmax",
    "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "add.Tensor", "addmm", "baddbmm",
    "bmm", "cat", "clone", "convolution", "cos", "div.Tensor", "embedding", "empty_like", "exp",
    "mean.dim", "mm", "mul.Tensor", "native_batch_norm", "native_dropout", "native_group_norm",
    "native_layer_norm", "neg", "pow.Tensor_Scalar", "relu", "rsqrt", "sigmoid", "sin",
    "sub.Tensor", "sum.dim_IntList", "tanh", "where.self", ) } | { "aten::gelu": torch._C._nn.gelu,
    "aten::silu": torch._C._nn.silu, "aten::add_.Tensor": torch.Tensor.add_,
    "aten::bernoulli_.float": torch.Tensor.bernoulli_, "aten::mul_.Tensor": torch.Tensor.mul_,
    "aten::relu_": torch.Tensor.relu_,
}  # fmt: skip


def direct(op: Any) -> Any:
    """What does the work behind an operator's Python object."""
    if type(op) is not torch._ops.OpOverload:
        return op
    return _BINDINGS.get(op._name, op._op)


def is_operator(op: Any) -> bool:
    """Whether it has a schema: higher-order operators (`cond`, `flex_attention`) have none."""
    return isinstance(op, torch._ops.OpOverload)


def is_custom(op: Any) -> bool:
    """Whether it was made by `torch.library.custom_op`."""
    return op._name in torch._library.custom_ops.OPDEFS


# The tensor that one is a view of, as autograd sees it.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


# An alias without a graph that shares the version counter, made without passing through dispatch
# modes. Not a function of Python's: one is made for each parameter that is read.
detached: Callable[[torch.Tensor], torch.Tensor] = functools.partial(make_alias, _plain_tensor)


def as_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """The same as a tensor of a subclass that has no storage or dispatch of its own."""
    alias: torch.Tensor = make_alias(kind, tensor)
    return alias


# As they are when this is imported, outside of any operator: what a thread begins with.
_USUAL_INCLUDED = torch._C._dispatch_tls_local_include_set()
_USUAL_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


def detached_in_dispatch(tensor: torch.Tensor) -> torch.Tensor:
    """The same inside a `__torch_dispatch__`, where the keys that share version counters are
    switched off.
    """
    with torch._C._ForceDispatchKeyGuard(_USUAL_INCLUDED, _USUAL_EXCLUDED):
        return make_alias(_plain_tensor, tensor)


def current_node() -> Node | None:
    """The autograd node that is executing in this thread."""
    node: Node | None = torch._C._current_autograd_node()
    return node


def nodes_behind(loss: torch.Tensor) -> list[Any]:
    """Each node of a graph once, none before one that comes to it: as backward would run them."""
    seen: set[Any] = {loss.grad_fn} - {None}
    left = list(seen)
    while left:
        new = {one for one, _ in left.pop().next_functions if one is not None} - seen
        seen |= new
        left += new
    return sorted(seen, key=lambda node: -int(node._sequence_nr()))


def made_at(roots: Iterable[object]) -> int:
    """When the last of these tensors was made, among all of its thread; -1 for leaves."""
    return max((int(node._sequence_nr()) for node in _nodes_of(roots)), default=-1)


_MOST_LOOKED_AT = 2000  # nodes; long chains that Python has seen overflow the stack when freed


def comes_to_node_until(time: int, roots: Iterable[object]) -> bool:
    """Whether the graph of one of these tensors has a node that was made at that time or before;
    parameters are of no time. Goes down to the bottom first, and not through all of a large graph.
    """
    left = _nodes_of(roots)
    seen: set[Node] = set()
    while left and len(seen) < _MOST_LOOKED_AT:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if int(node._sequence_nr()) <= time:
            return True
        left += [one for one, _ in node.next_functions if one is not None]
    return False


def _nodes_of(roots: Iterable[object]) -> list[Any]:
    """What has made tensors; a `GradientEdge` names its node."""
    nodes = (getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in roots)
    return [node for node in nodes if node is not None]


def let_go_of_graph(nodes: list[Any]) -> None:
    """Free autograd's nodes one after the other, those that ran first in backward first; nobody
    else may hold the loss any more. Empties the list.

    A node that Python has seen is freed by its Python object, which frees the next one inside of
    itself: some 30,000 of them in a row overflow the stack, and the process dies (seen in torch
    2.13; nodes without Python objects are freed one by one). Where each is held by the list until
    those before it are gone, nothing is freed inside of anything.
    """
    nodes.reverse()
    while nodes:
        nodes.pop()


def forward_stack(node: Node) -> list[str]:
    """Who called the operation, as `torch.autograd.set_detect_anomaly(True)` notes it; else
    nothing.
    """
    notes: Any = node.metadata
    stack: list[str] = notes.get("traceback_", [])
    return stack


_FUNCTORCH = "torch._functorch"  # where torch.func lives, as its frames say


def inside_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, …) surrounds this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def times_called(module: torch.nn.Module) -> int:
    """How many calls of a module are running in this thread: Python's frames tell, also where
    Ctrl-C has ended one, of which torch tells no hook.
    """
    code, count = torch.nn.Module._call_impl.__code__, 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def inside_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation surrounds this call."""
    return forward_ad._current_level >= 0


def raised_by_swap_tensors(trace: Any) -> bool:
    """Whether torch raised in `torch.utils.swap_tensors`, which a module's conversion may use,
    too.
    """
    # It refuses tensors that anybody has weak references to, and its error is a plain RuntimeError
    # (torch 2.13, https://github.com/pytorch/pytorch/issues/187008).
    while trace is not None:
        if trace.tb_frame.f_code is torch.utils.swap_tensors.__code__:
            return True
        trace = trace.tb_next
    return False


def raised_by_functorch(trace: Any) -> bool:
    """Whether torch.func was the last to be called before torch raised."""
    for module in reversed(_modules_of(trace)):
        if module.startswith(_FUNCTORCH):
            return True
        if not module.startswith(("torch", "contextlib")):
            return False
    return False


def _modules_of(trace: Any) -> list[str]:
    """The names of the modules that a traceback goes through, the outermost first."""
    modules = []
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return modules


# What is above the recorder. Asked of torch's own guard and not written down: another version may
# have other keys for autograd.
with torch._C._AutoDispatchBelowAutograd():
    _UPPER_KEYS = torch._C._dispatch_tls_local_exclude_set()
for _name in dir(torch._C.DispatchKey):
    if _name.startswith("Autocast"):
        _UPPER_KEYS = _UPPER_KEYS | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))
# Replays are of a forward that ran outside of vmap, also where a backward pass runs inside
# (`is_grads_batched=True`).
for _name in ("VmapMode", "FuncTorchVmapMode"):
    _UPPER_KEYS = _UPPER_KEYS | torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_name))


def below_autograd() -> Any:
    """A context: operations run where the recorder heard them, below autograd and autocast; nothing
    is cast twice.

    torch's own object, whose end no interrupt can prevent: autograd would be off in this thread for
    good.
    """
    return torch._C._ExcludeDispatchKeyGuard(_UPPER_KEYS)


with torch._C._AutoDispatchBelowAutograd():
    _AUTOGRAD_KEYS = torch._C._dispatch_tls_local_exclude_set() - _USUAL_EXCLUDED


def with_autograd() -> Any:
    """A context: autograd is there, in a replay too."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS
    return torch._C._ForceDispatchKeyGuard(included, excluded)


# The CPU's allocator, and what allocates beside torch's own allocator on a device (a driver,
# cuBLAS, cuDNN), have no exception type of their own, only a text.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors share this one's storage, itself included."""
    storage = tensor.untyped_storage()
    # the Python object of the storage is one more
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """torch prints a traceback for each operator without a meta kernel, before it raises; the raise
    is enough.
    """
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# Whose fake kernels give a result no bytes that takes some: the workspace of oneDNN
# (torch 2.10 to 2.15, torch/_meta_registrations.py).
_FAKE_LEAVES_OUT = {torch.ops.aten.mkldnn_rnn_layer.default}


def output_bytes(func: Any, args: Any, kwargs: Any) -> int | None:
    """What an operator's new results will take, by fake tensors; None where they cannot tell."""
    if func in _FAKE_LEAVES_OUT:
        return None
    with _disable_current_modes(), _quiet(logging.getLogger("torch._subclasses.fake_tensor")):
        try:
            with FakeTensorMode():
                fake_args, fake_kwargs = tree_map(_unrelated_leaf, (args, kwargs))
                given = {storage_key(leaf) for leaf in _tensors((fake_args, fake_kwargs))}
                results = _tensors(func(*fake_args, **fake_kwargs))
                return sum(
                    r.untyped_storage().nbytes() for r in results if storage_key(r) not in given
                )
        except (
            Exception
        ):  # data-dependent shapes, operators without a meta kernel, layouts without a storage
            return None


def is_ragged(tensor: torch.Tensor) -> bool:
    """Whether it is a nested tensor of torch's first kind, which has no shape: asking for one
    raises, and inside of `as_nested_tensor` ends the process (seen on 2.13).
    """
    return tensor.is_nested and tensor.layout is torch.strided


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's shape; of a nested one without a shape, those of all its parts."""
    if is_ragged(tensor):
        return (tensor.dim(), *tensor._nested_tensor_size().flatten().tolist())
    return tensor.shape


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _unrelated_leaf(leaf: Any) -> Any:
    return _unrelated(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _unrelated(tensor: torch.Tensor) -> torch.Tensor:
    """Inside a fake mode, one of the same geometry.

    Not `mode.from_tensor`, after which the mode watches the real tensor's storage for as long as
    either lives.
    """
    kinds = (_plain_tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__)
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ not in kinds:
        raise NotImplementedError("it has no geometry of its own")
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def schema_of(op: Any) -> Any:
    """An operator's schema: its arguments, which of them it writes to, and what its results
    alias.
    """
    return op._schema


def selective_policy(context: Any) -> Any:
    """The policy function of a context made by
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    return context.policy_fn if isinstance(context, _CachingTorchDispatchMode) else None


def selective_context(output: Any) -> Any:
    """What such a policy function is asked with; torch 2.10 does not tell it what the operation
    returned.
    """
    from torch.utils.checkpoint import SelectiveCheckpointContext

    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output
    return context


def says_freed(error: RuntimeError) -> bool:
    """Whether torch refuses a second pass through a graph; it has no type of its own for that."""
    return type(error) is RuntimeError and "backward through the graph a second time" in str(error)


def has_freed_tensors(node: Node) -> bool:
    """Whether a backward pass has already taken what this operation saved."""
    # Nothing says it but an attempt: torch raises when what it gave back is read.
    names = ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_")))
    return any(_is_freed(node, name) for name in names)


def _is_freed(node: Node, name: str) -> bool:
    try:
        getattr(node, name, None)
    except RuntimeError as error:
        # torch has one type for "freed" and "changed in place", only the text differs
        return "freed" in str(error)
    return False


class RunningBackward(NamedTuple):
    """A call of the autograd engine: who differentiates what, and how."""

    thread: int
    """The thread that has called it; the engine may run parts of it in threads of its own."""
    roots: tuple[object, ...]
    retains_graph: bool
    accumulates: bool
    """`backward`, which adds to `.grad`; not `grad`, which gives gradients back."""
    nested: bool
    """The pass at hand runs inside of that call (reentrant checkpointing)."""


def running_backward() -> RunningBackward | None:
    """The outermost call of the autograd engine that this code runs under; None if that cannot be
    told.

    The engine says nothing about its caller, so the stacks are asked. On an accelerator hooks run
    in a thread of the engine's, and the caller waits in another one: it is the only thread that is
    in a backward pass, or nobody knows.
    """
    here = threading.get_ident()
    # Every call of the engine from Python goes through one function of torch's, whose frame has
    # the arguments: `_engine_run_backward` in torch/autograd/graph.py.
    calls = _engine_calls(sys._getframe(1))
    if calls and _is_python_thread(here):
        return _describe_call(here, calls[-1], nested=len(calls) > 1)
    frames = sys._current_frames()
    # A frame that holds itself would hold the caller's tensors until the next collection.
    frames.pop(here, None)
    waiting = [(thread, inside) for thread, top in frames.items() if (inside := _engine_calls(top))]
    if len(waiting) != 1:
        return None
    thread, others = waiting[0]
    return _describe_call(thread, others[-1], nested=bool(calls) or len(others) > 1)


def in_simple_backward(depth: int) -> bool:
    """Whether this code runs under one call of `backward()` in this thread, which is inside of no
    other call and does not keep its graph: the usual answers of `running_backward`, in one look.

    Args:
        depth: how many calls below the engine's its caller is. Frames of Python are made when they
            are looked at, so that those in between are passed over.
    """
    try:
        frame: Any = sys._getframe(depth + 1)
    except ValueError:  # a pass that no Python code has begun
        return False
    if frame.f_code is not _ENGINE_CALL:
        return False
    variables = frame.f_locals
    args = variables["args"]
    if len(args) < 2 or args[1] or not variables["kwargs"].get("accumulate_grad"):
        return False
    while (frame := frame.f_back) is not None:
        if frame.f_code is _ENGINE_CALL:
            return False
    return True


def is_torchs_own_step(optimizer: Any, own_hooks: tuple[str, ...]) -> bool:
    """Whether a step of an optimizer changes what torch's own optimizers change and nothing else:
    nobody has replaced `step`, but for a scheduler that notes the call, and no hooks run in it but
    those of functions of these names.
    """
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    replaced = vars(optimizer).get("step")
    noted = replaced is None or getattr(replaced, "_wrapped_by_lr_sched", False)
    hooks = [
        hook
        for kind in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        for hook in kind.values()
    ]
    return of_torch and noted and all(_name_of_function(hook) in own_hooks for hook in hooks)


# Those whose step treats each parameter by itself, with options that are its group's, as read in
# torch/optim of 2.10 to 2.15. Not LBFGS, which has one state for all.
_EACH_ALONE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop",
    "Rprop", "Adafactor", "Muon",
)  # fmt: skip


def steps_each_parameter_alone(optimizer: Any) -> bool:
    """Whether a step is one of torch's own that does to each parameter what it would do to it
    alone; hooks do not matter.
    """
    replaced = vars(optimizer).get("step")
    noted = replaced is None or getattr(replaced, "_wrapped_by_lr_sched", False)
    own = [getattr(torch.optim, name) for name in _EACH_ALONE if hasattr(torch.optim, name)]
    return noted and type(optimizer) in own


def add_innermost_hooks(
    optimizer: torch.optim.Optimizer,
    before: Callable[..., None],
    after: Callable[..., None],
) -> list[Any]:
    """Hooks of a step that run after all others before it, and before all others after it; gives
    the handles that remove them.
    """
    first = optimizer.register_step_pre_hook(before)
    last = optimizer.register_step_post_hook(after)
    hooks = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(last.id, last=False)
    return [first, last]


def _name_of_function(hook: Any) -> str:
    function = getattr(hook, "func", hook)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def hooks_after_accumulation(tensor: torch.Tensor) -> list[Any]:
    """The hooks of others than gradfit that run as soon as a gradient was added to `.grad`."""
    hooks: Any = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return [hook for hook in hooks.values() if not is_own_hook(hook)]


def is_own_hook(hook: Any) -> bool:
    """Whether it is gradfit's."""
    return (getattr(hook, "__module__", None) or "").startswith("gradfit.")


def threads_in_backward() -> set[int]:
    """The threads that have called the autograd engine and wait for it."""
    return {thread for thread, top in sys._current_frames().items() if _engine_calls(top)}


def _engine_calls(frame: Any) -> list[Any]:
    """The frames of a stack that call the engine, the innermost first."""
    calls = []
    while frame is not None:
        if frame.f_code is _ENGINE_CALL:
            calls.append(frame)
        frame = frame.f_back
    return calls


def _is_python_thread(number: int) -> bool:
    """Whether a thread was started in Python; the engine's have a stand-in at most."""
    if number == threading.main_thread().ident:
        return True
    threads = (one for one in threading.enumerate() if one.ident == number)
    return any(not isinstance(one, threading._DummyThread) for one in threads)


def _describe_call(thread: int, frame: Any, *, nested: bool) -> RunningBackward:
    variables = frame.f_locals
    args, kwargs = variables["args"], variables["kwargs"]
    return RunningBackward(
        thread=thread,
        roots=tuple(variables["t_outputs"]),
        retains_graph=bool(args[1]) if len(args) > 1 else False,
        accumulates=bool(kwargs.get("accumulate_grad", False)),
        nested=nested,
    )


def run_backward(loss: torch.Tensor, gradient: torch.Tensor, retain_graph: bool) -> None:
    """`loss.backward(gradient)` for a gradient that is known to fit: the checks in Python cost as
    much as a layer.
    """
    torch.autograd.graph._engine_run_backward(
        (loss,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


# Calls what it is given when the backward pass that is running now has ended without an error.
after_backward: Callable[[Callable[[], Any]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def after_accumulation(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Call `hook(tensor)` whenever autograd has added to `tensor.grad`."""
    handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def global_module_hooks() -> list[dict[int, Any]]:
    """The hooks that run before and after every module's passes, in all of the process."""
    modules: Any = torch.nn.modules.module
    return [
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
    ]


def before_accumulation(
    tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], Any]
) -> RemovableHandle:
    """Call `hook(gradient)` whenever autograd is about to add a gradient to `tensor.grad`; what it
    gives is added.

    `torch.autograd.grad` calls it, too. The handle can be removed at any time: torch goes through a
    copy of the hooks.
    """
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def copies_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Clones of all of them; of dense ones of a kind in one call, which is one kernel on an
    accelerator.
    """
    copies: list[torch.Tensor] = []
    kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor in tensors:
        if type(tensor) in _DENSE and tensor.layout is torch.strided:
            copies.append(torch.empty_like(tensor, requires_grad=False))
            to, source = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
            to.append(copies[-1])
            source.append(tensor)
        else:
            copies.append(tensor.detach().clone())
    with torch.no_grad():
        for to, source in kinds.values():
            torch._foreach_copy_(to, source)
    return copies


def flat_copy(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The content of dense tensors of one type, one after the other, in one piece of memory,
    without a graph.
    """
    native = core()
    copied = None if native is None else native.flat_copy(tensors)
    if copied is not None:
        return copied  # type: ignore[no-any-return]
    # as `torch.no_grad()`, whose six functions take as long as a dozen of the tensors
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
        # of a single tensor it may be a view
        return flat.clone() if len(tensors) == 1 else flat
    finally:
        torch._C._set_grad_enabled(before)


form_of: Callable[[torch.Tensor], tuple[torch.dtype, torch.Size]] = operator.attrgetter(
    "dtype", "shape"
)


def form_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the type and the shape that the one in its
    place has now. It holds none of them.

    What torch.compile asks before it runs code again (torch 2.13, `TensorGuards` in
    torch/csrc/dynamo/guards.cpp) asks a hundred tensors in one call. It looks at strides and
    devices, too.
    """
    try:
        guards: Any = torch._C._dynamo.guards
        same: Callable[..., bool] = guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[[*tensor.shape] for tensor in tensors],
            dynamic_dims_strides=[[*tensor.stride()] for tensor in tensors],
        ).check
    except (AttributeError, TypeError, RuntimeError):  # another torch, or tensors without strides
        forms = [*map(form_of, tensors)]
        return lambda *others: [*map(form_of, others)] == forms
    return same


_DENSE = (torch.Tensor, torch.nn.Parameter)


def norms_of(
    tensors: list[torch.Tensor], p: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The norm of each, in one call."""
    return list(torch._foreach_norm(tensors, p, dtype=dtype))


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply dense tensors by a number, in place, in one call."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def multiply_all_on_device(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """The same by a number that is on their device, in one call for each type."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in kinds.items():
        torch._foreach_mul_(alike, factor.to(dtype))


# how often it was changed in place
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def counted_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for one that was made under inference mode, where torch
    does not count, and refuses writes afterwards.
    """
    return 0 if tensor.is_inference() else tensor._version


def counted_writes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The same of many tensors: a batch may hold thousands, and is asked about in each pass."""
    try:
        return [*map(version_of, tensors)]
    except RuntimeError:  # there are some that were made under inference mode
        return [*map(counted_writes, tensors)]


gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("grad")
type_of: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")


def have_gradients(tensors: Iterable[torch.Tensor], gradients: Iterable[object]) -> bool:
    """Whether each tensor's `.grad` is that very object. No line of Python runs per tensor: this is
    asked twice per pass.
    """
    return all(map(operator.is_, map(gradient_of, tensors), gradients))


def have_no_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor has a `.grad`."""
    native = core()
    has_none = None if native is None else native.have_no_gradient(tensors)
    if has_none is None:
        return have_gradients(tensors, itertools.repeat(None))
    return bool(has_none)


_ENGINE_CALL = torch.autograd.graph._engine_run_backward.__code__


def sequence_number(node: Node) -> int:
    """When, in its thread, a node of the graph was made; leaves have the largest number of all."""
    return int(node._sequence_nr())


def last_sequence_number() -> int:
    """The number of the newest node of this thread; inside an operation, of the node that autograd
    made for it.
    """
    return int(torch._C._autograd._get_sequence_nr()) - 1


class SavedSlot:
    """One tensor that a node saved. `content` is the tensor, or what a hook packed it into; None
    once it is freed.
    """

    __slots__ = ("_raw", "name")

    def __init__(self, name: str, raw: Any) -> None:
        self.name, self._raw = name, raw

    @property
    def content(self) -> Any:
        return self._raw.data

    def release(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        """Give the tensor's memory back; `unpack` is what a later backward pass will call in its
        place.

        A leaf that was written to since, and is none any more, stays: torch refuses (2.13,
        `SavedVariable::save_metadata`), and a backward pass would be refused, too.
        """
        if isinstance(self._raw.data, torch.Tensor) and self._raw.unpack_hook is None:
            # under one, a saved Python number is not a tensor and torch loses its way
            with _disable_current_modes(), contextlib.suppress(RuntimeError):
                self._raw.register_hooks(lambda tensor: None, unpack)


_raw_names: dict[type, tuple[str, ...]] = {}


def saved_slots(node: Node) -> list[SavedSlot]:
    """What a node saved, without unpacking (and so without rebuilding) any of it."""
    kind = type(node)
    if kind not in _raw_names:
        _raw_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    slots = []
    # `_raw_saved_…` and not `_saved_…`, which unpacks, and so would run our own replay.
    for name in _raw_names[kind]:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a Python function's tensors, freed
            continue
        slots += _slots_of(name.removeprefix("_raw_saved_"), raw)
    return slots


def _slots_of(name: str, raw: Any) -> list[SavedSlot]:
    """One, or of a list of tensors one for each."""
    many = raw if isinstance(raw, tuple | list) else (raw,)
    if len(many) == 1:
        return [SavedSlot(name, many[0])]
    return [SavedSlot(f"{name}[{at}]", one) for at, one in enumerate(many)]


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    """The shapes of an operation's results: what its backward takes in."""
    return [tuple(int(size) for size in one.shape) for one in node._input_metadata]


# What a fake tensor cannot do: say what is in it (also where a result's size depends on that), or
# run an operator that nobody has written a fake kernel for. Each error has the operator in `func`.
NEEDS_CONTENT = (DataDependentOutputException, DynamicOutputShapeException)
NO_FAKE_KERNEL = UnsupportedOperatorException


# a context: leaves the fake mode that the caller is in, if any
outside_fake_mode = unset_fake_temporarily


def inside_fake_mode() -> bool:
    """Whether operations make fake tensors here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fake_mode() -> FakeTensorMode:
    """Tensors made inside have a shape, a type and a device, but no memory. Nothing is ever run for
    real.
    """
    # A fallback kernel would run the operator on real zeros; a model's constants and a user's
    # tensors come in as they are.
    return FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)


@contextlib.contextmanager
def optimizers_take_fakes_for_real() -> Iterator[None]:
    """torch's optimizers choose whether all parameters are updated in one call (`foreach`) as they
    do for real ones.

    Of a class that torch does not list, as that of fake tensors, each is updated alone, which has
    other temporaries (`_default_to_fused_or_foreach` in torch/optim/optimizer.py, 2.10 to 2.15).
    """
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def overloads_of(op: Any) -> Any:
    """The operator of which `op` is one overload; a higher-order one is its own."""
    return getattr(op, "overloadpacket", op)


def log_softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """The gradient of the input of a `log_softmax` over the last dimension, which gave `output`;
    written to `out`.

    torch 2.10 to 2.15 have it as this operator; its public form makes a new tensor.
    """
    torch.ops.aten._log_softmax_backward_data.out(gradient, output, -1, output.dtype, out=out)
    return out


# Below it, methods and functions of torch do not ask a subclass of Tensor what they mean.
without_torch_function = torch._C.DisableTorchFunctionSubclass


def tensor_without_storage(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of class `kind` that has a shape and no memory; the class says what operators do to
    it.
    """
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def map_nest(function: Any, nest: Any) -> Any:
    """The nest of arguments with `function` of each of its leaves."""
    return _pytree.tree_map(function, nest)


def leaves_of_nest(nest: Any) -> list[Any]:
    """What is in a nest of arguments."""
    return _pytree.tree_leaves(nest)


def saved_tensor(ctx: Any, at: int) -> torch.Tensor:
    """One of the tensors that an `autograd.Function` has saved; `ctx.saved_tensors` would unpack
    all of them. Seen in torch 2.10 to 2.15.
    """
    saved = ctx._raw_saved_tensors[at]
    tensor: torch.Tensor = (
        saved.data if saved.unpack_hook is None else saved.unpack_hook(saved.data)
    )
    return tensor


def inside_torch_checkpoint() -> bool:
    """Whether a forward runs that `torch.utils.checkpoint` will run again, or runs again now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
