"""Writes down what a forward pass does, and decides at each saved tensor whether autograd gets it or a handle.

Rules, cited below where they are obeyed:

1. A storage is known by its address, and only while it lives: a watcher takes the address out when it dies.
2. Views are not recorded. Arguments are remembered as (value, geometry), whatever chain of views led to them.
3. A storage that the tape has not seen being made is a *root*: held as it is, never rebuilt. Roots are owned by the
   operations that read them: one that is alive is needed.
4. A write makes a new value. Whoever still needs the old one gets it rebuilt, or a copy made just before the write.
5. What cannot be replayed is not recorded, so that its results become roots: kept, never guessed. That goes for
   memory handed out uninitialised too, if somebody reads it before a recorded operation has written to it, and for
   storages that somebody the recorder does not see wrote to (their version counter, or their content, tells).
6. Backward passes are not recorded, even inside a scope.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import increment_version, saved_tensors_hooks

from gradfit._torch import DispatchMode, base_of, graph_task_id, storage_key
from gradfit.errors import UnsupportedOp
from gradfit.tape import collector, replay, rng
from gradfit.tape.graph import Leaf, Operation, Segment, Slice, Value, geometry_of, nothing
from gradfit.tape.known import ATOMS, NO_KWARGS, UNCOUNTED, save_before_write
from gradfit.tape.ops import LOAD, OpInfo, info_of
from gradfit.tape.save import Saver, unpack
from gradfit.tape.storage import (
    Untrackable,
    Watcher,
    fills_storage,
    flatten,
    fresh_results,
    key_of,
    place_of,
    written_tensors,
)
from gradfit.tape.units import watch_units

__all__ = [
    "DROP", "HOLD", "KEEP", "OFFLOAD", "Policy", "Recorder", "Untrackable", "fresh_results", "key_of", "unpack",
    "written_tensors",
]  # fmt: skip

# Rebuild it; let autograd have it; let autograd have it until it is evicted; move it out and back.
DROP, KEEP, HOLD, OFFLOAD = 0, 1, 2, 3

_counter = itertools.count()
_Fresh = list[tuple[int, torch.Tensor, int]]
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_reference_to = weakref.ref


class Policy(Protocol):
    """Decides, for every result of every recorded operation, whether it is kept."""

    def choose(self, func: Any, results: list[torch.Tensor]) -> list[int] | None:
        """One of DROP, KEEP, HOLD and OFFLOAD for each result; None drops all."""


class OffloadingPolicy(Policy, Protocol):
    """One that also says OFFLOAD."""

    def offload(self, tensor: torch.Tensor) -> Any:
        """Move a result out; returns the function that brings it back."""


class Recorder(Saver, DispatchMode):
    """A dispatch mode plus saved-tensor hooks. Enter it around the code to record; `segment` is where it is."""

    def __init__(self, segment: Segment, policy: Policy | None = None) -> None:
        DispatchMode.__init__(self)
        Saver.__init__(self)
        self.segment = segment
        self.policy = policy
        self.planned = False  # segments come from a plan and are not to be widened
        self.watching: Any = None  # called with every operation that is recorded
        self._hooks: saved_tensors_hooks | None = None
        self._units: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Any:
        self._hooks = saved_tensors_hooks(self.pack, unpack)
        self._hooks.__enter__()
        self._units = watch_units(self.keep)
        collector.hold_back()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            collector.let_go()
            if self._hooks is not None:
                self._hooks.__exit__(*error)
            self._hooks = None
            while self._units:
                self._units.pop().remove()
            self._made.clear()  # the graph's saved tensors hold `pack`, and so this object
            self._roots.clear()
            self.policy = self.watching = None

    # ------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = info_of(func)
        if info.view:  # rule 2
            return info.call(*args, **kwargs) if kwargs else info.call(*args)
        if kwargs is None:
            kwargs = NO_KWARGS
        if graph_task_id() != -1:  # rule 6
            if info.writes:
                targets = written_tensors(info, args, kwargs)
                self._lose(targets)
                if info.writes_lists:
                    increment_version(targets)
            return info.call(*args, **kwargs)
        if not info.simple:
            return self._special(func, info, args, kwargs)
        out = info.call(*args, **kwargs)
        self._record_simple(func, info, args, kwargs, out)
        return out

    def _special(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        if info.collective:
            self._lose(_all_tensors(args, kwargs))
        state = None
        if info.random:
            if rng.draws(info, args, kwargs):
                state = rng.capture(args, kwargs)
            elif info.dry:
                out = info.call(*args, **kwargs)
                self._record_simple(func, info, args, kwargs, out)
                return out
        if info.writes:
            if info.writes_self and type(args[0]) is _Tensor:
                return self._write_self(func, info, args, kwargs, state)
            return self._write(func, info, args, kwargs, state)
        if info.scratch and _in_training(args):
            self._lose([args[position] for position in info.scratch if isinstance(args[position], _Tensor)])
        out = info.call(*args, **kwargs)
        fresh = fresh_results(out, args)
        if fresh:
            if info.dtype and "dtype" not in kwargs:
                kwargs = {**kwargs, "dtype": fresh[0][1].dtype}  # the default dtype may be another one at replay
            self._record(func, info, args, kwargs, state, fresh)
        return out

    def _record_simple(self, func: Any, info: OpInfo, args: Any, kwargs: Any, out: Any) -> None:
        """`_record` for what nearly all operations are; every microsecond here is paid hundreds of times per step."""
        made = self._made
        inputs: list[Value] = []
        template: list[Any] = []
        fresh: _Fresh = []
        try:
            for argument in args:
                kind = type(argument)
                if kind is _Tensor:
                    value = made.get(storage_key(argument))
                    if (
                        value is not None
                        and value.natural() is argument
                        and value.seen == argument._version  # type: ignore[union-attr]
                        and value.fragile is None
                    ):
                        if value not in inputs:
                            inputs.append(value)
                        template.append(value)
                    else:
                        template.append(self._reference(argument, inputs))
                elif kind is _Parameter and argument.requires_grad:
                    template.append(Leaf(argument, argument._version, storage_key(argument), None))
                elif kind in ATOMS:
                    template.append(argument)
                else:
                    template.append(self._template((argument,), inputs)[0])
            named = self._template_kwargs(kwargs, inputs) if kwargs else NO_KWARGS
            for position, tensor in enumerate((out,) if type(out) is _Tensor else _results(out)):
                if type(tensor) is _Tensor:
                    key = storage_key(tensor)
                    for value in inputs:
                        if value.key == key:
                            break
                    else:
                        fresh.append((position, tensor, key))
                elif isinstance(tensor, _Tensor):
                    raise Untrackable
        except (Untrackable, NotImplementedError):  # rule 5
            found = fresh_results(out, args)
            if found and self.policy is not None:
                self.policy.choose(func, [tensor for _, tensor, _ in found])
            return
        if not fresh:
            return
        choices = None
        if self.policy is not None:
            choices = self.policy.choose(func, [tensor for _, tensor, _ in fresh])
            if choices is not None and choices.count(KEEP) == len(choices):
                return
        for _, _, key in fresh:
            if key in made or self._root(key) is not None:
                return  # it gave back a tensor that was there before: nothing new was made
        op = Operation(next(_counter), func, info, template, named, inputs)
        self._adopt(op, fresh, choices)
        self._register(op)

    def _record(self, func: Any, info: OpInfo, args: Any, kwargs: Any, state: Any, fresh: _Fresh) -> None:
        choices = None
        if self.policy is not None:
            choices = self.policy.choose(func, [tensor for _, tensor, _ in fresh])
        if not info.recordable or (choices is not None and choices.count(KEEP) == len(choices)):
            return
        op = self._open(func, info, args, kwargs)
        if op is None or any(key in self._made or self._root(key) is not None for _, _, key in fresh):
            return  # not replayable, or it gave back a tensor that was there before: nothing new was made
        if info.scratch and _in_training(args):
            _replace_running_statistics(op)
        op.rng = state
        self._adopt(op, fresh, choices)
        self._register(op)

    def _open(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Operation | None:
        inputs: list[Value] = []
        try:
            template = self._template(args, inputs)
            named = self._template_kwargs(kwargs, inputs)
        except Untrackable:  # rule 5
            return None
        return Operation(next(_counter), func, info, template, named, inputs)

    def _adopt(self, op: Operation, fresh: _Fresh, choices: list[int] | None) -> None:
        """Make a value of each new storage."""
        for number, (position, tensor, key) in enumerate(fresh):
            choice = DROP if choices is None else choices[number]
            if choice == KEEP or key in self._made:  # two results may share a storage: then it is one value
                op.outputs.append(None)
                continue
            value = self._new(op, tensor, key, position, choice)
            if op.info.fragile is not None:
                value.fragile = op.info.fragile
            if choice == OFFLOAD and fills_storage(tensor):
                load = cast(OffloadingPolicy, self.policy).offload(tensor)
                value.op = Operation(op.index, load, LOAD, [], NO_KWARGS, [])
                value.op.outputs.append(weakref.ref(value))
                value.position = 0
                op.outputs.append(None)
            else:
                op.outputs.append(weakref.ref(value))

    def _new(self, op: Operation, tensor: torch.Tensor, key: int, position: int, choice: int) -> Value:
        value = Value(key, geometry_of(tensor), self.segment)
        value.op = op
        value.position = position
        if tensor.is_inference():
            value.seen = UNCOUNTED
        else:
            value.seen = tensor._version
            value.natural = _reference_to(tensor)
        if choice == HOLD:
            value.evictable = True
        watcher = Watcher(tensor.untyped_storage(), self._forget)
        watcher.key = key
        value.gone = watcher
        self._made[key] = value
        return value

    def _register(self, op: Operation) -> None:
        reference = _reference_to(op)
        segment = self.segment
        for value in op.inputs:
            if value.op is not None:
                if value.users:
                    value.users.append(reference)  # type: ignore[attr-defined]
                else:
                    value.users = [reference]
                # It escapes from where it was made: whoever encloses both rebuilds it.
                if value.segment is not segment and not self.planned:
                    value.segment = value.segment.common(segment)
        if self.watching is not None:
            self.watching(op)

    # ------------------------------------------------------------------------------------------ writes

    def _write_self(self, func: Any, info: OpInfo, args: Any, kwargs: Any, state: Any) -> Any:
        """`_write` for what nearly all writes are: a method on the very tensor that an operation has returned."""
        target: torch.Tensor = args[0]
        old = None if target.is_inference() else self._made.get(storage_key(target))
        if (
            old is None
            or old.natural() is not target
            or (old.seen != target._version and old.seen != -1)
            or (old.fragile is not None and info.reads_written)
        ):
            return self._write(func, info, args, kwargs, state)
        old.fragile = None
        inputs = [old]
        op: Operation | None = None
        try:
            template = [old, *self._template(args[1:], inputs)]
            op = Operation(next(_counter), func, info, template, self._template_kwargs(kwargs, inputs), inputs)
        except Untrackable:  # rule 5
            pass
        if old.tensor is not None:
            save_before_write(old)
        out = info.call(*args, **kwargs)
        choices = None if self.policy is None else self.policy.choose(func, [target])
        key, watcher, natural = old.key, old.gone, old.natural
        old.gone, old.natural = None, nothing
        if op is None or (choices is not None and choices[0] == KEEP):
            self._made.pop(key, None)
            return out
        op.rng = state
        op.written = (old,)
        value = Value(key, old.geometry, self.segment)
        value.op = op
        value.position = -1
        value.natural = natural
        value.gone = watcher
        if choices is not None and choices[0] == HOLD:
            value.evictable = True
        self._made[key] = value
        op.outputs.append(_reference_to(value))
        self._register(op)
        return out

    def _write(self, func: Any, info: OpInfo, args: Any, kwargs: Any, state: Any) -> Any:
        """Rule 4."""
        targets = written_tensors(info, args, kwargs)
        if info.writes_lists:
            _refuse_views(func, targets)
        try:
            keys = [key_of(target) for target in targets]
        except Untrackable:
            self._lose(targets)
            return info.call(*args, **kwargs)
        if not targets:
            return info.call(*args, **kwargs)
        olds = [self._present(key, target) for key, target in zip(keys, targets, strict=True)]
        op: Operation | None = None
        if info.recordable and None not in olds and len(set(keys)) == len(keys):
            if not info.reads_written:
                for old in olds:
                    old.fragile = None  # type: ignore[union-attr]  # written to, not read
            op = self._open(func, info, args, kwargs)
        for old in olds:
            if old is not None:
                save_before_write(old)
        out = info.call(*args, **kwargs)
        if info.writes_lists:
            increment_version(targets)  # torch does not, under a dispatch mode
        fresh = [] if out is targets[0] else [entry for entry in fresh_results(out, args) if entry[2] not in keys]
        choices = None
        if self.policy is not None:
            choices = self.policy.choose(func, [*targets, *(t for _, t, _ in fresh)])
        for key, old in zip(keys, olds, strict=True):
            self._made.pop(key, None)
            self._roots.pop(key, None)
            if old is not None:
                old.gone = None
                old.natural = nothing
        if op is None or (choices is not None and KEEP in choices):
            return out  # rule 5: from here on it is a root
        op.rng = state
        op.written = tuple(olds)  # type: ignore[arg-type]
        for number, (target, key) in enumerate(zip(targets, keys, strict=True)):
            value = self._new(op, target, key, -1 - number, DROP if choices is None else choices[number])
            value.seen = -1  # autograd counts the version up when this has returned, or not at all
            op.outputs.append(weakref.ref(value))
        self._adopt(op, fresh, None)
        self._register(op)
        return out


def _results(out: Any) -> Any:
    """The results of an operation, in order."""
    if type(out) is tuple and list not in map(type, out):
        return out
    return flatten((out,))


def _refuse_views(func: Any, targets: list[torch.Tensor]) -> None:
    """torch forgets the history of a view that a `_foreach` operation writes to under any dispatch mode."""
    if torch.is_grad_enabled() and any(t.requires_grad and base_of(t) is not None for t in targets):
        raise UnsupportedOp(
            f"{func} writes to a view of a tensor that requires a gradient, and torch loses that gradient inside a "
            "scope. Call the operation on each tensor, or on copies."
        )


def _all_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten((args, tuple(kwargs.values()))) if isinstance(leaf, _Tensor)]


def _in_training(args: Any) -> bool:
    return not (len(args) > 5 and args[5] is False)  # in evaluation mode running statistics are ordinary inputs


def _replace_running_statistics(op: Operation) -> None:
    """Replay must not update running statistics a second time: give it scratch tensors, whose content is not read."""
    for position in op.info.scratch:
        reference = op.args[position]
        if reference is not None:
            value = reference.value if isinstance(reference, Slice) else reference
            op.args[position] = replay.Scratch(reference.geometry or place_of(cast(torch.Tensor, value.tensor)))
            if value in op.inputs:
                op.inputs.remove(value)
