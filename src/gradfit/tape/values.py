"""What a forward did: values (versions of storages), the operations that made them, and autograd's
handles on them.

Ownership runs one way, from the newest to the oldest:

    autograd node ─► Handle ─► TapeValue ─► TapeOperation ─► TapeValue (its inputs) ─► …

so that the graph's handles own the tape and nothing else does: when a backward pass, or the death
of the loss, frees a handle, whatever only that handle needed dies with it. Links the other way
(`users`, `outputs`) are weak.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gradfit._torch import storage_key
from gradfit.source_line import Place
from gradfit.tape import process_settings

_next_epoch = itertools.count(1).__next__  # a value may be read by several tapes
Geometry = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]
_T = TypeVar("_T")
# One is in a tuple, for which nothing more is allocated; several in a list; many in a queue, where
# `replay.py` has the one that it found last at the end.
References = tuple[_T, ...] | list[_T] | deque[_T]
NOT_UNPACKED = (0, 0, 0)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Where in its storage a tensor lies."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


def shaped(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Another tensor on the same storage."""
    size, stride, offset, dtype = geometry
    if dtype is tensor.dtype:
        return tensor.as_strided(size, stride, offset)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), offset, size, stride
    )


class Segment:
    """A scope as the tape sees it: values of one segment are rebuilt together. Segments form a
    tree.
    """

    __slots__ = ("depth", "parent", "scope")

    def __init__(self, parent: Segment | None, scope: Any = None) -> None:
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.scope = scope

    def encloses(self, other: Segment) -> bool:
        """Whether `other` is this segment or lies inside it."""
        node: Segment | None = other
        while node is not None and node.depth > self.depth:
            node = node.parent
        return node is self

    def common(self, other: Segment) -> Segment:
        """The innermost segment around both."""
        a: Segment = self
        b: Segment = other
        while a is not b:
            if a.depth >= b.depth and a.parent is not None:
                a = a.parent
            elif b.parent is not None:
                b = b.parent
            else:
                break
        return a


def nothing() -> torch.Tensor | None:
    """What a dead weak reference would return."""
    return None


@dataclass(slots=True)
class RareFacts:
    """What is known of a few values only, so that the others need not have it."""

    digest: bytes | None = None
    """Of what was in the value's tensor, where a version counter would not tell."""
    read_at: Place | None = None
    """Where in the user's code it was first read, if a scope holds it."""
    part: weakref.ref[TapeValue] | None = None
    """What of it was written, on memory of its own: see `written_slices.py`."""


