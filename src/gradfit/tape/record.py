"""Writes down what a forward pass does, and decides at each saved tensor whether autograd gets it or a handle.

Rules, cited below where they are obeyed:

1. A storage is known by its address, and only while it lives: a watcher takes the address out when it dies.
2. Views are not recorded. Arguments are remembered as (value, geometry), whatever chain of views led to them.
3. A storage that the tape has not seen being made is a *root*: held as it is, never rebuilt.
4. A write makes a new value. Whoever still needs the old one gets it rebuilt, or a copy made just before the write.
5. What cannot be replayed is not recorded, so that its results become roots: kept, never guessed. That goes for
   memory handed out uninitialised too, if somebody reads it before a recorded operation has written to it.
6. Backward passes are not recorded, even inside a scope.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch import FakeTensor, TorchDispatchMode, detached, detached_in_dispatch, graph_task_id, storage_key
from gradfit.errors import ActivationOverwritten
from gradfit.tape import replay, rng
from gradfit.tape.graph import Handle, Operation, Segment, Slice, Tape, Value, geometry_of, shaped
from gradfit.tape.ops import LOAD, OpInfo, info_of

# Rebuild it; let autograd have it; let autograd have it until it is evicted; move it out and back.
DROP, KEEP, HOLD, OFFLOAD = 0, 1, 2, 3

_counter = itertools.count()
_NO_KWARGS: dict[str, Any] = {}


class Policy(Protocol):
    """Decides, for every result of every recorded operation, whether it is kept."""

    def choose(self, func: Any, results: list[torch.Tensor]) -> list[int] | None:
        """One of DROP, KEEP, HOLD and OFFLOAD for each result; None drops all."""

    def offload(self, tensor: torch.Tensor) -> Any:
        """Move a result out; returns the function that brings it back. Called where `choose` said OFFLOAD."""


class _Watcher(weakref.ref):  # type: ignore[type-arg]
    """Rule 1: takes a dead storage's address out of the table."""

    __slots__ = ("key",)


class Untrackable(Exception):
    """A tensor without a storage of its own: sparse, a wrapper subclass, a functorch level."""


_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}  # a fake one has a storage of its own too
_default_dispatch = torch.Tensor.__torch_dispatch__


def key_of(tensor: torch.Tensor) -> int:
    """A tensor's storage address, or `Untrackable`."""
    kind = type(tensor)
    if kind not in _PLAIN and kind.__torch_dispatch__ is not _default_dispatch:
        raise Untrackable
    if tensor.layout is not torch.strided:
        raise Untrackable
    try:
        return storage_key(tensor)
    except (RuntimeError, NotImplementedError):
        raise Untrackable from None


