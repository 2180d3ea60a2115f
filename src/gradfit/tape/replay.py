"""Makes a value again: runs the operations between the nearest values that are there and the one
that is wanted.

A *sweep* runs each operation once, in the order of the forward. What it makes is dropped after its
last use in the sweep, unless it is *retained*: in the same segment as the wanted value or one
around it, and either wanted by backward itself later, or read by an operation whose results will
have to be made later. So within a segment no operation is replayed twice in a pass, and no more is
held than the rest of the pass asks for.
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradfit._torch import below_autograd
from gradfit.errors import ActivationOverwritten, UnsupportedOp
from gradfit.tape.generators import Rewound
from gradfit.tape.overwritten import overwritten, shape_of
from gradfit.tape.storage import copy_storage, flat_results
from gradfit.tape.storage_table import ATOMS
from gradfit.tape.unwatched import digest_of
from gradfit.tape.values import (
    Geometry,
    Handle,
    ParameterRef,
    Scratch,
    Segment,
    Slice,
    Tape,
    TapeOperation,
    TapeValue,
    geometry_of,
    shaped,
)
from gradfit.tape.written_slices import CUT, spread

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


def take(handle: Handle) -> torch.Tensor:
    """The tensor behind a handle, for one backward node."""
    tape, value = handle.tape, handle.value
    with tape.lock:
        number = tape.pass_number
        if handle.pass_number == number:
            tape.begin_pass()  # asked for a second time
            number = tape.pass_number
        handle.pass_number = number
        tensor = value.tensor
        if tensor is None:
            tensor = rebuild(value, tape, retain=tape.retains)
            if value.tensor is not None:
                release_if_done(value, tape)
        elif value.op is None:
            tensor = content(value)
        else:
            if tensor._version != value.held_version:
                tensor = content(value)  # which checks it at length
            release_if_done(value, tape)
    return tensor if handle.geometry is None else _as_saved(tensor, handle)


def look(handle: Handle) -> torch.Tensor:
    """The same for somebody who reads a node's attributes: no backward asks, so nothing is used up
    or retained.
    """
    tape, value = handle.tape, handle.value
    with tape.lock:
        tensor = rebuild(value, tape, retain=False) if value.tensor is None else content(value)
    return _as_saved(tensor, handle)


def _as_saved(tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
    """What was saved: a view of the value's tensor, or the slice that a part was."""
    if handle.geometry is None:
        return tensor
    op = handle.value.op
    if op is not None and op.info is CUT:
        return spread(tensor, handle.geometry)
    return shaped(tensor, handle.geometry)


def rebuild(target: TapeValue, tape: Tape, *, retain: bool = True) -> torch.Tensor:
    """Run the sweep for `target`, caching what the rest of this pass needs if it is to `retain`
    anything.
    """
    started = time.perf_counter()
    operations = _needed(target)
    if retain:
        operations = _with_copies(operations, target, tape)
    if len(operations) > 1:
        operations.sort(key=_index)
    retained = _retained(operations, target, tape) if retain else set()
    if tape.on_held is not None:
        tape.on_held(retained)  # as soon as they are made
    sweep = _Sweep(target, operations, retained)
    context = _context_of(target.segment)
    if context is None:
        _run(sweep, operations)
    else:
        with context:
            _run(sweep, operations)
    if tape.on_held is not None:
        tape.on_held(retained)
    if retain:
        _release_done(sweep.reads_left, tape)
    scope = target.segment.scope
    if scope is not None:
        scope.note_recomputed(time.perf_counter() - started)
    return sweep.tensors[target]


def _run(sweep: _Sweep, operations: list[TapeOperation]) -> None:
    """Run a sweep, where nobody takes what it does for the backward pass."""
    with below_autograd():
        _depth.sweeps += 1
        try:
            if _is_random(operations):
                sweep.rewound = Rewound()
                with sweep.rewound:
                    sweep.run(operations)
            else:
                sweep.run(operations)
        finally:
            _depth.sweeps -= 1


def _is_random(operations: list[TapeOperation]) -> bool:
    # not `any(…)`: Python drops an interrupt that comes as it lets go of a generator
    for op in operations:  # noqa: SIM110
        if op.random_state is not None:
            return True
    return False


def _context_of(segment: Segment | None) -> Any:
    """What `checkpoint(context_fn=…)` wants entered around replays in its scope, if anything."""
    while segment is not None:
        if segment.scope is not None and segment.scope.replay_context is not None:
            return segment.scope.replay_context()
        segment = segment.parent
    return None


