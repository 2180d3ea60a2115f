"""How torch tells this thread's recorder of the operations that run: private torch API, as in
`_torch.py`.

torch's own way is a dispatch mode. It calls Python for every operator, and two thirds of a
transformer's operators are views, which the tape does not record; and under a mode torch takes
other operators for some functions (`max_pool1d`, aten/src/ATen/native/MaxPooling.cpp, since
https://github.com/pytorch/pytorch/pull/43745). So listeners are on a dispatch key of their own:
it lies below autograd, as modes do, and each view is registered there as *fallthrough*, which the
dispatcher passes over at no cost.

Listeners form a chain, as modes do: the one that was entered last is called first, and what it
runs, its own doings included, is heard by the one around it.

The key is below `Python`, where modes and tensor subclasses live. Where somebody else's mode is at
work already (fake tensors, a user's own), a mode is used after all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves

from gradfit._torch_native import core
from gradfit.errors import UnsupportedOp

Ear = Callable[[Any, Any, Any], Any]  # (operator, args, kwargs) -> what the operator returns


class ByteCounter(Protocol):
    """Somebody who counts bytes, and is told of what runs inside of one operation."""

    def _begins_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operator of torch's is about to run."""

    def _made_inside(self, tensor: torch.Tensor) -> None:
        """A tensor was made."""