class Recorder(TorchDispatchMode):
    """A dispatch mode plus saved-tensor hooks. Enter it around the code to record; `segment` is where it is."""

    def __init__(self, segment: Segment, policy: Policy | None = None) -> None:
        super().__init__()
        self.segment = segment
        self.policy = policy
        self.planned = False  # segments come from a plan and are not to be widened
        self.tape = Tape(threading.RLock())
        self._made: dict[int, Value] = {}  # by storage: the newest version, made by a recorded operation
        self._kept: set[int] = set()  # storages that autograd has, for the statistics
        self._roots: dict[int, weakref.ref[Value]] = {}  # by storage; the operations that read them own them
        made = self._made

        def forget(watcher: Any) -> None:  # must not hold the recorder: the storages would
            made.pop(watcher.key, None)

        self._forget = forget
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Any:
        self._hooks = saved_tensors_hooks(self.pack, unpack)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            if self._hooks is not None:
                self._hooks.__exit__(*error)
            self._hooks = None
            self._made.clear()  # the graph's saved tensors hold `pack`, and so this object
            self._roots.clear()

    # ------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or _NO_KWARGS
        info = info_of(func)
        if info.view or graph_task_id() != -1:  # rules 2 and 6
            return func(*args, **kwargs)
        state = rng.capture(args, kwargs) if info.random else None
        if info.writes:
            return self._write(func, info, args, kwargs, state)
        out = func(*args, **kwargs)
        fresh = fresh_results(out, args)
        if fresh:
            choices = self.policy.choose(func, [t for _, t, _ in fresh]) if self.policy is not None else None
            if info.recordable and (choices is None or choices.count(KEEP) != len(choices)):
                self._record(func, info, args, kwargs, state, fresh, choices)
        return out

    def _record(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        state: Any,
        fresh: list[tuple[int, torch.Tensor, int]],
        choices: list[int] | None,
    ) -> None:
        inputs: list[Value] = []
        try:
            op = Operation(
                next(_counter),
                func,
                info,
                self._template(args, inputs),
                self._template_kwargs(kwargs, inputs),
                inputs,
            )
        except Untrackable:  # rule 5
            return
        if info.scratch:
            _replace_running_statistics(op)
        op.rng = state
        if any(key in self._made or self._root(key) is not None for _, _, key in fresh):
            return  # it gave back a tensor that was there before: nothing new was made
        self._adopt(op, fresh, choices)
        self._register(op)

    def _adopt(self, op: Operation, fresh: list[tuple[int, torch.Tensor, int]], choices: list[int] | None) -> None:
        """Make a value of each new storage."""
        for number, (position, tensor, key) in enumerate(fresh):
            choice = DROP if choices is None else choices[number]
            if choice == KEEP:
                op.outputs.append(None)
                continue
            value = Value(key, geometry_of(tensor), self.segment)
            value.op = op
            value.position = position
            value.uninitialised = op.info.uninitialised
            value.natural = weakref.ref(tensor)
            if choice == HOLD:
                value.evictable = True
            elif choice == OFFLOAD and self.policy is not None and _fills_storage(tensor):
                value.op = Operation(op.index, self.policy.offload(tensor), LOAD, [], _NO_KWARGS, [])
                value.op.outputs.append(weakref.ref(value))
                value.position = 0
                op.outputs.append(None)
                self._watch(value, tensor)
                continue
            self._watch(value, tensor)
            op.outputs.append(weakref.ref(value))

    def _register(self, op: Operation) -> None:
        reference = weakref.ref(op)
        segment = self.segment
        for value in op.inputs:
            value.users.append(reference)
            # It escapes from where it was made: whoever encloses both rebuilds it.
            if value.segment is not segment and not self.planned:
                value.segment = value.segment.common(segment)

    def _watch(self, value: Value, tensor: torch.Tensor) -> None:
        watcher = _Watcher(tensor.untyped_storage(), self._forget)
        watcher.key = value.key
        value.gone = watcher
        self._made[value.key] = value

    # ------------------------------------------------------------------------------------------ arguments

    def _template(self, args: Any, inputs: list[Value]) -> list[Any]:
        template = []
        for argument in args:
            if isinstance(argument, torch.Tensor):
                template.append(self._reference(argument, inputs))
            elif isinstance(argument, list | tuple):
                template.append(self._template(argument, inputs))
            else:
                template.append(argument)
        return template

    def _template_kwargs(self, kwargs: Any, inputs: list[Value]) -> dict[str, Any]:
        if not kwargs:
            return _NO_KWARGS
        names = list(kwargs)
        return dict(zip(names, self._template(kwargs.values(), inputs), strict=True))

    def _reference(self, tensor: torch.Tensor, inputs: list[Value]) -> Value | Slice:
        key = key_of(tensor)
        value = self._made.get(key)
        if value is None:
            value = self._root(key)
            if value is None:  # rule 3
                value = Value(key, geometry_of(tensor), self.segment)
                self._hold(value, tensor)
        elif value.uninitialised:
            self._hold_uninitialised(value, tensor)
        inputs.append(value)
        if value.natural is not None and value.natural() is tensor:
            return value
        geometry = geometry_of(tensor)
        return value if geometry == value.geometry else Slice(value, geometry)

    def _root(self, key: int) -> Value | None:
        reference = self._roots.get(key)
        return None if reference is None else reference()

    def _hold_uninitialised(self, value: Value, tensor: torch.Tensor) -> None:
        """Rule 5: somebody reads memory that no recorded operation wrote; what is in it now is all there is."""
        self._made.pop(value.key, None)
        value.gone = None
        value.uninitialised = False
        value.op = None
        value.geometry = geometry_of(tensor)
        self._hold(value, tensor)

    def _hold(self, value: Value, tensor: torch.Tensor) -> None:
        # A leaf can be held itself: it has no graph that could hold the tape in turn.
        value.tensor = tensor if tensor.is_leaf else detached_in_dispatch(tensor)
        value.version = tensor._version
        value.natural = weakref.ref(tensor)
        self._roots[value.key] = weakref.ref(value)

    # ------------------------------------------------------------------------------------------ writes

    def _write(self, func: Any, info: OpInfo, args: Any, kwargs: Any, state: Any) -> Any:
        """Rule 4."""
        targets = written_tensors(info, args, kwargs)
        try:
            keys = [key_of(target) for target in targets]
        except Untrackable:
            return func(*args, **kwargs)
        inputs: list[Value] = []
        olds = [self._made.get(key) or self._root(key) for key in keys]
        op: Operation | None = None
        if info.recordable and len(set(keys)) == len(keys) and all(old is not None for old in olds):
            op = self._open_write(func, info, args, kwargs, inputs, olds)
        for old in olds:
            if old is not None:
                _save_before_write(old)
        out = func(*args, **kwargs)
        fresh = [entry for entry in fresh_results(out, args) if entry[2] not in keys]
        choices = None
        if self.policy is not None and (targets or fresh):
            choices = self.policy.choose(func, [*targets, *(t for _, t, _ in fresh)])
        if op is None or (choices is not None and KEEP in choices):
            for key in keys:  # rule 5: from here on it is a root
                self._made.pop(key, None)
                self._roots.pop(key, None)
            return out
        op.rng = state
        for number, (target, key, old) in enumerate(zip(targets, keys, olds, strict=True)):
            if old is not None:
                old.gone = None
                old.natural = None
            self._roots.pop(key, None)
            value = Value(key, geometry_of(target), self.segment)
            value.op = op
            value.position = -1 - number
            value.natural = weakref.ref(target)
            if choices is not None and choices[number] == HOLD:
                value.evictable = True
            self._watch(value, target)
            op.outputs.append(weakref.ref(value))
        self._adopt(op, fresh, None)
        self._register(op)
        return out

    def _open_write(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, inputs: list[Value], olds: list[Any]
    ) -> Operation | None:
        untouched = [old for old in olds if old.uninitialised] if not info.reads_written else []
        for old in untouched:
            old.uninitialised = False  # it is about to be written, not read
        try:
            op = Operation(
                next(_counter),
                func,
                info,
                self._template(args, inputs),
                self._template_kwargs(kwargs, inputs),
                inputs,
            )
        except Untrackable:
            return None
        op.written = tuple(olds)
        return op

    # ------------------------------------------------------------------------------------------ saved tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves `tensor`: give it a handle if the tape can make the tensor again."""
        try:
            value = self._made.get(key_of(tensor))
        except Untrackable:
            return (tensor.detach() if tensor.grad_fn is not None else tensor, None)
        if value is not None and value.uninitialised:
            self._made.pop(value.key)  # rule 5
            value = None
        if value is None or tensor.is_neg() or tensor.is_conj():
            if tensor.is_leaf:
                return (tensor, tensor._version)
            self._note_kept(tensor)
            return (detached(tensor), tensor._version)
        natural = None if value.natural is None else value.natural()
        geometry = None
        if natural is not tensor:
            geometry = geometry_of(tensor)
            if geometry == value.geometry:
                geometry = None
        if value.handles == 0:
            self._first_pack(value, tensor)
        value.handles += 1
        return Handle(self.tape, value, geometry)

    def keep(self, tensor: torch.Tensor) -> None:
        """Make a value of the tape a root: it is held from now on, and replays start from it."""
        try:
            value = self._made.pop(key_of(tensor), None)
        except Untrackable:
            return
        if value is not None:
            value.gone = None
            value.op = None
            value.uninitialised = False
            natural = None if value.natural is None else value.natural()
            value.tensor = detached(natural) if natural is not None else shaped(detached(tensor), value.geometry)
            value.version = tensor._version
            self._roots[value.key] = weakref.ref(value)
            self._note_kept(tensor)

    def _note_kept(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._kept:  # autograd saves the same storage several times
            self._kept.add(key)
            if self.segment.scope is not None:
                self.segment.scope.note_kept(tensor.untyped_storage().nbytes())

    def _first_pack(self, value: Value, tensor: torch.Tensor) -> None:
        scope = self.segment.scope
        if value.evictable:
            natural = None if value.natural is None else value.natural()
            value.tensor = shaped(detached(tensor), value.geometry) if natural is None else detached(natural)
            value.version = tensor._version
        elif scope is not None:
            scope.note_freed(tensor.untyped_storage().nbytes())


def unpack(packed: Any) -> torch.Tensor:
    """Autograd wants it back: the kept tensor, if nobody wrote to it, or a replay."""
    if type(packed) is Handle:
        return replay.take(packed)
    tensor: torch.Tensor = packed[0]
    if packed[1] is not None and tensor._version != packed[1]:
        raise ActivationOverwritten(
            f"A tensor of shape {tuple(tensor.shape)} that backward needs was modified in place after it was saved "
            f"(it is at version {tensor._version}, version {packed[1]} was expected). "
            "Write `x = x + y` instead of `x += y` there."
        )
    return tensor


def _fills_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_non_overlapping_and_dense() and tensor.nbytes == tensor.untyped_storage().nbytes()


def fresh_results(out: Any, args: Any) -> list[tuple[int, torch.Tensor, int]]:
    """(position, tensor, storage) of results that do not lie in an argument's storage."""
    if isinstance(out, torch.Tensor):
        flat: Iterator[Any] | tuple[Any, ...] = (out,)
    elif isinstance(out, list | tuple):
        flat = replay.flatten(out)
    else:
        return []
    fresh = []
    try:
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor):
                key = key_of(tensor)
                if not any(isinstance(a, torch.Tensor) and key_of(a) == key for a in args):
                    fresh.append((position, tensor, key))
    except Untrackable:  # rule 5
        return []
    return fresh


