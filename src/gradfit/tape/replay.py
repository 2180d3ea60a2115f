"""Makes a value again: runs the operations between the nearest values that are there and the one
that is wanted.

A *sweep* runs each operation once, in the order of the forward. What it makes is dropped after its
last use in the sweep, unless it is *retained*: in the same segment as the wanted value or one
around it, and either wanted by backward itself later, or read by an operation whose results will
have to be made later. So within a segment no operation is replayed twice in a pass, and no more is
held than the rest of the pass asks for.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradfit._torch import below_autograd
from gradfit.errors import ActivationOverwritten, UnsupportedOp
from gradfit.tape.generators import Rewound
from gradfit.tape.overwritten import overwritten, shape_of
from gradfit.tape.storage import copy_storage, flatten
from gradfit.tape.storage_table import ATOMS
from gradfit.tape.unwatched import digest_of
from gradfit.tape.values import (
    Geometry,
    Handle,
    Leaf,
    Operation,
    Segment,
    Slice,
    Tape,
    Value,
    geometry_of,
    shaped,
)
from gradfit.tape.written_slices import spread, whole_of


class Scratch:
    """An argument whose content is not read but written to: replay gives it a throw-away tensor."""

    __slots__ = ("geometry",)

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry


_index = operator.attrgetter("index")
_MANY = 16  # readers of one value


class _Depth(threading.local):
    sweeps = 0


_depth = _Depth()


def replaying() -> bool:
    """Whether this thread is inside a sweep: what runs now belongs to the tape, not to the backward
    pass.
    """
    return _depth.sweeps > 0


class _Sweep:
    def __enter__(self) -> None:
        _depth.sweeps += 1

    def __exit__(self, *_: object) -> None:
        _depth.sweeps -= 1


def take(handle: Handle) -> torch.Tensor:
    """The tensor behind a handle, for one backward node."""
    tape, value = handle.tape, handle.value
    with tape.lock:
        if handle.pass_number == tape.pass_number:
            tape.begin_pass()  # asked for a second time
        handle.pass_number = tape.pass_number
        tensor = (
            rebuild(value, tape, retain=tape.retains) if value.tensor is None else content(value)
        )
        release_if_done(value, tape)
    return _as_saved(tensor, handle)


def look(handle: Handle) -> torch.Tensor:
    """The same for somebody who reads a node's attributes: no backward asks, so nothing is used up
    or retained.
    """
    tape, value = handle.tape, handle.value
    with tape.lock:
        tensor = rebuild(value, tape, retain=False) if value.tensor is None else content(value)
    return _as_saved(tensor, handle)


def _as_saved(tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
    if handle.geometry is None:
        return tensor
    return (
        shaped(tensor, handle.geometry)
        if whole_of(handle.value) is None
        else spread(tensor, handle.geometry)
    )


def rebuild(target: Value, tape: Tape, *, retain: bool = True) -> torch.Tensor:
    """Run the sweep for `target`, caching what the rest of this pass needs if it is to `retain`
    anything.
    """
    started = time.perf_counter()
    needed = _needed(target)
    if retain:
        _add_copies(needed, target, tape)
    operations = sorted(needed, key=_index)
    retained = _retained(operations, target, tape) if retain else set()
    if tape.holding is not None:
        tape.holding(retained)  # as soon as they are made
    uses: dict[Value, int] = {}
    for op in operations:
        for value in op.inputs:
            uses[value] = uses.get(value, 0) + 1
    # What is cached and read here is pinned: memory may run short on the way, and whoever evicts
    # must not take it.
    made = {
        value: content(value) for value in uses if value.tensor is not None and value.op is not None
    }
    with _context_of(target.segment), below_autograd(), Rewound() as rewound, _Sweep():
        for op in operations:
            if op.written:
                _write_again(op, made, uses, retained, target, rewound)
            else:
                _run_again(op, made, uses, retained, target, rewound)
            for value in op.inputs:
                left = uses[value] = uses[value] - 1
                if left == 0 and value is not target:
                    made.pop(value, None)
    if tape.holding is not None:
        tape.holding(retained)
    if retain:
        for value in uses:
            if value.tensor is not None and value.op is not None:
                release_if_done(value, tape)
    scope = target.segment.scope
    if scope is not None:
        scope.note_recomputed(time.perf_counter() - started)
    return made[target]


def _context_of(segment: Segment | None) -> Any:
    """What `checkpoint(context_fn=…)` wants entered around replays in its scope."""
    while segment is not None:
        if segment.scope is not None and segment.scope.replay_context is not None:
            return segment.scope.replay_context()
        segment = segment.parent
    return contextlib.nullcontext()


def release_if_done(value: Value, tape: Tape) -> None:
    """Drop a rebuilt value once nothing in this pass will ask for it."""
    if value.tensor is None or value.op is None or value.pending(tape.pass_number):
        return
    if not _has_reader_to_run(value, tape):
        value.tensor = None


def _has_reader_to_run(value: Value, tape: Tape) -> bool:
    """Whether this pass will run an operation again that reads the value."""
    if value.users is not None and len(value.users) >= _MANY and not isinstance(value.users, deque):
        value.users = deque(value.users)
    return _any_wanted(value.users or (), _is_to_run, tape)


def _is_to_run(op: Operation, tape: Tape) -> bool:
    if op.unwanted == tape.epoch:
        return False
    if len(op.outputs) >= _MANY and not isinstance(op.outputs, deque):
        op.outputs = deque(op.outputs)
    if _any_wanted(op.outputs, _is_to_be_made, tape):
        return True
    op.unwanted = tape.epoch
    return False


def _is_to_be_made(value: Value, tape: Tape) -> bool:
    return value.tensor is None and _wanted(value, tape, set(), {})


def _any_wanted(references: Sequence[Any], wanted: Callable[[Any, Tape], bool], tape: Tape) -> bool:
    """Whether one of these is wanted. It is asked often, and mostly the same one is: in a queue it
    stays the first.
    """
    if not isinstance(references, deque):
        return any(
            wanted(there, tape)
            for reference in references
            if reference is not None and (there := reference()) is not None
        )
    for _ in range(len(references)):
        there = references[-1]() if references[-1] is not None else None
        if there is not None and wanted(there, tape):
            return True
        references.rotate()
    return False


def content(value: Value) -> torch.Tensor:
    """A value that is there, checked not to have changed since the forward."""
    tensor = value.tensor
    if tensor is None:
        raise RuntimeError("gradfit: a value was used before it was rebuilt")
    if value.version >= 0:
        if tensor._version != value.version:
            raise overwritten(
                tensor, tensor._version, value.version, rebuilt_from=True, line=value.line
            )
        if value.op is None:
            _check_there(tensor)
    elif value.digest is not None and digest_of(tensor) != value.digest:
        raise ActivationOverwritten(
            f"A tensor of {shape_of(tensor)} from which activations are rebuilt has changed since"
            " the forward pass. It lies in memory that torch does not watch (NumPy's, DLPack's, a"
            " mapped file's, or inference mode's). Call backward() before refilling it, or use"
            " `x.clone()` in the forward pass."
        )
    return tensor


def _content_of_leaf(leaf: Leaf) -> torch.Tensor:
    """A parameter as it was read, checked likewise."""
    if leaf.source is not None:
        if leaf.source._version != leaf.version:
            raise overwritten(leaf.source, leaf.source._version, leaf.version, rebuilt_from=True)
        _check_there(leaf.content)
    return leaf.content


def _check_there(tensor: torch.Tensor) -> None:
    """FSDP2 takes a parameter's memory away and leaves the storage."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedOp(
            f"A tensor of shape {tuple(tensor.shape)} from which activations are recomputed has"
            " been freed since the forward pass (a resharded parameter). End the scope where the"
            " sharded unit ends."
        )


