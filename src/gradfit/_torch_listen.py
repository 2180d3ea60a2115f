"""How torch tells this thread's recorder of the operations that run: private torch API, as in `_torch.py`.

torch's own way is a dispatch mode. It calls Python for every operator, and two thirds of a transformer's operators are
views, which the tape does not record. So the recorder listens on a dispatch key of its own: it lies below autograd, as
modes do, and each view is registered there as *fallthrough*, which the dispatcher passes over at no cost.

The key is below `Python`, where modes and tensor subclasses live. Where a mode is at work already (a meter, fake
tensors, another recorder), a mode is used after all: then what the recorder does itself is seen by that one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Ear = Callable[[Any, Any, Any], Any]  # (operator, args, kwargs) -> what the operator returns

# Reserved in torch for fake tensors that came to be made in another way; nothing in torch uses it.
_NAME = "Fake"
_KEY = torch._C._dispatch_key_parse(_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_include = torch._C._dispatch_tls_set_dispatch_key_included
_modes = torch._C._len_torch_dispatch_stack

_libraries: list[torch.library.Library] = []
_lock = threading.Lock()


class _Thread(threading.local):
    ear: Ear | None = None


_thread = _Thread()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode with types, entered without the wrapper that torch puts around `__torch_dispatch__` for dynamo.

    That wrapper costs as much as a small operation, and protects compiled frames, which do not run under such a mode.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class _Mode(DispatchMode):
    """Listens as a mode."""

    def __init__(self, ear: Ear) -> None:
        super().__init__()
        self._ear = ear

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ear(func, args, kwargs or {})


class _Key:
    """Listens on the key."""

    def __init__(self, ear: Ear) -> None:
        self._ear = ear

    def __enter__(self) -> None:
        _thread.ear = self._ear
        _include(_KEY, True)

    def __exit__(self, *_: object) -> None:
        _include(_KEY, False)
        _thread.ear = None


def listening(ear: Ear, views: Callable[[], Iterable[str]]) -> Any:
    """A context: inside, `ear` is called for every operator of this thread, below autograd, and has to run it.

    Operators that are among `views` may or may not be heard. What `ear` itself runs is not.
    """
    if not _libraries:
        _register(views())
    return _Key(ear) if _thread.ear is None and _modes() == 0 and len(_libraries) > 1 else _Mode(ear)


class unseen:  # noqa: N801  (as torch.no_grad)
    """A context: no recorder and no dispatch mode learns of what runs inside."""

    def __enter__(self) -> None:
        self._guards = torch._C._DisableTorchDispatch(), torch._C._ExcludeDispatchKeyGuard(_KEYS)
        for guard in self._guards:
            guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


def _heard(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    ear = _thread.ear
    _exclude(_KEY, True)
    try:
        # None in a thread that the autograd engine started from one that listens.
        return op(*args, **kwargs) if ear is None else ear(op, args, kwargs)
    finally:
        _exclude(_KEY, False)


def _register(views: Iterable[str]) -> None:
    with _lock:
        if _libraries:
            return
        library: Any = torch.library.Library
        everything, aten = library("_", "IMPL"), library("aten", "IMPL")
        for name in views:
            aten.impl(name, torch.library.fallthrough_kernel, _NAME)
        try:
            everything.fallback(_heard, _NAME)
        except RuntimeError:  # somebody else uses the key: modes do the same, only slower
            _libraries.append(aten)
        else:
            _libraries.extend((aten, everything))


def aten_schemas() -> list[Any]:
    """The schema of every aten operator that the dispatcher knows; a few that only TorchScript knows are left out."""
    known = set(torch._C._dispatch_get_all_op_names())
    return [
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name[:6] == "aten::" and full_name(schema) in known
    ]


def full_name(schema: Any) -> str:
    """Namespace, name and overload, as the dispatcher writes them."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def run_compiled_functions_eagerly() -> Callable[[], None]:
    """Compiled code writes to memory without telling anybody. Returns what undoes it."""
    import torch._dynamo.eval_frame as dynamo  # takes a second, which the first optimizer has spent before

    before, dynamo._stance = dynamo._stance, dynamo.DynamoStance("force_eager")

    def undo() -> None:
        dynamo._stance = before

    return undo