def written_tensors(info: OpInfo, args: Any, kwargs: Any) -> list[torch.Tensor]:
    targets: list[torch.Tensor] = []
    for where in info.writes:
        if isinstance(where, str):
            argument = kwargs.get(where)
        else:
            argument = args[where] if where < len(args) else None
        if isinstance(argument, torch.Tensor):
            targets.append(argument)
        elif isinstance(argument, list | tuple):
            targets.extend(item for item in argument if isinstance(item, torch.Tensor))
    return targets


def _save_before_write(old: Value) -> None:
    """Rule 4: an old version that is held by reference is about to be lost."""
    if old.tensor is None:
        return
    if old.op is not None:
        old.tensor = None  # it can be rebuilt
    elif old.handles or any(user() is not None for user in old.users):
        old.tensor = replay.copy_storage(old.tensor, old.geometry)
        old.version = -1


def _replace_running_statistics(op: Operation) -> None:
    """Replay must not update running statistics a second time: give it scratch tensors, whose content is not read."""
    if len(op.args) > 5 and op.args[5] is False:  # evaluation mode: they are ordinary inputs
        return
    for position in op.info.scratch:
        reference = op.args[position]
        if isinstance(reference, Value | Slice):
            op.args[position] = replay.Scratch(reference.geometry)
            op.inputs.remove(reference if isinstance(reference, Value) else reference.value)
