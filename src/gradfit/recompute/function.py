"""Functions on scopes: `checkpoint` and `checkpoint_sequential` as torch has them, `chunked`, and
marks on tensors.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gradfit._torch import selective_context, selective_policy, storage_key
from gradfit._torch_listen import untraced
from gradfit._torch_storage import StorageWatch, watch_storage
from gradfit.arguments import (
    invalid,
    read_callable,
    read_choice,
    read_count,
    read_flag,
    read_list,
    read_tensor,
)
from gradfit.errors import MisuseError
from gradfit.recompute.scope import CheckpointScope, KeepOperation, current_recorder, inside_scope
from gradfit.tree import join_chunks, leaves, map_tensors, size_of_batch, split_batch

T = TypeVar("T")


@untraced
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> T:
    """Call `function` and rebuild its activations in the backward pass:
    `torch.utils.checkpoint.checkpoint`, exact.

    Takes torch's arguments, so that replacing the import is enough. Replaying operations makes four
    of them moot: `use_reentrant` (there is one way), `preserve_rng_state` (it always is),
    `early_stop` (only what is needed is replayed), and `determinism_check` with `debug` (the same
    operations are replayed; `gf.audit` compares values). Of `context_fn`, a selective policy
    decides what is kept, asked once for each operation, as torch asks it; other contexts are
    entered around the forward and around each replay, of which one backward pass may need several.

    Args:
        function: called once, with `args` and `kwargs`.
        args: of the function.
        use_reentrant: moot: there is one way.
        context_fn: gives two contexts, for the forward and for replays, as in torch.
        determinism_check: moot; "default" or "none".
        debug: moot.
        early_stop: moot: only what is needed is replayed.
        preserve_rng_state: moot: random numbers are always the same.
        kwargs: of the function. One more is `keep`, as of `CheckpointScope`, unless the function
            takes an argument of that name.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(lambda t: (t * 2).exp(), x).sum().backward()
    """
    keep = _take_keep(function, kwargs) if "keep" in kwargs else None
    _check_function(function, None if kwargs else len(args))
    if (
        use_reentrant is not None
        or preserve_rng_state is not True
        or debug is not False
        or early_stop is not True
        or determinism_check != "default"
    ):
        _check_switches(use_reentrant, preserve_rng_state, debug=debug, early_stop=early_stop)
        read_choice(determinism_check, "determinism_check", ("default", "none"))
    scope = CheckpointScope(_name_of(function), keep=keep)
    if context_fn is None:
        with scope:
            return function(*args, **kwargs)
    read_callable(context_fn, "context_fn", _CONTEXTS, arguments=0)
    around = _put_contexts_around(scope, *_contexts(context_fn))
    with scope, _Around(around):
        return function(*args, **kwargs)


def _take_keep(function: Any, kwargs: dict[str, Any]) -> Any:
    """Take `keep` out of the arguments where torch's checkpoint could not hand it to the function;
    None if it is the function's own.
    """
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # a builtin, which has no such argument
        return kwargs.pop("keep")
    if "keep" in parameters:
        return None
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        raise MisuseError(
            f"keep={kwargs['keep']!r} may be checkpoint's, or one of the function's **arguments."
            " Use `with CheckpointScope(name, keep=...):`, or pass functools.partial(function,"
            " keep=...)."
        )
    return kwargs.pop("keep")


def _put_contexts_around(scope: CheckpointScope, around: Any, replaying: Any) -> Any:
    """Have a scope do what torch's two contexts say; gives the one to enter around the forward."""
    policy = selective_policy(around)
    if policy is not None:
        scope.keep_operation = _as_keep_operation(policy)
        return contextlib.nullcontext()
    if not isinstance(replaying, contextlib.nullcontext):
        scope.replay_context = lambda: _Around(replaying)
    return around