class TapeValue:
    """One version of one storage: `tensor` is there when it is kept or was rebuilt, `op` when it
    can be rebuilt. Made by `new_value`.
    """

    __slots__ = (
        "__weakref__", "death_watch", "evictable", "forward_tensor", "geometry", "handles",
        "held_version", "key", "op", "position", "rare", "segment", "tensor", "unpacked",
        "unwanted", "unwritten", "users", "version", "write_pending",
    )  # fmt: skip

    key: int  # of the storage
    geometry: Geometry  # of the tensor that `tensor`, when there, is
    segment: Segment
    op: TapeOperation | None
    position: int  # which of its operation's results; -1 - n: its n-th written one
    # The storage's version counter when the storage last passed by, and whether a recorded write
    # has still to be counted: see `version_counters.py`.
    version: int
    write_pending: bool
    # A weak reference to the tensor that the forward saw. Not to be read without a look at where it
    # lies: see `unmoved_forward_tensor`.
    forward_tensor: Callable[[], torch.Tensor | None]
    death_watch: Any  # tells when the storage dies, so that its address can be used again
    # UNINITIALISED or CONSTANT as long as no recorded operation has filled it: somebody whom the
    # tape does not see may fill it.
    unwritten: str | None
    evictable: bool  # kept when autograd saves it, until somebody needs the memory
    tensor: torch.Tensor | None
    # The version counter of `tensor` when it was held; -1: nobody else has its memory, or the
    # digest tells.
    held_version: int
    # Operations that read it. Not kept for roots, which nobody has to make again.
    users: References[weakref.ref[TapeOperation]] | None
    unwanted: int  # the epoch of its tape in which it was found that nobody will ask for it
    # Autograd's; a node that dies unused takes its own along.
    handles: References[weakref.ref[Handle]] | None
    rare: RareFacts | None
    # In which pass, of how many handles, so many at the end are not pending.
    unpacked: tuple[int, int, int]

    def unmoved_forward_tensor(self) -> torch.Tensor | None:
        """The tensor that the forward saw, if it lives and still lies where it lay: `.data =` may
        have moved it.
        """
        tensor = self.forward_tensor()
        if tensor is None or storage_key(tensor) != self.key or not self.is_whole(tensor):
            return None
        return tensor

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on its storage lies there as its operation's result did."""
        place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if place != self.geometry or tensor.is_neg():
            return False
        return not (tensor.dtype.is_complex and tensor.is_conj())

    @property
    def digest(self) -> bytes | None:
        return None if self.rare is None else self.rare.digest

    @property
    def read_at(self) -> Place | None:
        return None if self.rare is None else self.rare.read_at

    @property
    def part(self) -> weakref.ref[TapeValue] | None:
        return None if self.rare is None else self.rare.part

    def rare_facts(self) -> RareFacts:
        """To be set."""
        if self.rare is None:
            self.rare = RareFacts()
        return self.rare

    @property
    def root(self) -> bool:
        """Nothing on the tape makes it: a parameter, an input, or something kept."""
        return self.op is None

    def pending(self, pass_number: int) -> bool:
        """Whether backward will still ask for it in this pass. What is not pending once is not
        looked at again.
        """
        handles = self.handles
        if handles is None:
            return False
        count = len(handles)
        if count == 1:
            handle = handles[0]()
            return handle is not None and handle.pass_number != pass_number
        number, of, done = self.unpacked
        if number != pass_number or of != count:
            done = 0
        pending = False
        while done < count:
            # the last one was packed last, and is mostly unpacked first
            handle = handles[count - 1 - done]()
            if handle is not None and handle.pass_number != pass_number:
                pending = True
                break
            done += 1
        self.unpacked = (pass_number, count, done)
        return pending


def new_value(
    key: int,
    geometry: Geometry,
    segment: Segment,
    op: TapeOperation | None = None,
    position: int = 0,
    version: int = -1,
    forward_tensor: Callable[[], torch.Tensor | None] = nothing,
    death_watch: Any = None,
) -> TapeValue:
    """A value. Not by `__init__`, as the other objects that are made for each operation: up to
    Python 3.12, calling a class that has one enters the interpreter anew.
    """
    value = TapeValue()
    value.key = key
    value.geometry = geometry
    value.segment = segment
    value.op = op
    value.position = position
    value.version = version
    value.write_pending = value.evictable = False
    value.forward_tensor = forward_tensor
    value.death_watch = death_watch
    value.unwritten = value.tensor = value.users = value.handles = value.rare = None
    value.held_version = -1
    value.unwanted = 0
    value.unpacked = NOT_UNPACKED
    return value


class TapeOperation:
    """One recorded call: enough to make its results again. Made by `new_operation`."""

    __slots__ = (
        "__weakref__", "args", "func", "index", "info", "inputs", "kwargs", "outputs",
        "random_state", "slices", "unwanted", "written",
    )  # fmt: skip

    index: int
    func: Any
    info: Any
    args: Any  # as called, with a TapeValue or a Slice in the place of every tensor
    kwargs: Any
    inputs: list[TapeValue]  # each once
    outputs: References[weakref.ref[TapeValue] | None]  # None: kept, and no value of the tape
    unwanted: int  # as a value's: none of its results is wanted
    written: tuple[TapeValue, ...]  # the versions that it overwrites
    slices: bool  # whether it writes to a small part of a storage: see `written_slices.py`
    random_state: Any  # of the generator that it draws from, before it did

    @property
    def name(self) -> str:
        return str(self.func)


