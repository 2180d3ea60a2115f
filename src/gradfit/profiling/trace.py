"""Watches one micro-batch run: every operation, what it makes, when that dies, and what each
backward node asks for.

The run is made with everything dropped and replayed (`RebuildAll`), for two reasons: values die
when Python lets go of them, which is what a planner must know, and a model can be watched in far
less memory than it needs plainly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradfit import _torch_distributed as distributed
from gradfit import _torch_fsdp as fsdp
from gradfit._torch import (
    after_accumulation,
    current_node,
    graph_task_id,
    let_go_of_graph,
    storage_key,
)
from gradfit._torch_compile import CompiledGraph, called_module
from gradfit._torch_listen import unseen, untraced
from gradfit._torch_storage import StorageWatch, watch_storage
from gradfit.devices import devices_of, wait_for
from gradfit.interrupts import uninterrupted
from gradfit.profiling.clock import EventClock, OperationClock, Timed
from gradfit.source_line import source_line
from gradfit.tape import replay
from gradfit.tape.dropout_mask import MASK, draws_mask, pack, packed_bytes, packing_bytes
from gradfit.tape.listener import OperationListener
from gradfit.tape.operators import info_of
from gradfit.tape.rebuild_all import RebuildAll
from gradfit.tape.recorder import Recorder
from gradfit.tape.saved_tensors import unpack
from gradfit.tape.shape_only import without_content
from gradfit.tape.storage import (
    Untrackable,
    copying,
    flatten,
    fresh_results,
    key_of,
    written_tensors,
)
from gradfit.tape.stream import new_bytes, results_of
from gradfit.tape.value_names import observing_names
from gradfit.tape.values import Handle, Segment, Tape
from gradfit.tree import leaves


@dataclass
class TracedValue:
    nbytes: int
    operation: int | None
    storage: int
    dies: int = -1
    overwritten: bool = False
    key: int = 0  # the storage's address, as long as it lives


@dataclass
class TracedOp:
    name: str
    inputs: tuple[int, ...]
    replayable: bool
    random: bool
    module: str
    source: str
    outputs: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    seconds: float = 0.0
    gathered_bytes: int = 0
    workspace_bytes: int = 0


@dataclass
class TracedNode:
    name: str
    before_bytes: int
    peak_bytes: int
    needs: list[int] = field(default_factory=list)
    after_bytes: int = 0
    seconds: float = 0.0
    gradient_bytes: int = 0
    # of a graph that lets go of what it was given as it goes: see `_BytesInside.takes`
    passes: list[_Inside] = field(default_factory=list)


class _Inside(NamedTuple):
    """What happened inside of one operation: bytes that came, or went with a value."""

    before_bytes: int
    changes: list[tuple[int, int]]  # bytes, and the value that went, or _NO_VALUE

    def peak_bytes(self, needed_later: set[int]) -> int:
        """Beside what it was given, with all of these values still there."""
        went = [size for size, value in self.changes if value not in needed_later]
        return self.before_bytes + max(0, *accumulate(went, initial=0))


_NO_VALUE = -1


class _WatchedStorage(StorageWatch):
    """Tells the trace when a storage dies."""

    __slots__ = ("nbytes", "storage")
    nbytes: int
    storage: int


class _BytesInside:
    """What generated code holds at most, while it is one operation: its results among that."""

    def __init__(self) -> None:
        self._now = self._peak = 0
        self._live: dict[int, _WatchedStorage] = {}
        self._given: dict[int, _WatchedStorage] = {}
        self._changes: list[tuple[int, int]] = []

    def takes(self, tensors: list[Any], values: dict[int, int]) -> None:
        """It is about to get these, in a list that it empties: what autograd has saved, of these
        values, may die before the operation ends.
        """
        self._changes.clear()
        for tensor in tensors:
            key = storage_key(tensor) if _has_storage(tensor) else None
            if key in values and key not in self._given:
                storage = tensor.untyped_storage()
                watcher = watch_storage(storage, self._given_died, _WatchedStorage)
                watcher.key, watcher.nbytes = key, storage.nbytes()
                watcher.storage = values[key]
                self._given[key] = watcher

    def _given_died(self, watcher: _WatchedStorage) -> None:
        if self._given.get(watcher.key) is watcher:
            del self._given[watcher.key]
            self._changes.append((-watcher.nbytes, watcher.storage))

    def went(self, nbytes: int) -> None:
        """A gradient in flight has died."""
        self._changes.append((-nbytes, _NO_VALUE))

    def take_changes(self) -> list[tuple[int, int]]:
        """The operation has ended that took something."""
        changes, self._changes = self._changes, []
        self._given.clear()
        self.take_peak()
        return changes

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor that it has made."""
        try:
            key = key_of(tensor)
        except Untrackable:
            return
        if key not in self._live:
            storage = tensor.untyped_storage()
            watcher = watch_storage(storage, self._died, _WatchedStorage)
            watcher.key, watcher.nbytes = key, storage.nbytes()
            self._live[key] = watcher
            self._now += watcher.nbytes
            self._peak = max(self._peak, self._now)
            self._changes.append((watcher.nbytes, _NO_VALUE))

    def _died(self, watcher: _WatchedStorage) -> None:
        if self._live.get(watcher.key) is watcher:
            del self._live[watcher.key]
            self._now -= watcher.nbytes
            self._changes.append((-watcher.nbytes, _NO_VALUE))

    def take_peak(self) -> int:
        """The operation has ended."""
        peak = self._peak
        if peak:
            self._live.clear()
            self._changes.clear()
            self._now = self._peak = 0
        return peak