def checkpoint_sequential(
    functions: Sequence[Callable[..., Any]] | torch.nn.Sequential,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
) -> Any:
    """Run a chain of modules in `segments` scopes; the last one is kept, as in torch.

    Args:
        functions: called one after the other.
        segments: how many scopes to divide them into.
        input: of the first function.
        use_reentrant: moot, as in `checkpoint`.
        preserve_rng_state: moot, as in `checkpoint`.

    >>> import torch
    >>> chain = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    >>> checkpoint_sequential(chain, 3, torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """
    given = functions.children() if isinstance(functions, torch.nn.Sequential) else functions
    chain = read_list(given, "functions", "a list of modules, or a torch.nn.Sequential")
    for at, function in enumerate(chain):
        read_callable(function, f"functions[{at}]", "functions of one input", arguments=1)
    _check_switches(use_reentrant, preserve_rng_state)
    if read_count(segments, "segments") > max(1, len(chain)):
        raise invalid(
            "segments",
            segments,
            f"is more than there are functions, {len(chain)}",
            "segments=1 or more",
        )
    length = len(chain) // segments
    result = input
    for number in range(segments):
        last = number == segments - 1
        part = chain[number * length : None if last else (number + 1) * length]
        with CheckpointScope(f"segment {number}", enabled=not last):
            for function in part:
                result = function(result)
    return result


def chunked(fn: Callable[[Any], T], batch: Any, size: int, dim: int = 0) -> T:
    """Run `fn` over chunks of the batch, each in a scope of its own, and join the outputs.

    The loss may couple the whole batch (contrastive losses do): its gradients are exact, and only
    one chunk's activations are there at a time. `fn` must treat the rows independently, or the full
    batch means something else.

    Args:
        fn: called with each chunk; returns a tensor, or a nest of tensors, with as many rows.
        batch: a tensor or a nest of tensors.
        size: rows of one chunk; the last one may be smaller.
        dim: the dimension that is cut, of every tensor, and along which the outputs are joined: 1
            for the tokens of sequences, where `fn` treats each token by itself.

    >>> import torch
    >>> encode = torch.nn.Linear(4, 8)
    >>> chunked(encode, torch.ones(10, 4), size=3).shape
    torch.Size([10, 8])
    >>> chunked(encode, torch.ones(2, 10, 4), size=3, dim=1).shape
    torch.Size([2, 10, 8])
    """
    read_count(size, "size")
    read_count(dim, "dim", minimum=0)
    read_callable(fn, "fn", "a function of one chunk", arguments=1)
    if dim:
        _check_all_have(dim, batch)
    in_front = _moved(batch, dim, 0)  # views: what is cut is dim 0
    total = size_of_batch(in_front)
    if not total:
        raise invalid("batch", batch, "has 0 rows", "at least one row")
    outputs = []
    for number, chunk in enumerate(split_batch(in_front, size)):
        with CheckpointScope(f"chunk {number}"):
            outputs.append(fn(_moved(chunk, 0, dim)))
    joined: T = join_chunks(outputs, total, dim)
    return joined


def _check_all_have(dim: int, batch: Any) -> None:
    for tensor in leaves(batch):
        if tensor.dim() <= dim:
            raise invalid(
                "dim", dim, f"is no dimension of a tensor of shape {tuple(tensor.shape)}", "dim=0"
            )


def _moved(nest: Any, source: int, to: int) -> Any:
    """The same nest with a dimension of each tensor in another place."""
    return nest if source == to else map_tensors(nest, lambda tensor: tensor.movedim(source, to))


def mark_checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """Keep this activation: recomputation starts from it. Call it inside a scope; returns the
    tensor.

    Args:
        tensor: an activation, made inside of a scope.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> with CheckpointScope("both"):
    ...     h = mark_checkpoint(x.exp())
    ...     y = h.sin().sum()
    >>> is_checkpoint(h), is_checkpoint(y)
    (True, False)
    """
    read_tensor(tensor, "tensor", "an activation")
    recorder = current_recorder()
    if recorder is None:
        if inside_scope():  # a disabled one: everything is kept anyway
            return tensor
        raise MisuseError(
            "mark_checkpoint() was called outside of an enabled CheckpointScope, where everything"
            " is kept anyway. Call it inside `with CheckpointScope(...):`."
        )
    if tensor.layout != torch.strided:  # kept in any case: nothing without a storage is replayed
        return tensor
    recorder.keep(tensor)
    _mark(tensor)
    return tensor