def _release_done(values: Iterable[TapeValue], tape: Tape) -> None:
    """Drop those of a sweep's inputs that the rest of the pass will not ask for."""
    for value in values:
        if value.tensor is not None and value.op is not None:
            release_if_done(value, tape)


def release_if_done(value: TapeValue, tape: Tape) -> None:
    """Drop a rebuilt value once nothing in this pass will ask for it."""
    if value.op is None:
        return
    handles = value.handles
    if handles is not None:
        if len(handles) == 1:  # as `pending`, written out: this is hot
            handle = handles[0]()
            if handle is not None and handle.pass_number != tape.pass_number:
                return
        elif value.pending(tape.pass_number):
            return
    users = value.users
    if users is not None:
        if len(users) >= _MANY:
            if _has_reader_to_run(value, tape):
                return
        else:
            for user in users:  # most have died by now
                reader = user()
                if reader is not None and _is_to_run(reader, tape):
                    return
    value.tensor = None


def _has_reader_to_run(value: TapeValue, tape: Tape) -> bool:
    """Whether this pass will run an operation again that reads the value, of many that do."""
    if value.users is not None and not isinstance(value.users, deque):
        value.users = deque(value.users)
    return _any_wanted(value.users or (), _is_to_run, tape)


def _is_to_run(op: TapeOperation, tape: Tape) -> bool:
    if op.unwanted == tape.epoch:
        return False
    outputs = op.outputs
    if len(outputs) < _MANY:  # as `_any_wanted`, written out: this is hot
        for reference in outputs:
            value = None if reference is None else reference()
            if value is not None and value.tensor is None and _wanted(value, tape, set(), {}):
                return True
    else:
        if not isinstance(outputs, deque):
            outputs = op.outputs = deque(outputs)
        if _any_wanted(outputs, _is_to_be_made, tape):
            return True
    op.unwanted = tape.epoch
    return False


def _is_to_be_made(value: TapeValue, tape: Tape) -> bool:
    return value.tensor is None and _wanted(value, tape, set(), {})


def _any_wanted(references: Sequence[Any], wanted: Callable[[Any, Tape], bool], tape: Tape) -> bool:
    """Whether one of these is wanted. It is asked often, and mostly the same one is: in a queue it
    stays the first.
    """
    if not isinstance(references, deque):
        for reference in references:  # not `any(…)`, which makes a generator: it is hot
            there = None if reference is None else reference()
            if there is not None and wanted(there, tape):
                return True
        return False
    for _ in range(len(references)):
        there = references[-1]() if references[-1] is not None else None
        if there is not None and wanted(there, tape):
            return True
        references.rotate()
    return False


def content(value: TapeValue) -> torch.Tensor:
    """A value that is there, checked not to have changed since the forward."""
    tensor = value.tensor
    if tensor is None:
        raise RuntimeError("gradfit: a value was used before it was rebuilt")
    if value.held_version >= 0:
        if tensor._version != value.held_version:
            raise overwritten(
                tensor,
                tensor._version,
                value.held_version,
                rebuilt_from=True,
                used_at=value.read_at,
            )
        if value.op is None and (type(tensor) is not torch.Tensor or not tensor.data_ptr()):
            _check_there(tensor)
    elif value.digest is not None and digest_of(tensor) != value.digest:
        raise _changed_unwatched(tensor)
    return tensor


def _changed_unwatched(tensor: torch.Tensor) -> ActivationOverwritten:
    return ActivationOverwritten(
        f"A tensor of {shape_of(tensor)} from which activations are rebuilt has changed since"
        " the forward pass. It lies in memory that torch does not watch (NumPy's, DLPack's, a"
        " mapped file's, or inference mode's). Call backward() before refilling it, or use"
        " `x.clone()` in the forward pass."
    )


def _content_of_parameter(read: ParameterRef) -> torch.Tensor:
    """A parameter as it was read, checked likewise."""
    if read.source is not None:
        if read.source._version != read.version:
            raise overwritten(read.source, read.source._version, read.version, rebuilt_from=True)
        if type(read.content) is not torch.Tensor or not read.content.data_ptr():
            _check_there(read.content)
    return read.content


