"""Who did it: the module and the source line behind each operation of a forward pass, and what it
cost.
"""

from __future__ import annotations

import bisect
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradfit import _torch, _torch_listen
from gradfit.errors import MisuseError
from gradfit.tape.operators import info_of
from gradfit.toolbox.autograd_nodes import operation_name

# torch and gradfit: the line to be shown is the user's, or that of a library of theirs.
_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__))
)
# By code object and not by file name: every operation walks up through the same frames.
_is_skipped: dict[CodeType, bool] = {}


class Origin(NamedTuple):
    """Where an operation came from; empty text where nobody was watching."""

    module: str = ""
    source: str = ""


class Maker:
    """The operation that made a storage: its seconds, and the operations that made what it read."""

    __slots__ = ("inputs", "seconds")

    def __init__(self, seconds: float, inputs: list[Maker]) -> None:
        self.seconds = seconds
        self.inputs = inputs


class OriginRecorder(_torch_listen.DispatchMode):
    """Notes, below autograd, for every node that autograd makes, where it came from. Holds no
    tensor and no graph.

    A node is known by its number: autograd makes the node before it runs the operation, so inside
    the operation the newest number is its own. (A custom Function's node is the newest while its
    forward runs, for the same reason.) An operation in place makes more than one: those before its
    own are its own too, and `CopySlices` comes after it.
    """

    def __init__(self) -> None:
        super().__init__()
        # Numbers and origins and never nodes, which would hold their graph.
        self._numbers: list[int] = []  # of the nodes seen, rising
        self._origins: list[Origin] = []
        self._blocks: list[range] = []  # the numbers given out inside each `with`
        self.makers: dict[int, Maker] = {}  # of the storages, by what identifies these
        # of parameters, by id; the modules seen are alive while this is asked
        self.names: dict[int, str] = {}
        self._modules: dict[nn.Module, str] = {}
        self._stack: list[str] = []
        self._first = self._newest = 0
        self._hooks: list[Any] = []
        self._thread: int | None = None
        self._asynchronous = torch.accelerator.is_available()

    def __enter__(self) -> OriginRecorder:
        if self._thread not in (None, threading.get_ident()):
            raise MisuseError(
                "Autograd numbers its operations in each thread anew. Make an AutogradContext for"
                " each."
            )
        self._thread = threading.get_ident()
        self._first = _torch.last_sequence_number() + 1
        self._newest = self._first - 1
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._blocks.append(range(self._first, _torch.last_sequence_number() + 1))
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()
        self._modules.clear()

    def origin_of(self, node: torch.autograd.graph.Node) -> Origin | None:
        """Where a node came from; None if it was not made under this recorder."""
        number = _torch.sequence_number(node)
        if not self._numbers or not self._gave_out(number):
            return None
        # The first number seen that is not below the node's own: nodes that came before it and
        # were not seen belong to the same operation. `CopySlices` comes after its operation.
        at = bisect.bisect_left(self._numbers, number) - (operation_name(node) == "CopySlices")
        return self._origins[min(max(0, at), len(self._origins) - 1)]

    def _gave_out(self, number: int) -> bool:
        """Whether autograd gave a node this number while we were listening."""
        inside = (*self._blocks, range(self._first, self._newest + 1))
        return any(number in block for block in inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = _torch.last_sequence_number()
        # No newer number: nothing that it reads requires a gradient, so autograd made no node.
        if number > self._newest:
            self._newest = number
            self._numbers.append(number)
            self._origins.append(Origin(self._running_module(), _source_line(sys._getframe(1))))
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        # An accelerator's kernels may still run when the call is over; it takes what they take.
        if self._asynchronous:
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
        if not info_of(func).view:
            self._note_makers((args, kwargs), result, seconds)
        return result

    def _running_module(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _note_makers(self, arguments: Any, result: Any, seconds: float) -> None:
        read = [self.makers[key] for key in _storages(arguments) if key in self.makers]
        for key in _storages(result):
            # An address that is used again, or written to in place, has a new maker from here on.
            self.makers[key] = Maker(seconds, read)

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._modules:
            self._name_parts(module)
        self._stack.append(self._modules[module])

    def _name_parts(self, module: nn.Module) -> None:
        """Give the module, those in it and their parameters the names that they have from here."""
        prefix = ".".join((*self._stack[-1:], type(module).__name__))
        for name, child in module.named_modules():
            self._modules.setdefault(child, name or prefix)
        for name, parameter in module.named_parameters():
            self.names.setdefault(id(parameter), name)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:  # empty if the block began inside this module's forward
            self._stack.pop()


def find_origin(recorder: OriginRecorder | None, node: torch.autograd.graph.Node) -> Origin:
    """Where a node came from, as far as somebody was watching."""
    return (recorder.origin_of(node) if recorder else None) or Origin()


def _storages(nest: Any) -> Iterator[int]:
    if isinstance(nest, Tensor):
        try:
            yield _torch.storage_key(nest)
        except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, or a wrapper
            return
    elif isinstance(nest, list | tuple):
        for item in nest:
            yield from _storages(item)
    elif isinstance(nest, dict):
        yield from _storages(list(nest.values()))


def _source_line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None:
        code = frame.f_code
        skipped = _is_skipped.get(code)
        if skipped is None:
            name = code.co_filename
            skipped = _is_skipped[code] = name.startswith((*_SKIPPED, "<frozen"))
        if not skipped:
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