def _mark(tensor: torch.Tensor) -> None:
    key = storage_key(tensor)
    if key not in _marked:
        watch = _marked[key] = watch_storage(
            tensor.untyped_storage(), lambda dead: _marked.pop(dead.key, None)
        )
        watch.key = key


def is_checkpoint(tensor: torch.Tensor) -> bool:
    """Whether `mark_checkpoint` was called on this tensor, or on a view of it.

    Args:
        tensor: any tensor.
    """
    read_tensor(tensor, "tensor", "an activation")
    try:
        return storage_key(tensor) in _marked
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have no storage
        return False


_marked: dict[int, StorageWatch] = {}
_CONTEXTS = "a function that returns two context managers"


# By the address of a function's code, how many arguments it was found to take, and whether it is a
# method: reading a signature takes longer than recording several operations.
_accepted: dict[tuple[int, int | None, bool], Any] = {}


# The same for modules, by their class: the `forward` that was found to take them.
_accepted_forwards: dict[tuple[type, int | None], Any] = {}


def _name_of(function: Any) -> str:
    """A module is asked in its attributes only: to look for one that it has not takes long."""
    if isinstance(function, torch.nn.Module):
        return function.__dict__.get("__name__") or type(function).__name__
    return getattr(function, "__name__", type(function).__name__)


def _check_function(function: Any, arguments: int | None) -> None:
    """Refuse what cannot be called so; once for each function that is called in each layer."""
    if isinstance(function, torch.nn.Module):
        kind = type(function)
        if "forward" not in function.__dict__:
            forward = getattr(kind, "forward", None)  # TorchScript's classes have none to give
            if _accepted_forwards.get((kind, arguments)) is not forward:
                read_callable(function, "function", "the function to call", arguments=arguments)
                _accepted_forwards[kind, arguments] = forward
            return
        called = function.forward
    else:
        called = function
    code = getattr(called, "__code__", None)
    key = (id(code), arguments, hasattr(called, "__self__"))
    if _accepted.get(key) is None or hasattr(called, "__wrapped__"):
        read_callable(function, "function", "the function to call", arguments=arguments)
        _accepted[key] = code  # held, so that the address is not used again


def _contexts(context_fn: Callable[[], Any]) -> tuple[Any, Any]:
    pair = context_fn()
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_can_be_entered, pair)):
        raise invalid("context_fn", context_fn, f"returned a {type(pair).__name__}", _CONTEXTS)
    return pair


def _can_be_entered(context: Any) -> bool:
    return hasattr(context, "__enter__")


def _check_switches(use_reentrant: Any, preserve_rng_state: Any, **others: Any) -> None:
    """Torch's arguments, which change nothing here, must still be what torch takes."""
    if use_reentrant is not None:
        read_flag(use_reentrant, "use_reentrant")
    others["preserve_rng_state"] = preserve_rng_state
    for name, value in others.items():
        if value is not True and value is not False:
            read_flag(value, name)


class _Around:
    """A context of the user's, entered once or many times, that cannot swallow what is raised
    inside.

    torch's own checkpoint passes such an error on, too: there would be no result to return.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._entered: Any = None

    def __enter__(self) -> None:
        # One that `@contextmanager` made is over after its first use; contextlib makes it anew
        # where it decorates.
        anew = getattr(self._context, "_recreate_cm", None)
        self._entered = self._context if anew is None else anew()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _as_keep_operation(policy: Callable[..., Any]) -> KeepOperation:
    """A torch selective-checkpointing policy as a scope's."""
    from torch.utils.checkpoint import CheckpointPolicy

    def keep(op: Any, results: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        choice = policy(
            selective_context(results[0] if len(results) == 1 else tuple(results)),
            op,
            *args,
            **kwargs,
        )
        if isinstance(choice, bool):
            return choice
        return choice in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    return keep