def _needed(target: Value) -> set[Operation]:
    """The operations to run."""
    found: set[Operation] = set()
    stack = [target]
    while stack:
        op = stack.pop().op
        if op is None or op in found:
            continue
        found.add(op)
        stack.extend(value for value in op.inputs if value.tensor is None)
    return found


def _add_copies(operations: set[Operation], target: Value, tape: Tape) -> None:
    """Take along copies, of what writes to slices make or write over, that this pass will ask for.

    Else a version of the whole storage would be retained, only to make them later.
    """
    for op in [op for op in operations if op.slices]:
        versions = (
            *op.written,
            *(reference() for reference in op.outputs if reference is not None),
        )
        readers = [user() for value in versions if value is not None for user in value.users or ()]
        operations.update(
            reader
            for reader in readers
            if reader is not None
            and reader.info.copies
            and _is_asked_for(reader, target.segment, tape)
        )


def _is_asked_for(op: Operation, segment: Segment, tape: Tape) -> bool:
    """Whether a result is not there, and backward itself asks for it, so that a sweep in the
    segment retains it.
    """
    for reference in op.outputs:
        value = reference() if reference is not None else None
        if value is not None and value.tensor is None and value.pending(tape.pass_number):
            return value.segment.encloses(segment)
    return False


def _wanted(
    value: Value, tape: Tape, there: set[Value], known: dict[Value | Operation, bool]
) -> bool:
    """Will this pass still ask for this value, itself or to make others from that are not
    `there`?
    """
    decided = known.get(value)
    if decided is not None:
        return decided
    number, epoch = tape.pass_number, tape.epoch
    stack = [value]
    seen: list[Value | Operation] = [value]
    wanted = value.pending(number)
    while stack and not wanted:
        for user in stack.pop().users or ():
            reader = user()
            if reader is None or reader.unwanted == epoch or reader in known:
                continue
            known[reader] = False
            seen.append(reader)
            for reference in reader.outputs:
                output = reference() if reference is not None else None
                if (
                    output is None
                    or output.tensor is not None
                    or output.unwanted == epoch
                    or output in there
                ):
                    continue
                decided = known.get(output)
                if decided or output.pending(number):
                    wanted = True
                elif decided is None:
                    known[output] = False
                    seen.append(output)
                    stack.append(output)
    if wanted:
        for other in seen:
            known.pop(other, None)  # not decided after all
    elif not there:
        for other in seen:  # and nobody need look again
            other.unwanted = epoch
    known[value] = wanted
    return wanted


