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
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradfit._torch import detached, storage_key
from gradfit._torch_listen import dispatch_modes
from gradfit.source_line import Place
from gradfit.tape import process_settings

_next_epoch = itertools.count(1).__next__  # a value may be read by several tapes
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
Geometry = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]


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


class TapeValue:
    """One version of one storage: `tensor` is there when it is kept or was rebuilt, `op` when it
    can be rebuilt.
    """

    __slots__ = (
        "__weakref__", "death_watch", "digest", "evictable", "forward_tensor", "geometry",
        "handles", "held_version", "key", "op", "part", "position", "read_at", "segment", "tensor",
        "unpacked", "unwanted", "unwritten", "users", "version", "write_pending",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        geometry: Geometry,
        segment: Segment,
        op: TapeOperation | None = None,
        position: int = 0,
        version: int = -1,
        forward_tensor: Callable[[], torch.Tensor | None] = nothing,
        death_watch: Any = None,
    ) -> None:
        self.key = key
        self.geometry = geometry  # of the tensor that `tensor`, when there, is
        self.segment = segment
        self.op = op
        self.position = position  # which of its operation's results; -1 - n: its n-th written one
        # The storage's version counter when the storage last passed by, and whether a recorded
        # write has still to be counted: see `version_counters.py`.
        self.version = version
        self.write_pending = False
        # A weak reference to the tensor that the forward saw. Not to be read without a look at
        # where it lies: see `unmoved_forward_tensor`.
        self.forward_tensor = forward_tensor
        # Tells when the storage dies, so that its address can be used again.
        self.death_watch = death_watch
        # UNINITIALISED or CONSTANT as long as no recorded operation has filled it: somebody whom
        # the tape does not see may fill it.
        self.unwritten: str | None = None
        self.evictable = False  # kept when autograd saves it, until somebody needs the memory
        self.tensor: torch.Tensor | None = None
        # The version counter of `tensor` when it was held; -1: nobody else has its memory, or the
        # digest tells.
        self.held_version = -1
        # Of what was in `tensor`, where a version counter would not tell.
        self.digest: bytes | None = None
        # Operations that read it. Not kept for roots, which nobody has to make again.
        self.users: list[weakref.ref[TapeOperation]] | deque[weakref.ref[TapeOperation]] | None = (
            None
        )
        self.read_at: Place | None = (
            None  # in the user's code, where it was first read, if a scope holds it
        )
        self.unwanted = 0  # the epoch of its tape in which it was found that nobody will ask for it
        # Autograd's; a node that dies unused takes its own along.
        self.handles: list[weakref.ref[Handle]] | None = None
        # What of it was written, on memory of its own: see `written_slices.py`.
        self.part: weakref.ref[TapeValue] | None = None
        # In which pass, of how many handles, so many at the end are not pending.
        self.unpacked = (0, 0, 0)

    def unmoved_forward_tensor(self) -> torch.Tensor | None:
        """The tensor that the forward saw, if it lives and still lies where it lay: `.data =` may
        have moved it.
        """
        tensor = self.forward_tensor()
        if (
            tensor is None
            or storage_key(tensor) != self.key
            or geometry_of(tensor) != self.geometry
        ):
            return None
        return tensor

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


class TapeOperation:
    """One recorded call: enough to make its results again."""

    __slots__ = (
        "__weakref__", "args", "func", "index", "info", "inputs", "kwargs", "outputs",
        "random_state", "slices", "unwanted", "written",
    )  # fmt: skip

    def __init__(
        self, index: int, func: Any, info: Any, args: Any, kwargs: Any, inputs: list[TapeValue]
    ) -> None:
        self.index = index
        self.func = func
        self.info = info
        self.args = args  # as called, with a TapeValue or a Slice in the place of every tensor
        self.kwargs = kwargs
        self.inputs = inputs  # each once
        self.outputs: (
            list[weakref.ref[TapeValue] | None] | deque[weakref.ref[TapeValue] | None]
        ) = []  # None: kept, and no value of the tape
        self.unwanted = 0  # as a value's: none of its results is wanted
        self.written: tuple[TapeValue, ...] = ()  # the versions that it overwrites
        self.slices = (
            False  # whether it writes to a small part of a storage: see `written_slices.py`
        )
        self.random_state: Any = None  # of the generator that it draws from, before it did

    @property
    def name(self) -> str:
        return str(self.func)


class Slice:
    """A tensor argument that is not the whole of what its value's operation returned."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: TapeValue, geometry: Geometry) -> None:
        self.value = value
        self.geometry = geometry


class ParameterRef:
    """A tensor argument that is a parameter, or a view of one: it is there anyway, and only checked
    at replay.

    `content` is an alias of what was read: `.data =` gives the parameter another storage, but not
    the alias. Writes to it count up the version of `source`, the argument itself; None if the
    content is a copy that nobody else has.
    """

    __slots__ = ("__weakref__", "content", "source", "version")

    def __init__(self, argument: torch.Tensor) -> None:
        # `.data` takes a third of the time. Of a subclass it would be one, too, and dispatch modes
        # would see it as an operation of the forward.
        is_plain = type(argument) in _PLAIN and not dispatch_modes()
        self.content = argument.data if is_plain else detached(argument)
        self.source: torch.Tensor | None = argument
        self.version = argument._version

    @property
    def overwritten(self) -> bool:
        """Whether somebody has written to it since it was read."""
        return self.source is not None and self.source._version != self.version


class Scratch:
    """An argument whose content is not read but written to: replay gives it a throw-away tensor."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


class Tape:
    """What the handles of one recording share."""

    __slots__ = ("__weakref__", "epoch", "lock", "on_held", "pass_number", "retains")

    def __init__(self, lock: Any = None) -> None:
        # Accelerators' backward passes unpack in threads of their own.
        self.lock = threading.RLock() if lock is None else lock
        self.pass_number = 1
        self.epoch = _next_epoch()  # what was found unwanted stays so until the next one
        self.retains = True  # what a sweep makes and the rest of the pass needs
        # Told of values that may be evicted from now on.
        self.on_held: Callable[[Iterable[TapeValue]], None] | None = None
        process_settings.tape_begins(self)

    def __del__(self) -> None:
        try:
            process_settings.tape_ends(self)
        except BaseException:  # Ctrl-C, which Python drops in a destructor
            process_settings.tape_ends(self)
            raise

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
    """What autograd keeps in the place of a tensor."""

    __slots__ = ("__weakref__", "geometry", "pass_number", "tape", "value")

    def __init__(self, tape: Tape, value: TapeValue, geometry: Geometry | None) -> None:
        self.tape = tape
        self.value = value
        self.geometry = geometry
        self.pass_number = 0  # the pass in which it was last unpacked


class OfSubclass:
    """What autograd keeps in the place of a tensor of another class than torch's own."""

    __slots__ = ("attributes", "content", "kind")

    def __init__(self, content: Any, like: torch.Tensor) -> None:
        self.content = content  # a handle, or a kept tensor with its version
        self.kind = type(like)
        self.attributes = dict(vars(like))