def _check_there(tensor: torch.Tensor) -> None:
    """FSDP2 takes a parameter's memory away and leaves the storage."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedOp(
            f"A tensor of shape {tuple(tensor.shape)} from which activations are recomputed has"
            " been freed since the forward pass (a resharded parameter). End the scope where the"
            " sharded unit ends."
        )


def _needed(target: TapeValue) -> list[TapeOperation]:
    """The operations to run, each once."""
    needed: dict[TapeOperation, None] = {}
    stack = [target]
    while stack:
        op = stack.pop().op
        if op is None or op in needed:
            continue
        needed[op] = None
        for value in op.inputs:
            if value.tensor is None:
                stack.append(value)  # noqa: PERF401 - before Python 3.12, `extend` calls a function
    return list(needed)


def _with_copies(
    operations: list[TapeOperation], target: TapeValue, tape: Tape
) -> list[TapeOperation]:
    """Take along copies, of what writes to slices make or write over, that this pass will ask for.

    Else a version of the whole storage would be retained, only to make them later.
    """
    slices = [op for op in operations if op.slices]
    if not slices:
        return operations
    more = (
        copy
        for op in slices
        for copy in _copies_around(op)
        if _is_asked_for(copy, target.segment, tape)
    )
    return list(dict.fromkeys((*operations, *more)))


def _copies_around(op: TapeOperation) -> Iterator[TapeOperation]:
    """The copies of what a write makes or writes over."""
    for version in (*op.written, *_alive(op.outputs)):
        yield from (reader for reader in _alive(version.users or ()) if reader.info.copies)


def _alive(references: Iterable[weakref.ref[Any] | None]) -> list[Any]:
    return [
        there
        for reference in references
        if reference is not None and (there := reference()) is not None
    ]


def _is_asked_for(op: TapeOperation, segment: Segment, tape: Tape) -> bool:
    """Whether a result is not there, and backward itself asks for it, so that a sweep in the
    segment retains it.
    """
    for value in _alive(op.outputs):
        if value.tensor is None and value.pending(tape.pass_number):
            return bool(value.segment.encloses(segment))
    return False


def _wanted(
    value: TapeValue,
    tape: Tape,
    there: set[TapeValue],
    answers: dict[TapeValue | TapeOperation, bool],
) -> bool:
    """Will this pass still ask for this value, itself or to make others from that are not
    `there`? What was found out on the way is added to `answers`.
    """
    answer = answers.get(value)
    if answer is not None:
        return answer
    visited: list[TapeValue | TapeOperation] = [value]
    wanted = value.pending(tape.pass_number) or _leads_to_wanted(
        value, tape, there, answers, visited
    )
    if wanted:
        for other in visited:
            answers.pop(other, None)  # not decided after all
    elif not there:
        for other in visited:  # and nobody need look again
            other.unwanted = tape.epoch
    answers[value] = wanted
    return wanted


def _leads_to_wanted(
    value: TapeValue,
    tape: Tape,
    there: set[TapeValue],
    answers: dict[TapeValue | TapeOperation, bool],
    visited: list[TapeValue | TapeOperation],
) -> bool:
    """Whether something that backward asks for is made from a value, over whatever steps.

    Hot, and so in one piece: a deep graph has it look at each operation many times in a pass.
    """
    number, epoch = tape.pass_number, tape.epoch
    stack = [value]
    while stack:
        for user in stack.pop().users or ():
            reader = user()
            if reader is None or reader.unwanted == epoch or reader in answers:
                continue
            answers[reader] = False
            visited.append(reader)
            for reference in reader.outputs:
                output = reference() if reference is not None else None
                if (
                    output is None
                    or output.tensor is not None
                    or output.unwanted == epoch
                    or output in there
                ):
                    continue
                answer = answers.get(output)
                if answer or output.pending(number):
                    return True
                if answer is None:
                    answers[output] = False
                    visited.append(output)
                    stack.append(output)
    return False


def _retained(operations: list[TapeOperation], target: TapeValue, tape: Tape) -> set[TapeValue]:
    """Which results of the sweep stay after it. Readers come after what they read, so one pass
    backwards decides. Hot: it looks at each result of each operation that is replayed.
    """
    number = tape.pass_number
    retained: set[TapeValue] = set()
    answers: dict[TapeValue | TapeOperation, bool] = {}
    there = {target}
    if _wanted(target, tape, retained, answers):
        retained.add(target)
    segment = target.segment
    for op in reversed(operations):
        for reference in op.outputs:
            value = reference() if reference is not None else None
            if value is None or value.tensor is not None or value in there:
                continue
            if (value.segment is segment or value.segment.encloses(segment)) and (
                value.pending(number) or _wanted(value, tape, there, answers)
            ):
                retained.add(value)
                there.add(value)
    return retained


class _Sweep:
    """One replay: it runs operations in the order of the forward, and lets go of each result after
    its last use.
    """

    __slots__ = (
        "_asked", "_throw_away", "reads_left", "retained", "rewound", "target", "tensors",
    )  # fmt: skip

    rewound: Rewound  # if one of the operations is random

    def __init__(
        self, target: TapeValue, operations: list[TapeOperation], retained: set[TapeValue]
    ) -> None:
        self.target, self.retained = target, retained
        self._throw_away: dict[Scratch, torch.Tensor] = {}
        self.reads_left = _reads_of(operations)
        self._asked = {target, *self.reads_left, *retained}
        # What is there now. What was cached and is read here is pinned: memory may run short on the
        # way, and whoever evicts must not take it.
        self.tensors: dict[TapeValue, torch.Tensor] = {
            value: content(value)
            for value in self.reads_left
            if value.tensor is not None and value.op is not None
        }

    def run(self, operations: list[TapeOperation]) -> None:
        """Run the operations again, and let go of what nobody reads after each."""
        reads_left, target, tensors = self.reads_left, self.target, self.tensors
        for op in operations:
            if op.written:
                self._write(op)
            else:
                self._compute(op)
            for value in op.inputs:
                left = reads_left[value] = reads_left[value] - 1
                if left == 0 and value is not target:
                    tensors.pop(value, None)

    def _compute(self, op: TapeOperation) -> None:
        """One that only reads. Hot: the common arguments are written out."""
        tensors = self.tensors
        args = []
        for argument in op.args:
            kind = type(argument)
            if kind is TapeValue:
                tensor = tensors.get(argument)
                args.append(content(argument) if tensor is None else tensor)
            elif kind in ATOMS:
                args.append(argument)
            elif kind is ParameterRef:
                args.append(_content_of_parameter(argument))
            elif kind is Slice:
                value = argument.value
                tensor = tensors.get(value)
                if tensor is None:
                    tensor = content(value)
                args.append(shaped(tensor, argument.geometry))
            elif kind is Scratch:
                throw_away = self._throw_away.get(argument)
                if throw_away is None:
                    throw_away = self._throw_away_tensor(argument, args)
                args.append(throw_away)
            else:
                args.append(self._argument(argument))
        if op.kwargs or op.random_state is not None or op.info.grad_mode:
            out = self._call(op, args)
        else:
            out = (op.info.call or op.func)(*args)
        results = (out,) if type(out) is torch.Tensor else flat_results(out)
        for reference in op.outputs:
            value = None if reference is None else reference()
            if value is not None and value.tensor is None and value in self._asked:
                result = results[value.position]
                if (
                    result.shape,
                    result.stride(),
                    result.storage_offset(),
                    result.dtype,
                ) != value.geometry:
                    _refuse(op, value, result)
                if value in self.reads_left or value is self.target:
                    tensors[value] = result
                if value in self.retained:
                    value.tensor, value.held_version = result, result._version

    def _write(self, op: TapeOperation) -> None:
        """One that writes: on a private copy, if somebody else wants what it writes over."""
        tensors = self.tensors
        private: dict[TapeValue, torch.Tensor] = {}
        covered: dict[TapeValue, torch.Tensor | None] = {}  # what lay under `tensors` before
        for old in op.written:
            tensor = tensors.get(old)
            if tensor is None or not self._is_last_use(old):
                covered[old] = tensor
                tensor = tensors[old] = _copy_of(old, tensor)
            private[old] = tensor
        args = [each if type(each) in ATOMS else self._argument(each) for each in op.args]
        out = self._call(op, args)
        del args
        _uncover(tensors, covered)
        covered.clear()
        for value in self._asked_results(op):
            if value.position < 0:
                self._put_written(value, op.written[-1 - value.position], private)
            else:
                self._put_returned(value, op, flat_results(out)[value.position])

    def _is_last_use(self, old: TapeValue) -> bool:
        """Whether nobody but the operation that now writes over it wants a value."""
        return self.reads_left[old] == 1 and old.tensor is None and old is not self.target

    def _asked_results(self, op: TapeOperation) -> list[TapeValue]:
        """The results that somebody asks for, and that are not there."""
        asked = self._asked
        return [
            value
            for reference in op.outputs
            if reference is not None
            and (value := reference()) is not None
            and value in asked
            and value.tensor is None
        ]

    def _put_written(
        self, value: TapeValue, old: TapeValue, private: dict[TapeValue, torch.Tensor]
    ) -> None:
        result = private[old]
        if value.geometry != old.geometry:
            result = shaped(result, value.geometry)
        self._store(value, result)

    def _put_returned(self, value: TapeValue, op: TapeOperation, result: torch.Tensor) -> None:
        if geometry_of(result) != value.geometry:
            _refuse(op, value, result)
        self._store(value, result)

    def _store(self, value: TapeValue, result: torch.Tensor) -> None:
        if value in self.reads_left or value is self.target:
            self.tensors[value] = result
        if value in self.retained:
            value.tensor, value.held_version = result, result._version

    def _call(self, op: TapeOperation, args: list[Any]) -> Any:
        call = op.info.call or op.func
        kwargs = {
            name: argument if type(argument) in ATOMS else self._argument(argument)
            for name, argument in op.kwargs.items()
        }
        if op.random_state is not None:
            chosen = self.rewound.start(op.random_state, op.info.generator)
            args, kwargs = _with_generator(args, kwargs, chosen)
        if op.info.grad_mode:
            with torch.enable_grad():
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    def _argument(self, reference: Any) -> Any:
        """An argument as it was: what stands for a tensor becomes one."""
        kind = type(reference)
        if kind is TapeValue:
            return self._tensor(reference)
        if kind is ParameterRef:
            return _content_of_parameter(reference)
        if kind is Slice:
            return shaped(self._tensor(reference.value), reference.geometry)
        if kind is list:
            if reference and type(reference[0]) is int:
                return reference
            return [self._argument(item) for item in reference]
        return reference

    def _throw_away_tensor(self, scratch: Scratch, before: list[Any]) -> torch.Tensor:
        """For hidden state that operations of this sweep update, on the device of the first
        argument. Where an argument before it is alike, as a weight is, torch makes one like that in
        half the time.
        """
        shape, dtype = scratch.shape, scratch.dtype
        for argument in before:
            if isinstance(argument, torch.Tensor) and argument.shape == shape:
                made = torch.empty_like(argument, dtype=dtype)
                break
        else:
            made = torch.zeros(shape, dtype=dtype, device=before[0].device)
        self._throw_away[scratch] = made
        return made

    def _tensor(self, value: TapeValue) -> torch.Tensor:
        tensor = self.tensors.get(value)
        return content(value) if tensor is None else tensor


def _copy_of(value: TapeValue, tensor: torch.Tensor | None) -> torch.Tensor:
    """To be written to: of what a sweep has for a value, or of what is held of it."""
    return copy_storage(content(value) if tensor is None else tensor, value.geometry)


def _reads_of(operations: list[TapeOperation]) -> dict[TapeValue, int]:
    """By value: how many operations of a sweep have still to read it."""
    reads: dict[TapeValue, int] = {}
    for op in operations:
        for value in op.inputs:
            reads[value] = reads.get(value, 0) + 1
    return reads


def _uncover(
    tensors: dict[TapeValue, torch.Tensor], covered: dict[TapeValue, torch.Tensor | None]
) -> None:
    """Put back what lay in a sweep before private copies were written to."""
    for value, tensor in covered.items():
        if tensor is None:
            del tensors[value]
        else:
            tensors[value] = tensor


def _with_generator(
    args: list[Any], kwargs: dict[str, Any], chosen: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments with the generator that replay has chosen, by position if it was passed
    so.
    """
    for place, argument in enumerate(args):
        if isinstance(argument, torch.Generator):
            return [*args[:place], chosen["generator"], *args[place + 1 :]], kwargs
    return args, kwargs | chosen


def _refuse(op: TapeOperation, value: TapeValue, result: torch.Tensor) -> None:
    raise UnsupportedOp(
        f"{op.name} gave {_described(geometry_of(result))} in the forward pass's place of"
        f" {_described(value.geometry)}: a setting (the default dtype, a backend's flags) has"
        " changed since. Call backward() under the settings of the forward pass."
    )


def _described(geometry: Geometry) -> str:
    size, stride, _, dtype = geometry
    return f"{tuple(size)} with strides {stride}, {dtype}"