def _retained(operations: list[Operation], target: Value, tape: Tape) -> set[Value]:
    """Which results of the sweep stay after it. Readers come after what they read, so one pass
    backwards decides.
    """
    number = tape.pass_number
    retained: set[Value] = set()
    known: dict[Value | Operation, bool] = {}
    there = {target}
    if _wanted(target, tape, retained, known):
        retained.add(target)
    segment = target.segment
    for op in reversed(operations):
        for reference in op.outputs:
            value = reference() if reference is not None else None
            if value is None or value.tensor is not None or value in there:
                continue
            if (value.segment is segment or value.segment.encloses(segment)) and (
                value.pending(number) or _wanted(value, tape, there, known)
            ):
                retained.add(value)
                there.add(value)
    return retained


def _run_again(
    op: Operation,
    made: dict[Value, torch.Tensor],
    uses: dict[Value, int],
    retained: set[Value],
    target: Value,
    rewound: Rewound,
) -> None:
    """Run one operation again and put its results into `made`."""
    args = []
    for argument in op.args:
        kind = type(argument)
        if kind is Value:
            found = made.get(argument)
            args.append(content(argument) if found is None else found)
        elif kind in ATOMS:
            args.append(argument)
        else:
            args.append(_argument(argument, op, made))
    out = _call(op, args, made, rewound)
    results = (out,) if type(out) is torch.Tensor else None
    for reference in op.outputs:
        value = None if reference is None else reference()
        if value is None or value.tensor is not None:
            continue
        stays, read = value in retained, value in uses
        if not (stays or read or value is target):
            continue
        if results is None:
            results = tuple(flatten((out,)))
        result = results[value.position]
        if (
            result.size(),
            result.stride(),
            result.storage_offset(),
            result.dtype,
        ) != value.geometry:
            _refuse(op, value, result)
        if read or value is target:
            made[value] = result
        if stays:
            value.tensor, value.version = result, result._version