# Reserved in torch for fake tensors that came to be made in another way; nothing in torch uses it.
_NAME = "Fake"
_KEY = torch._C._dispatch_key_parse(_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many are entered
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_include = torch._C._dispatch_tls_set_dispatch_key_included
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_PYTHON = torch._C.DispatchKey.Python

# Dispatch modes and subclasses have to come before the key, which is told what they let through.
# Torch 2.13 has it in this order; in torch 2.10 the key is the higher of the two
# (c10/core/DispatchKey.h), and calls them itself.
_ABOVE_MODES = not torch._C._dispatch_keyset_full_after(_PYTHON).has(_KEY)
_EXCLUDED_IN_MODES = (
    torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(_KEY) - _KEYS
)

_libraries: list[torch.library.Library] = []
_views: set[str] = set()  # operators that only make views: they pass the key over
# But for this one: `torch.tensor(…)` has no operator but a view of what it has made.
_HEARD_VIEWS = {"aten::lift_fresh"}
_lock = threading.Lock()


class _Link:
    """A listener of the chain on the key."""

    __slots__ = ("count", "hear", "in_engine", "outer", "session")

    def __init__(
        self,
        hear: Ear,
        outer: _Link | None,
        in_engine: bool,
        count: ByteCounter | None = None,
        session: Any = None,
    ) -> None:
        self.hear = hear
        self.count = count  # told of what runs inside of one operation
        self.session = session  # for the native core, if it can hear in its place
        self.outer = outer  # the one around it, which hears what this one runs
        self.in_engine = in_engine  # also in the threads of a backward pass that is called inside


class _ThreadListeners(threading.local):
    innermost: _Link | None = None  # of those that are to be asked now
    entered_last: _Link | None = None  # the same, but while somebody hears and runs an operation


_thread = _ThreadListeners()
# What torch hands over to the autograd engine's threads, by name. What was stashed once stays in
# its thread, and torch copies it for each node of a graph: one name, short enough for a string that
# needs no memory of its own, and not before somebody listens there.
_IN_ENGINE = "gradfit.ears"


class DispatchMode(TorchDispatchMode):
    """A dispatch mode with types, entered without the wrapper that torch puts around
    `__torch_dispatch__` for dynamo.

    That wrapper costs as much as a small operation, and protects compiled frames, which do not run
    under such a mode.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    # Of torch's own (2.13, torch/utils/_python_dispatch.py): asked once, when a class is made.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        # After Ctrl-C a `ThreadState` may have taken it away already. A context that is closed
        # later, by the collector say, must not take somebody else's mode instead.
        if id(self) in map(id, _get_current_dispatch_mode_stack()):
            super().__exit__(*error)  # type: ignore[no-untyped-call]


class _Mode(DispatchMode):
    """Listens as a mode."""

    def __init__(self, ear: Ear) -> None:
        super().__init__()
        self._ear = ear

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ear(func, args, kwargs or {})

    def rest(self) -> None:
        """Listen no more."""
        self._ear = _run


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


class _CheckedMode(_Mode):
    """Listens as a mode among modes of the user's, which may do something else than they are asked.

    The key tells what ran in the end. If that is not the operator that was heard, with its
    arguments and its result, then `doubt` is called with all tensors that took part.
    """

    def __init__(self, ear: Ear, doubt: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__(ear)
        self._doubt = doubt
        self._ran: list[tuple[Any, Any]] = []
        self._notes = _OnKey(self._note)

    def __enter__(self) -> Any:
        self._notes.__enter__()
        try:
            return super().__enter__()
        except BaseException:
            self._notes.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._notes.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ran.clear()
        out = self._ear(func, args, kwargs or {})
        ran, self._ran = self._ran, []
        rest = [entry for entry in ran if entry != (func, _storages((args, kwargs, out)))]
        did_not_run = len(rest) == len(ran) and getattr(func, "_name", "") not in _views
        if did_not_run or any(op._schema.is_mutable for op, _ in rest):
            self._doubt(
                [
                    leaf
                    for leaf in tree_leaves((args, kwargs, out))
                    if isinstance(leaf, torch.Tensor)
                ]
            )
        return out

    def _note(self, op: Any, args: Any, kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        self._ran.append((op, _storages((args, kwargs, out))))
        return out


def _storages(nest: Any) -> list[Any]:
    return [_storage(leaf) for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):
        return None


class _OnKey:
    """Listens on the key."""

    def __init__(
        self,
        hear: Ear,
        *,
        in_engine: bool = False,
        count: ByteCounter | None = None,
        session: Any = None,
    ) -> None:
        self._link = _Link(hear, None, in_engine, count, session)

    def __enter__(self) -> None:
        try:
            self._link.outer, _thread.innermost = _thread.innermost, self._link
            _thread.entered_last = self._link
            _include(_KEY, True)
            if self._link.in_engine:
                _tell_engine()
        except BaseException:
            self.__exit__()
            raise

    def rest(self) -> None:
        """Listen no more."""
        self._link.hear, self._link.session = _run, None
        if self._link.outer is None and _thread.entered_last is self._link:
            _include(_KEY, False)

    def __exit__(self, *_: object) -> None:
        link = self._link
        try:
            # no call before this is done: Ctrl-C could keep it from being done
            if _thread.innermost is link:
                _thread.innermost = link.outer
            else:
                _unlink(link)
        finally:
            _thread.entered_last = _thread.innermost
            if _thread.innermost is None:
                _include(_KEY, False)
        if link.in_engine:
            _tell_engine()


def _unlink(link: _Link) -> None:
    """Take one out that is left before one that was entered after it."""
    inner = _thread.innermost
    while inner is not None and inner.outer is not link:
        inner = inner.outer
    if inner is not None:
        inner.outer = link.outer


def _tell_engine() -> None:
    """Let the threads of a backward pass that is called from here find those who listen there,
    too.
    """
    links, link = [], _thread.innermost
    while link is not None:
        if link.in_engine:
            links.append(link)
        link = link.outer
    chain: _Link | None = None
    for link in reversed(links):
        chain = _Link(link.hear, chain, True, link.count)
    if chain is not None or torch._C._is_key_in_tls(_IN_ENGINE):
        _stash(_IN_ENGINE, chain)


def _told_engine() -> _Link | None:
    """Who listens in the threads of a backward pass that is called from here, or in this one, if it
    is such a thread.
    """
    if not torch._C._is_key_in_tls(_IN_ENGINE):
        return None
    link: _Link | None = torch._C._get_obj_in_tls(_IN_ENGINE)
    return link


def _stash(name: str, content: object) -> None:
    if _stashing_takes(name):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(content))
    torch._C._stash_obj_in_tls(name, content)


@functools.cache
def _stashing_takes(name: str) -> bool:
    """Whether torch gives back a reference, at the end, that it has not taken, so that the object
    is freed while others have it: torch 2.10 does, 2.13 does not (`_stash_obj_in_tls` in
    torch/csrc/Module.cpp; https://github.com/pytorch/pytorch/pull/180295 works around the same).
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(name, probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    torch._C._stash_obj_in_tls(name, None)
    return takes


def listening(
    ear: Ear,
    views: Callable[[], Iterable[str]],
    doubt: Callable[[list[torch.Tensor]], None] | None = None,
    *,
    in_engine: bool = False,
    as_mode: bool = False,
    count: ByteCounter | None = None,
    session: Any = None,
) -> Any:
    """A context: inside, `ear` is called for every operator of this thread, below autograd, and has
    to run it.

    Operators that are among `views` may or may not be heard, and after its `rest()` none is. What
    `ear` itself runs is not, but by those who listened before. If somebody between `ear` and the
    kernels did something else than `ear` asked for, `doubt` gets the tensors that he may have
    changed. With `in_engine`, the autograd engine's own threads are listened to as well, where an
    accelerator's backward passes run. Fake tensors are heard `as_mode` only. `count` is
    told of what runs inside of what is one operation. With a `session`, the native core may hear in
    the place of `ear`, and does the same.
    """
    if not _libraries:  # not at import: it takes a while, and not everybody records
        _register(views())
    if len(_libraries) == 1 or as_mode:  # one: the key is somebody else's
        return _Mode(ear)
    if dispatch_modes() == 0:
        return _OnKey(ear, in_engine=in_engine, count=count, session=session)
    return _Mode(ear) if doubt is None or _modes_are_ours() else _CheckedMode(ear, doubt)


def _modes_are_ours() -> bool:
    """Whether no mode does something else than it is asked for: all are ours, or torch's fake
    one.
    """
    modes = _get_current_dispatch_mode_stack()
    return all(isinstance(mode, DispatchMode) for mode in modes) or any(
        isinstance(mode, FakeTensorMode) for mode in modes
    )


_SEES = _KEYS
for _key in ("Python", "PreDispatch", "PythonTLSSnapshot"):  # as torch._C._DisableTorchDispatch
    _SEES = _SEES | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))


def unseen() -> Any:
    """A context: no recorder and no dispatch mode learns of what runs inside.

    It must be one guard of torch's own, entered and left by nobody but `with`. Ctrl-C can come
    in an `__enter__` or `__exit__` that is written in Python, and such a guard, if it dies later
    than the operation in which it was entered, leaves this thread as it was in there: without
    autograd (torch 2.13, `py_context_manager` in torch/csrc/utils/py_context_manager.h).
    """
    return torch._C._ExcludeDispatchKeyGuard(_SEES)


def _heard(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    link = _thread.innermost
    if link is None or _is_excluded(_PYTHON):
        return _heard_elsewhere(op, args, kwargs)
    outer = link.outer
    if outer is None:  # what it runs, nobody hears
        try:
            _exclude(_KEY, True)
            return link.hear(op, args, kwargs)
        finally:
            _exclude(_KEY, False)
    try:
        _thread.innermost = outer
        return link.hear(op, args, kwargs)
    finally:
        _thread.innermost = link


heard = _heard


def is_heard() -> bool:
    """Whether what runs now in this thread is heard by somebody."""
    return _is_included(_KEY) and not _is_excluded(_KEY)


def switch_off() -> None:
    """Nobody hears what this thread runs, until `switch_on`."""
    _exclude(_KEY, True)


def switch_on() -> None:
    """Undo it."""
    _exclude(_KEY, False)


def who_counts() -> list[ByteCounter]:
    """Those who are to be told of what runs inside of one operation."""
    link = _thread.innermost or _told_engine()
    found = []
    while link is not None:
        if link.count is not None:
            found.append(link.count)
        link = link.outer
    return found


@contextlib.contextmanager
def heard_by_one(ear: Ear) -> Iterator[None]:
    """Inside of an operation that nobody hears, its parts are heard by `ear`."""
    before, told = _thread.innermost, _told_engine()
    try:
        _thread.innermost = _Link(ear, None, True)
        _tell_engine()  # the operation may run a backward pass
        _exclude(_KEY, False)
        yield
    finally:
        _exclude(_KEY, True)
        _thread.innermost = before
        # not who is asked now: whoever hears the operation is not among those
        _stash(_IN_ENGINE, told)


def _heard_elsewhere(op: Any, args: Any, kwargs: Any) -> Any:
    """In a thread that the autograd engine has started from one that listens.

    Or where `Python` is switched off: there a fake tensor or another subclass asks kernels how they
    behave, which is no operation of the forward.
    """
    link = None if _is_excluded(_PYTHON) else _told_engine()
    if link is not None:
        try:
            _thread.innermost = link
            return _heard(op, *args, **kwargs)
        finally:
            _thread.innermost = None
    try:
        _exclude(_KEY, True)
        return op(*args, **kwargs)
    finally:
        _exclude(_KEY, False)


def _heard_above_modes(op: Any, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
    """As `_heard`, where the key comes before modes and subclasses: these are asked first, and call
    back.
    """
    if not keys.has(_PYTHON):
        return _heard(op, *args, **kwargs)
    kinds = _subclasses_in(args, kwargs)
    if not dispatch_modes() and any(map(_is_dispatched_in_cpp, kinds)):
        return _run_in_cpp(op, args, kwargs)
    # what torch excludes there, except for the key
    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_IN_MODES):
        return _ask_modes_and_subclasses(kinds, op, args, kwargs)


def _heard_late_above_modes(keys: Any, op: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for an operator that was defined later: a fallback gets the keys first."""
    return _heard_above_modes(op, keys, *args, **kwargs)


def _subclasses_in(args: Any, kwargs: Any) -> list[Any]:
    """Those with a dispatch of their own, in the order of the arguments, a subclass before its
    bases.
    """
    kinds: list[Any] = []
    for leaf in tree_leaves((args, kwargs)):
        if (
            isinstance(leaf, torch.Tensor)
            and torch._C._dispatch_keys(leaf).has(_PYTHON)
            and type(leaf) not in kinds
        ):
            place = next(
                (i for i, kind in enumerate(kinds) if issubclass(type(leaf), kind)), len(kinds)
            )
            kinds.insert(place, type(leaf))
    return kinds


def _is_dispatched_in_cpp(kind: type) -> bool:
    """Whether torch does not call its `__torch_dispatch__`: DTensor's is written in C++ from torch
    2.10 on, and nobody else can call it (`dispatchDTensorOp` in
    torch/csrc/autograd/python_variable.cpp, https://github.com/pytorch/pytorch/pull/167051).
    """
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def _run_in_cpp(op: Any, args: Any, kwargs: Any) -> Any:
    """Let torch run an operator as if nobody listened on the key; a mode hears what that runs."""
    try:
        _exclude(_KEY, True)
        with _HearsInside():
            return op(*args, **kwargs)
    finally:
        _exclude(_KEY, False)


class _HearsInside(DispatchMode):
    """Hears the operators that run on plain tensors inside of one that torch dispatches."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_dispatched_in_cpp, types)):
            return NotImplemented
        try:
            return _heard(func, *args, **(kwargs or {}))
        finally:
            _exclude(_KEY, True)  # which was so, and is not after hearing


def _ask_modes_and_subclasses(kinds: list[Any], op: Any, args: Any, kwargs: Any) -> Any:
    """What torch does for its `Python` key (`handle_torch_function_no_python_arg_parser`,
    python_arg_parser.cpp).
    """
    out: Any = NotImplemented
    if dispatch_modes():
        with _pop_mode_temporarily() as mode:
            out = mode.__torch_dispatch__(op, tuple(kinds), args, kwargs)
    for kind in kinds:
        if out is NotImplemented:
            out = kind.__torch_dispatch__(op, tuple(kinds), args, kwargs)
    if out is NotImplemented:
        raise TypeError(
            f"Multiple dispatch failed for {op}: no mode and none of {kinds} implements it."
        )
    return out


def _register(views: Iterable[str]) -> None:
    """Make the key known to every operator.

    One by one, because torch cannot find a fallback's Python function for an operator that is
    called on a subclass of Tensor; the fallback is for operators that are defined later.
    """
    with _lock:
        if _libraries:
            return
        library: Any = torch.library.Library
        everything = library("_", "IMPL")
        _views.update("aten::" + name for name in views)
        try:
            everything.fallback(
                _heard_late_above_modes if _ABOVE_MODES else _heard,
                _NAME,
                with_keyset=_ABOVE_MODES,
            )
        except RuntimeError:  # somebody else uses the key: modes do the same, only slower
            _libraries.append(everything)
            return
        namespaces: dict[str, Any] = {}
        native = core()
        if native is not None:
            native.use_key(_NAME)
        for full in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full.partition("::")
            if namespace not in namespaces:
                namespaces[namespace] = library(namespace, "IMPL")
            _register_one(namespaces[namespace], namespace, name, native)
        _let_pass_higher_order()
        _libraries.extend((everything, *namespaces.values()))


def _register_one(library: Any, namespace: str, name: str, native: Any) -> None:
    full = f"{namespace}::{name}"
    passes = full in _views and full not in _HEARD_VIEWS
    kernel: Any = torch.library.fallthrough_kernel if passes else _kernel(namespace, name)
    if kernel is None:
        return
    if native is not None and not passes:
        native.listen(full.partition(".")[0], name.partition(".")[2], kernel.args[0], kernel)
    else:
        library.impl(name, kernel, _NAME, with_keyset=_ABOVE_MODES and not passes)


def _kernel(namespace: str, name: str) -> Any:
    packet, _, overload = name.partition(".")
    try:
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        return functools.partial(_heard_above_modes if _ABOVE_MODES else _heard, operator)
    except (
        AttributeError,
        RuntimeError,
    ):  # known to the dispatcher only: Python can neither call nor hear it
        return None


def _let_pass_higher_order() -> None:
    """Higher-order operators (`while_loop`) look their kernels up in Python: they pass the key
    over.
    """
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    operator: Any
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
    cond = torch._ops._higher_order_ops["cond"]
    cond.py_impl(_KEY)(functools.partial(_refuse_differentiated_cond, cond))


def _refuse_differentiated_cond(
    cond: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Any
) -> Any:
    """torch compiles a `cond` to differentiate it, and compiled functions run eagerly while
    something is recorded.

    Its backward then fails with an unrelated error (torch 2.13: "object of type 'bool' has no
    len()").
    """
    if any(leaf.requires_grad for leaf in tree_leaves(operands) if isinstance(leaf, torch.Tensor)):
        raise UnsupportedOp(
            "torch.cond, inside a scope, on tensors that require a gradient: torch compiles it to"
            " differentiate it, and nothing is compiled while a scope records. Write `if pred:`"
            " instead, or call it outside of the scope."
        )
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return cond(pred, true_fn, false_fn, operands)


def aten_schemas() -> list[Any]:
    """The schema of every aten operator that the dispatcher knows; a few that only TorchScript
    knows are left out.
    """
    registered = set(torch._C._dispatch_get_all_op_names())
    return [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name[:6] == "aten::" and full_name(schema) in registered
    ]


def full_name(schema: Any) -> str:
    """Namespace, name and overload, as the dispatcher writes them."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


_stances: list[Any] = []  # what we set, and what was there before


def run_compiled_functions_eagerly() -> None:
    """Compiled code writes to memory without telling anybody."""
    # takes a second, which the first optimizer has spent before
    import torch._dynamo.eval_frame as dynamo

    if not _stances or dynamo._stance is not _stances[0]:
        _stances[:] = [dynamo.DynamoStance("force_eager"), dynamo._stance]
        dynamo._stance = _stances[0]


def run_compiled_functions_again() -> None:
    """Undo it, unless somebody else has decided since."""
    import torch._dynamo.eval_frame as dynamo

    if _stances and dynamo._stance is _stances[0]:
        dynamo._stance = _stances[1]


@contextlib.contextmanager
def eager_functions() -> Iterator[None]:
    """Inside, functions compiled by torch.compile run as they were written."""
    run_compiled_functions_eagerly()
    try:
        yield
    finally:
        run_compiled_functions_again()


push_hooks = torch._C._autograd._push_saved_tensors_default_hooks  # those of `saved_tensors_hooks`
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# None if there are none; with True also while the compiler traces
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# not inside of `disable_saved_tensors_hooks`
_may_hook = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def others_take_saves() -> bool:
    """Whether somebody else takes what autograd saves in this thread now: hooks that are not ours;
    or wants no hooks at all.

    Those of torch's checkpoint, for one. It calls the code inside of it once more in the backward
    pass, and takes what is saved then, one after the other, for what was saved the first time: so
    the first time nobody else may take a part of it.
    """
    top: Any = top_hooks(True)
    if top is None:
        return not _may_hook()
    return not str(getattr(top[1], "__module__", "")).startswith("gradfit")


# Whether there is a mode, as torch's own `__enter__` and `__exit__` note it for torch.compile
# (torch 2.13, torch/utils/_python_dispatch.py); earlier versions have fewer.
_MODE_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
]

# Each is called when a `ThreadState` is made, and gives the function that takes back what was set
# since.
thread_settings: list[Callable[[], Callable[[], None]]] = []


class ThreadState:
    """What contexts have set for this thread: gradients, saved-tensor hooks, dispatch modes, the
    listener, scopes.

    A context that Ctrl-C ends while it begins or ends may leave its setting behind, torch's own
    contexts too. `restore()` takes away what was set since.
    """

    def __init__(self) -> None:
        self._gradients, self._inference = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        self._hooks, self._modes = top_hooks(False), dispatch_modes()
        self._listener, self._excluded = _thread.innermost, _is_excluded(_KEY)
        self._others = [setting() for setting in thread_settings]
        self._flags = [*map(vars(_python_dispatch).__getitem__, _MODE_FLAGS)]

    def restore(self) -> None:
        """Make it as it was."""
        for take_back in self._others:
            take_back()
        if not self._inference and not torch.is_inference_mode_enabled():
            torch.set_grad_enabled(self._gradients)
        while (top := top_hooks(False)) is not None and top != self._hooks:
            pop_hooks()
        # Held until all are off the stack: torch 2.10 returns a mode that it has freed, if the
        # stack's reference was the last (`_pop_torch_dispatch_stack` in torch/csrc/Module.cpp).
        held = _get_current_dispatch_mode_stack()
        while dispatch_modes() > self._modes:
            torch._C._pop_torch_dispatch_stack(None)
        del held
        vars(_python_dispatch).update(zip(_MODE_FLAGS, self._flags, strict=True))
        if _thread.innermost is not self._listener:
            _include(_KEY, self._listener is not None)
            _thread.innermost = _thread.entered_last = self._listener
            _tell_engine()
        if _is_excluded(_KEY) != self._excluded:
            _exclude(_KEY, self._excluded)


_F = TypeVar("_F", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame


def untraced(function: _F) -> _F:
    """A decorator: torch.compile does not look into the function, but calls it."""
    # `torch._dynamo.disable` would import dynamo, which takes a second, and wrap each call.
    action = _frames._FrameAction
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(
        function.__code__, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
    )
    return function


@untraced
def stop_tracing() -> Any:
    """From here on nothing that this thread calls is compiled, inside a compiled function
    either.
    """
    return _frames.set_eval_frame(None)


@untraced
def trace_again(before: Any) -> None:
    """Undo `stop_tracing`, of which `before` is the result."""
    _frames.set_eval_frame(before)