def new_operation(
    index: int, func: Any, info: Any, args: Any, kwargs: Any, inputs: list[TapeValue]
) -> TapeOperation:
    """An operation without results."""
    op = TapeOperation()
    op.index = index
    op.func = func
    op.info = info
    op.args = args
    op.kwargs = kwargs
    op.inputs = inputs
    op.outputs = op.written = ()
    op.unwanted = 0
    op.slices = False
    op.random_state = None
    return op


class Slice:
    """A tensor argument that is not the whole of what its value's operation returned. Made by
    `new_slice`.
    """

    __slots__ = ("geometry", "value")

    value: TapeValue
    geometry: Geometry


def new_slice(value: TapeValue, geometry: Geometry) -> Slice:
    """Where a tensor lies in the storage of a value."""
    part = Slice()
    part.value = value
    part.geometry = geometry
    return part


class ParameterRef:
    """A tensor argument that is a parameter, or a view of one: it is there anyway, and only checked
    at replay.

    `content` is an alias of what was read: `.data =` gives the parameter another storage, but not
    the alias. Writes to it count up the version of `source`, the argument itself; None if the
    content is a copy that nobody else has. Made by `ParameterReads`.
    """

    __slots__ = ("__weakref__", "content", "source", "version")

    content: torch.Tensor
    source: torch.Tensor | None
    version: int

    @property
    def overwritten(self) -> bool:
        """Whether somebody has written to it since it was read."""
        return self.source is not None and self.source._version != self.version


class Scratch:
    """An argument whose content is not read but written to: replay gives it a throw-away tensor,
    the same one for all that are the same object. Made by `scratch`.
    """

    __slots__ = ("dtype", "place", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype, place: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.place = place  # among the arguments: those of one operation get different tensors


@functools.lru_cache(maxsize=1024)
def scratch(shape: torch.Size, dtype: torch.dtype, place: int) -> Scratch:
    """The same for all operations whose hidden state is alike."""
    return Scratch(shape, dtype, place)


class Tape:
    """What the handles of one recording share."""

    __slots__ = ("__weakref__", "_patience", "epoch", "lock", "on_held", "pass_number", "retains")

    def __init__(self, lock: Any = None) -> None:
        # Accelerators' backward passes unpack in threads of their own.
        self.lock = threading.RLock() if lock is None else lock
        self.pass_number = 1
        self.epoch = _next_epoch()  # what was found unwanted stays so until the next one
        self.retains = True  # what a sweep makes and the rest of the pass needs
        # Told of values that may be evicted from now on.
        self.on_held: Callable[[Iterable[TapeValue]], None] | None = None
        self._patience = process_settings.collector_waits()

    def begin_pass(self) -> None:
        """Another backward over a retained graph begins."""
        self.pass_number += 1
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Something that was there was dropped: what it would be made from may be wanted again."""
        self.epoch = _next_epoch()

    @classmethod
    def alone(cls) -> Tape:
        """A tape for a replay that no backward pass asked for."""
        return cls(contextlib.nullcontext())


class Handle:
    """What autograd keeps in the place of a tensor. Made by `new_handle`."""

    __slots__ = ("__weakref__", "geometry", "pass_number", "tape", "value")

    tape: Tape
    value: TapeValue
    geometry: Geometry | None  # where the tensor lies in the value's storage; None: it is all of it
    pass_number: int  # the pass in which it was last unpacked


def new_handle(tape: Tape, value: TapeValue, geometry: Geometry | None) -> Handle:
    """A handle that was not unpacked yet."""
    handle = Handle()
    handle.tape = tape
    handle.value = value
    handle.geometry = geometry
    handle.pass_number = 0
    return handle


class OfSubclass:
    """What autograd keeps in the place of a tensor of another class than torch's own."""

    __slots__ = ("attributes", "content", "itself", "kind")

    def __init__(self, content: Any, like: torch.Tensor) -> None:
        self.content = content  # a handle, or a kept tensor with its version
        self.itself = weakref.ref(like)
        self.kind = type(like)
        self.attributes = dict(vars(like))