def _write_again(
    op: Operation,
    made: dict[Value, torch.Tensor],
    uses: dict[Value, int],
    retained: set[Value],
    target: Value,
    rewound: Rewound,
) -> None:
    """The same for one that writes: on a private copy, if somebody else wants what it writes
    over.
    """
    private: dict[Value, torch.Tensor] = {}
    covered: dict[Value, torch.Tensor | None] = {}
    for old in op.written:
        tensor = made.get(old)
        if tensor is not None and uses[old] == 1 and old.tensor is None and old is not target:
            private[old] = tensor  # nobody else wants the old version: write over it
        else:
            private[old] = made[old] = copy_storage(
                content(old) if tensor is None else tensor, old.geometry
            )
            covered[old] = tensor
    args = [each if type(each) in ATOMS else _argument(each, op, made) for each in op.args]
    out = _call(op, args, made, rewound)
    del args
    for old, tensor in covered.items():
        if tensor is None:
            del made[old]
        else:
            made[old] = tensor
    covered.clear()
    results: list[Any] | None = None
    for reference in op.outputs:
        value = None if reference is None else reference()
        if value is None or value.tensor is not None:
            continue
        stays, read = value in retained, value in uses
        if not (stays or read or value is target):
            continue
        if value.position < 0:
            written = op.written[-1 - value.position]
            result = private[written]
            if value.geometry != written.geometry:
                result = shaped(result, value.geometry)
        else:
            if results is None:
                results = list(flatten((out,)))
            result = results[value.position]
            if geometry_of(result) != value.geometry:
                _refuse(op, value, result)
        if read or value is target:
            made[value] = result
        if stays:
            value.tensor, value.version = result, result._version


def _call(op: Operation, args: list[Any], made: dict[Value, torch.Tensor], rewound: Rewound) -> Any:
    call = op.info.call or op.func
    if not op.kwargs and op.rng is None and not op.info.grad_mode:
        return call(*args)
    kwargs = {
        name: argument if type(argument) in ATOMS else _argument(argument, op, made)
        for name, argument in op.kwargs.items()
    }
    if op.rng is not None:
        chosen = rewound.start(op.rng, op.info.generator)
        if any(isinstance(argument, torch.Generator) for argument in args):  # by position
            args = [
                chosen["generator"] if isinstance(argument, torch.Generator) else argument
                for argument in args
            ]
        else:
            kwargs.update(chosen)
    if op.info.grad_mode:
        with torch.enable_grad():
            return call(*args, **kwargs)
    return call(*args, **kwargs)


def _argument(reference: Any, op: Operation, made: dict[Value, torch.Tensor]) -> Any:
    """An argument as it was: what stands for a tensor becomes one."""
    kind = type(reference)
    if kind is Value:
        tensor = made.get(reference)
        return content(reference) if tensor is None else tensor
    if kind is Leaf:
        return _content_of_leaf(reference)
    if kind is Slice:
        tensor = made.get(reference.value)
        return shaped(content(reference.value) if tensor is None else tensor, reference.geometry)
    if kind is list:
        return [_argument(item, op, made) for item in reference]
    if kind is Scratch:
        size, _, _, dtype = reference.geometry
        return torch.zeros(size, dtype=dtype, device=_argument(op.args[0], op, made).device)
    return reference


def _refuse(op: Operation, value: Value, result: torch.Tensor) -> None:
    raise UnsupportedOp(
        f"{op.name} gave {tuple(result.shape)} {result.dtype} in the forward pass's place of"
        f" {tuple(value.geometry[0])} {value.geometry[3]}: a setting (the default dtype, a"
        " backend's flags) has changed since. Call backward() under the settings of the forward"
        " pass."
    )