def _has_storage(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided


class Trace(OperationListener):
    """What one forward and backward did. Enter `watching(...)`, run them, read the lists."""

    _looks_inside = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.values: list[TracedValue] = []
        self.operations: list[TracedOp] = []
        self.nodes: list[TracedNode] = []
        # by the name that the model gave them: the values of operations, each once
        self.named_values: dict[str, dict[int, None]] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules: list[str] = []
        # by storage address: the value that is its present version
        self._newest: dict[int, int] = {}
        self._versions: dict[int, list[int]] = {}  # by storage number: its values
        self._watchers: dict[int, _WatchedStorage] = {}
        self._storages = 0
        self._forward, self._pauses = True, False
        self.batch_keys: set[int] = set()
        """The storages of the rows that are run, where these are not the batch's own."""
        self._node: Any = None
        self._nodes: list[Any] = []  # autograd's own, in the order in which they ran
        self._backward_task: int | None = None  # autograd's number for the loss's backward pass
        self._other: dict[int, _WatchedStorage] = {}  # gradients in flight
        self._other_bytes = 0  # of these, and of what FSDP2 has gathered
        self._given: dict[int, int] = {}  # by storage: values that the present node has unpacked
        # Of these, those that it writes to: they are gradients in flight once the node has ended.
        self._taken_over: dict[int, _WatchedStorage] = {}
        self._units = fsdp.units_of(model)
        self._parameters = list(model.parameters()) if self._units else []
        # by storage address: the bytes of a parameter that FSDP2 gathers, now
        self.gathered: dict[int, int] = {}
        self.gathered_peak_bytes = 0
        self._boundaries: set[int] = set()  # values that enter or leave a unit
        self._devices = devices_of(model.parameters())
        self._clock, self._events = OperationClock(), EventClock.of(self._devices)
        self.after_forward: Callable[[], None] | None = None  # called once, when it has ended
        self._inside = _BytesInside()

    # ----------------------------------------------------------------------------------- operations

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note what it does.

        In one piece: it is called for each operation of each run that is watched.
        """
        if graph_task_id() != -1:
            return self._backward_op(func, args, kwargs)
        info = info_of(func)
        if info.view or copying.now or self._pauses:
            return func(*args, **kwargs)
        inputs, trackable = self._inputs([args, list(kwargs.values())])
        targets = written_tensors(info, args, kwargs) if info.writes else []
        before = [self._present(target) for target in targets]
        out, seconds = self.run(func, args, kwargs)
        results = results_of(info, args, kwargs, out)
        inside = self._inside.take_peak()
        if not results:
            return out
        if info.shape_only and without_content(info, args, kwargs, out) is not None:
            inputs = ()
        op = TracedOp(str(func), inputs, trackable, info.random, self._module(), source_line())
        op.replayable = trackable and info.recordable and _are_told_apart(before)
        op.seconds, op.gathered_bytes = seconds, self._other_bytes
        if inside:
            op.workspace_bytes = max(0, inside - sum(map(new_bytes, results)))
        op.overwrites = tuple(dict.fromkeys(old for old in before if old is not None))
        if trackable and draws_mask(info, targets):
            self._add_bits(op, targets[0])
        self._charge(op)
        index = len(self.operations)
        written = [
            self._write(target, old, index) for target, old in zip(targets, before, strict=True)
        ]
        new = [self._result(result, index) for result in results[len(targets) :]]
        op.outputs = (*written, *new)
        self.operations.append(op)
        return out

    def _made_inside(self, tensor: torch.Tensor) -> None:
        """It is part of what the operation takes."""
        self._inside.add(tensor)

    def _add_bits(self, op: TracedOp, target: torch.Tensor) -> None:
        """An operation that draws a mask is two: one makes its bits, and this one the mask of
        them.
        """
        bits, op.seconds = self._mask(target, op.seconds)
        op.inputs = (*op.inputs, bits)
        op.workspace_bytes = packing_bytes(target)

    def _present(self, tensor: torch.Tensor) -> int | None:
        """The value that is in a tensor's storage now."""
        try:
            return self._newest.get(key_of(tensor))
        except Untrackable:
            return None

    def note_name(self, tensor: torch.Tensor, name: str) -> None:
        """The model has named a tensor: the value that it lies in, if an operation made that."""
        if graph_task_id() != -1:  # a checkpoint of torch's runs its forward again
            return
        named = self.named_values.setdefault(name, {})
        value = self._present(tensor)
        if value is not None and self.values[value].operation is not None:
            named[value] = None

    def _write(self, target: torch.Tensor, old: int | None, index: int) -> int:
        """The value that an operation has written over another."""
        try:
            key = key_of(target)
        except Untrackable:
            return self._nothing(index)
        # A write to a storage that the tape has not made cannot be replayed: it stays external.
        storage = self._external(key, target) if old is None else self.values[old].storage
        if old is not None:
            self.values[old].overwritten = True
        self._newest[key] = len(self.values)
        self._versions[storage].append(len(self.values))
        self.values.append(TracedValue(target.untyped_storage().nbytes(), index, storage))
        return self._newest[key]

    def _result(self, tensor: torch.Tensor, index: int) -> int:
        """The value that an operation has returned."""
        try:
            key = key_of(tensor)
        except Untrackable:
            return self._nothing(index)
        return self._nothing(index) if key in self._newest else self._new(key, tensor, index)

    def _nothing(self, index: int) -> int:
        """A result that is not new, or has no storage of its own: it has a number, and no bytes."""
        storage, self._storages = self._storages, self._storages + 1
        self._versions[storage] = [len(self.values)]
        self.values.append(TracedValue(0, index, storage, dies=index))
        return self._versions[storage][0]

    def _mask(self, target: torch.Tensor, seconds: float) -> tuple[int, float]:
        """The operation that makes a mask's bits: its value, and how long it takes to make the mask
        of them.
        """
        op = TracedOp(MASK, (), True, True, self._module(), source_line(), seconds=seconds)
        self._charge(op)
        op.gathered_bytes, op.workspace_bytes = self._other_bytes, packing_bytes(target)
        storage, index = self._storages, len(self.operations)
        self._storages += 1
        op.outputs = (len(self.values),)
        self.values.append(TracedValue(packed_bytes(target), index, storage, dies=index))
        self._versions[storage] = [op.outputs[0]]
        self.operations.append(op)
        return op.outputs[0], self.packing_seconds(target)

    def packing_seconds(self, mask: torch.Tensor) -> float:
        """How long it takes to make bits of a mask, and a mask of them again."""
        with unseen():
            return self.run(lambda tensor: pack(tensor)(), (mask,), {})[1]

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """An operation's result, and the seconds it took; on an accelerator these are known
        later, and charged to what is given to `_charge` next.
        """
        if self._events is not None:
            return self._events.run(func, args, kwargs), 0.0
        started = self._clock.start()
        out = func(*args, **kwargs)
        wait_for(self._devices)
        return out, self._clock.since(started)

    def _charge(self, item: Timed) -> None:
        if self._events is not None:
            self._events.charge(item)

    def _inputs(self, nests: Any) -> tuple[tuple[int, ...], bool]:
        """The values that an operation reads, and whether they are all that it reads."""
        values: dict[int, None] = {}
        trackable = True
        for tensor in flatten(nests):
            if isinstance(tensor, torch.Tensor):
                try:
                    key = key_of(tensor)
                except Untrackable:
                    trackable = False
                    continue
                if key not in self._newest:
                    self._external(key, tensor)
                values[self._newest[key]] = None
        return tuple(values), trackable

    def _external(self, key: int, tensor: torch.Tensor) -> int:
        return self.values[self._new(key, tensor, None)].storage

    def _new(self, key: int, tensor: torch.Tensor, operation: int | None) -> int:
        number = len(self.values)
        storage = self._storages
        self._storages += 1
        content = tensor.untyped_storage()
        self.values.append(TracedValue(content.nbytes(), operation, storage, key=key))
        self._versions[storage] = [number]
        self._newest[key] = number
        watcher = watch_storage(content, self._died, _WatchedStorage)
        watcher.key, watcher.nbytes, watcher.storage = key, content.nbytes(), storage
        self._watchers[key] = watcher
        return number

    def _died(self, watcher: _WatchedStorage) -> None:
        if self._watchers.get(watcher.key) is watcher:
            del self._watchers[watcher.key]
            self._newest.pop(watcher.key, None)
            if self._forward:
                for value in self._versions[watcher.storage]:
                    self.values[value].dies = len(self.operations) - 1

    def finish_forward(self) -> None:
        """Whatever is still there survives the forward pass."""
        self._forward = False
        if self.after_forward is not None:
            self.after_forward()
            self.after_forward = None

    def end_watched_forward(self) -> None:
        """The forward is over; what runs from now on, until the backward begins, is neither."""
        self.finish_forward()
        self._pauses = True

    def begin_backward(self, loss: torch.Tensor) -> None:
        """The backward begins, as it does by itself: with a gradient of the loss, 1."""
        self._pauses = False
        torch.ones_like(loss)

    def finish_backward(self) -> None:
        """Close the last node, and let go of everything that watches; the loss is gone by then."""
        self._end_node()
        self._find_peaks_inside()
        self._let_boundaries_go()
        if self._events is not None:
            self._events.read()
        self._let_survivors_go()
        self._node = self.after_forward = None
        let_go_of_graph(self._nodes)
        self._watchers.clear()
        self._other.clear()
        self._newest.clear()

    def _find_peaks_inside(self) -> None:
        """Of nodes that let go of what they were given, where no later node needs it."""
        needed_later: set[int] = set()
        for node in reversed(self.nodes):
            for inside in node.passes:
                node.peak_bytes = max(node.peak_bytes, inside.peak_bytes(needed_later))
            node.passes.clear()
            needed_later.update(node.needs)

    def _let_survivors_go(self) -> None:
        """After the last operation, which is backward's own: it makes the loss's gradient, 1."""
        for value in self.values:
            if value.dies < 0:
                value.dies = len(self.operations)

    # ------------------------------------------------------------------------------------- backward

    def _backward_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        info = info_of(func)
        if replay.replaying() or info.view:
            out = func(*args, **kwargs)
            self._inside.take_peak()  # of a replay: not this node's
            return out
        self._enter_node()
        node = self.nodes[-1]
        takes, before = isinstance(func, CompiledGraph) and func.empties(args), self._other_bytes
        if takes:
            self._inside.takes(args[0], self._given)
        out, seconds = self.run(func, args, kwargs)
        if takes:
            node.passes.append(_Inside(before, self._inside.take_changes()))
            self._take_over(out.everything)
        else:
            inside = self._other_bytes + self._inside.take_peak()
            node.peak_bytes = max(node.peak_bytes, inside)
        node.seconds += seconds
        self._charge(node)
        for _, tensor, key in fresh_results(out, args):
            self._other[key] = watcher = self._watch_gradient(tensor, key)
            self._other_bytes += watcher.nbytes
        if info.writes and self._given:
            self._take_over(written_tensors(info, args, kwargs))
        if not takes:
            node.peak_bytes = max(node.peak_bytes, self._other_bytes)
        return out

    def _watch_gradient(self, tensor: torch.Tensor, key: int) -> _WatchedStorage:
        storage = tensor.untyped_storage()
        watcher: _WatchedStorage = watch_storage(storage, self._other_died, _WatchedStorage)
        watcher.key, watcher.nbytes = key, storage.nbytes()
        return watcher

    def _take_over(self, written: list[Any]) -> None:
        """A node makes gradients in the memory of what it has saved."""
        for tensor in written:
            key = storage_key(tensor) if _has_storage(tensor) else 0
            if key in self._given and key not in self._taken_over:
                self._taken_over[key] = self._watch_gradient(tensor, key)

    def _end_node(self) -> None:
        self._given.clear()
        for key, watcher in self._taken_over.items():
            self._other[key] = watcher
            self._other_bytes += watcher.nbytes
        self._taken_over.clear()
        if self.nodes:
            self.nodes[-1].after_bytes = self._other_bytes

    def _enter_node(self) -> None:
        node = self._node if self._is_nested() else current_node()
        if node is not self._node or not self.nodes:
            self._node = node
            self._nodes.append(node)
            self._begin_node("" if node is None else node.name())

    def _begin_node(self, name: str) -> None:
        if self._units:
            self._take_unit_gradients()
        self._end_node()
        self.nodes.append(TracedNode(name, self._other_bytes, self._other_bytes))

    def _is_nested(self) -> bool:
        """Whether a node runs a backward pass of its own, as one that works in tiles does: what it
        has unpacked is there until its end, so all of it is that one node.
        """
        if self._forward:
            return False
        if self._backward_task is None:
            self._backward_task = graph_task_id()
        return graph_task_id() != self._backward_task and self._node is not None

    def _other_died(self, watcher: _WatchedStorage) -> None:
        if self._taken_over.get(watcher.key) is watcher:
            del self._taken_over[watcher.key]
        if self._other.get(watcher.key) is watcher:
            del self._other[watcher.key]
            self._other_bytes -= watcher.nbytes
            self._inside.went(watcher.nbytes)

    def gradient_accumulated(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient: from here on it is static, not in flight."""
        if parameter.grad is None or parameter.grad.layout is not torch.strided:
            return
        key = key_of(parameter.grad)
        in_flight, taken_over = self._other.pop(key, None), self._taken_over.pop(key, None)
        if in_flight is not None:
            self._other_bytes -= in_flight.nbytes
        watcher = in_flight or taken_over
        if watcher is not None and self.nodes:
            self.nodes[-1].gradient_bytes += watcher.nbytes

    # ---------------------------------------------------------------------------------------- FSDP2

    def resized(self, tensor: torch.Tensor) -> None:
        """FSDP2 has given a gathered parameter its memory, or taken it away: there while a unit
        runs, and no value.
        """
        key, now = storage_key(tensor), tensor.untyped_storage().nbytes()
        self._other_bytes += now - self.gathered.get(key, 0)
        self.gathered[key] = now
        self.gathered_peak_bytes = max(self.gathered_peak_bytes, sum(self.gathered.values()))
        if self.nodes:
            self.nodes[-1].peak_bytes = max(self.nodes[-1].peak_bytes, self._other_bytes)

    def _take_unit_gradients(self) -> None:
        """As `gradient_accumulated`, for gradients that FSDP2 moves about by itself: shards, or
        what is not reduced.
        """
        held = [p.grad for p in self._parameters if p.grad is not None]
        for gradient in (*held, *fsdp.final_gradients(self._units)):
            watcher = self._other.pop(storage_key(distributed.local_part(gradient)), None)
            if watcher is not None:
                self._other_bytes -= watcher.nbytes
                self.nodes[-1].gradient_bytes += watcher.nbytes

    def _keep_boundary(self, nest: Any) -> None:
        """What enters or leaves a unit is kept, whatever a plan says: a replay must not cross
        there.
        """
        for tensor in leaves(nest):
            if tensor.layout is torch.strided:
                self._keep_at_boundary(self._newest.get(storage_key(tensor)))

    def _keep_at_boundary(self, value: int | None) -> None:
        operation = None if value is None else self.values[value].operation
        if value is not None and operation is not None:
            self.operations[operation].replayable = False
            self._boundaries.add(value)

    def _let_boundaries_go(self) -> None:
        """It is the tape that held these through the forward: reckon that Python drops them once
        they were read.
        """
        last = self._last_readers() if self._boundaries else {}
        for number in self._boundaries:
            value = self.values[number]
            if value.dies < 0:
                value.dies = max(last.get(number, -1), value.operation or 0)

    def _last_readers(self) -> dict[int, int]:
        return {value: at for at, op in enumerate(self.operations) for value in op.inputs}

    # -------------------------------------------------------------------------------- saved tensors

    def pack(self, tensor: torch.Tensor) -> int | None:
        """The value that autograd saves, or None for one that is not the tape's."""
        try:
            value = self._newest.get(key_of(tensor))
        except Untrackable:
            return None
        return value if value is not None and self.values[value].operation is not None else None

    def unpack(self, value: int | None) -> None:
        """A node asks for a value."""
        if self._pauses:
            return
        self._enter_node()
        if value is not None:
            self.nodes[-1].needs.append(value)

    def give(self, value: int | None, tensor: torch.Tensor) -> torch.Tensor:
        """It gets it."""
        if value is not None and tensor.layout is torch.strided and not self._pauses:
            self._given[storage_key(tensor)] = value
        return tensor

    # ---------------------------------------------------------------------------------------- where

    def _module(self) -> str:
        name = self._names.get(id(called_module()))  # compiled ones have no hooks
        return name or (self._modules[-1] if self._modules else "")

    @untraced
    def enter_module(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._is_unit_of_forward(module):
            self._keep_boundary(inputs)
        self._modules.append(self._names.get(id(module), type(module).__name__))

    @untraced
    def leave_module(self, module: torch.nn.Module, _: Any, results: Any) -> None:
        if self._is_unit_of_forward(module):
            self._keep_boundary(results)
        if self._modules:
            self._modules.pop()

    def _is_unit_of_forward(self, module: torch.nn.Module) -> bool:
        return bool(self._units) and graph_task_id() == -1 and fsdp.is_unit(module)

    @contextmanager
    def listening(self, model: torch.nn.Module) -> Iterator[None]:
        """Know which module is running, when a parameter gets its gradient, and when a unit's are
        gathered.
        """
        with ExitStack() as undo:
            with uninterrupted():  # else a hook may be set that nobody knows of
                undo.enter_context(observing_names(self.note_name))
                undo.callback(fsdp.observe_resizes(self.resized))
                undo.callback(register_module_forward_pre_hook(self.enter_module).remove)
                undo.callback(
                    register_module_forward_hook(self.leave_module, always_call=True).remove
                )
                for parameter in model.parameters():
                    if parameter.requires_grad and not distributed.is_dtensor(parameter):
                        undo.callback(
                            after_accumulation(parameter, self.gradient_accumulated).remove
                        )
            yield


@contextmanager
def watching(model: torch.nn.Module, quota_bytes: float) -> Iterator[Trace]:
    """Record what runs inside, forward and backward."""
    trace = Trace(model)
    around = Segment(None)
    tape = Tape()
    policy = RebuildAll(quota_bytes, tape, around)
    recorder = Recorder(Segment(around), policy, tape=tape)
    handles: list[weakref.ref[Handle]] = []
    trace.after_forward = lambda: policy.end_forward(
        handle.value for reference in handles if (handle := reference()) is not None
    )

    @untraced
    def pack(tensor: torch.Tensor) -> Any:
        packed = recorder.pack(tensor)
        if type(packed) is Handle:
            handles.append(weakref.ref(packed))
        return trace.pack(tensor), packed

    def take(packed: Any) -> torch.Tensor:
        trace.unpack(packed[0])
        return trace.give(packed[0], unpack(packed[1]))

    try:
        with trace.listening(model), trace, recorder, saved_tensors_hooks(pack, take):
            yield trace
    except BaseException:
        # The graph's nodes hold `pack`, which holds the trace, which holds a node: a circle that no
        # collector sees.
        trace.finish_backward()
        raise


def _are_told_apart(values: list[int | None]) -> bool:
    """Whether it is known which values these are, and each is another one."""
    return None not in values and len(set(values)) == len(values)
