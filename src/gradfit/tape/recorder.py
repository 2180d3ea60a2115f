"""Writes down what a forward pass does: the recorder, and the rules that it keeps.

A recorder has a table of storages (`storage_table.py`), a saver of tensors (`saved_tensors.py`), a
recorder of writes (`record_write.py`) and the decisions of a policy (`decisions.py`). None of them
knows the recorder. Rules, cited in this room where they are obeyed:

1. A storage is known by its address, and only while it lives: a watch takes the address out of the
   table when it dies.
2. Views are not recorded. Arguments are remembered as (value, geometry), whatever chain of views
   led to them.
3. A storage that the tape has not seen being made is a *root*: held as it is, never rebuilt. Roots
   are owned by the operations that read them: one that is alive is needed.
4. A write makes a new value. Whoever still needs the old one gets it rebuilt, or a copy made just
   before the write.
5. What cannot be replayed is not recorded, so that its results become roots: kept, never guessed.
   That goes for memory handed out uninitialised too, if somebody reads it before a recorded
   operation has written to it, and for storages that somebody the recorder does not see wrote to
   (their version counter, or their content, tells).
6. Backward passes are not recorded, even inside a scope.
7. A root whose memory can be written to unseen is held by content: as a copy, or with a digest that
   replay compares.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from gradfit._torch import graph_task_id, storage_key
from gradfit._torch_listen import listening, stop_tracing, trace_again, untraced
from gradfit.choices import KEEP, REBUILD, Choice
from gradfit.tape import generators, process_settings
from gradfit.tape.decisions import ALL, Decisions, Policy
from gradfit.tape.fsdp_boundaries import watch_units
from gradfit.tape.native_session import session_of
from gradfit.tape.operators import OpInfo, info_of, infos, view_names
from gradfit.tape.record_write import WriteRecorder
from gradfit.tape.saved_tensors import SavedTensors
from gradfit.tape.shape_only import without_content
from gradfit.tape.storage import Untrackable, flat_results, flatten, place_of, written_tensors
from gradfit.tape.storage_table import (
    ATOMS,
    FEW,
    NO_KWARGS,
    Results,
    StorageTable,
    choices_for,
    each_once,
    next_index,
)
from gradfit.tape.stream import results_of
from gradfit.tape.values import (
    Scratch,
    Segment,
    Tape,
    TapeOperation,
    TapeValue,
    new_slice,
    scratch,
)

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_strided = torch.strided


class _EnteredRecorders(threading.local):
    def __init__(self) -> None:
        # In this thread, the outermost first.
        self.tables: list[weakref.ref[StorageTable]] = []


_entered = _EnteredRecorders()


def is_recording() -> bool:
    """Whether a recorder is entered in this thread."""
    return bool(_entered.tables)


def _leave(table: StorageTable) -> None:
    """A recording ends; one around it may go on, and takes care of what this one reads from."""
    entered = _entered.tables
    if len(entered) == 1 and entered[0]() is table:  # as mostly: there is none around it
        entered.clear()
        return
    outer = [one for one in _tables_alive() if one is not table]
    _entered.tables = [weakref.ref(one) for one in outer]
    if outer:
        outer[-1].inherit(table)


def _tables_alive() -> list[StorageTable]:
    return [table for reference in _entered.tables if (table := reference()) is not None]


class Recorder:
    """Enter it around the code to record.

    Args:
        segment: where it is.
        policy: decides what becomes of results; None: all are rebuilt.
        tape: what the handles share; None: one of its own.
        widen_segments: False if the policy's segments come from a plan, which knows who reads what.
        recorded: called with every operation that is recorded.
        ended: called at the end with the table, which still knows what was read.
    """

    def __init__(
        self,
        segment: Segment,
        policy: Policy | None = None,
        *,
        tape: Tape | None = None,
        widen_segments: bool = True,
        recorded: Callable[[TapeOperation], object] | None = None,
        ended: Callable[[StorageTable], object] | None = None,
    ) -> None:
        self.tape = Tape() if tape is None else tape
        self.table = StorageTable(
            segment,
            offload=getattr(policy, "offload", None),
            widen_segments=widen_segments,
            recorded=recorded,
        )
        self.saved_tensors = SavedTensors(self.table, self.tape)
        # For whoever has hooks of his own on saved tensors, and asks the recorder from there.
        self.pack = self.saved_tensors.pack
        self._decisions = Decisions(policy, self.table)
        self._writes = WriteRecorder(self.table, self._decisions)
        # Hot, and the same objects as long as the recorder lives.
        self._values, self._roots = self.table.values, self.table.roots
        self._dead, self._unwatched = self.table.dead, self.table.unwatched.by_storage
        self._refer_parameter = self.table.parameters.refer
        self._listening: Any = None
        self._units: list[torch.utils.hooks.RemovableHandle] = []
        self._ended = ended
        self._tracing: Any = None

    @property
    def segment(self) -> Segment:
        """That new values belong to."""
        return self.table.segment

    @segment.setter
    def segment(self, segment: Segment) -> None:
        self.table.segment = segment

    @property
    def policy(self) -> Policy | None:
        """Who decides; may be set between two operations."""
        return self._decisions.policy

    @policy.setter
    def policy(self, policy: Policy | None) -> None:
        self._decisions.policy = policy

    def keep(self, tensor: torch.Tensor) -> None:
        """Make a value of the tape a root: it is held from now on, and replays start from it."""
        self.saved_tensors.keep(tensor)

    # ------------------------------------------------------------------------------- enter and exit

    @untraced
    def __enter__(self) -> Recorder:
        self._tracing = stop_tracing()
        try:
            self.saved_tensors.begin()
            self._units = watch_units(self.keep, self.table.parameters.refilled)
            process_settings.recording_begins(self)
            _entered.tables.append(weakref.ref(self.table))
            session = session_of(self)
            if session is not None and not _is_reference(type(self)):
                session = None
            listener = listening(self._observe, view_names, self.table.forget, session=session)
            listener.__enter__()
            self._listening = listener
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @untraced
    def __exit__(self, *error: Any) -> None:
        """Each thing is undone whatever becomes of the others: an interrupt may come in between."""
        try:
            if self._listening is not None:
                self._listening.__exit__(*error)
        finally:
            try:
                self.saved_tensors.end()
            finally:
                try:
                    process_settings.recording_ends(self)
                finally:
                    self._listening = None
                    _leave(self.table)
                    if self._ended is not None:
                        self._ended(self.table)
                    self.table.close()
                    self._decisions.policy = None
                    while self._units:
                        self._units.pop().remove()
                    trace_again(self._tracing)

    def _begin_rest(self) -> None:
        """Nothing that comes now will be rebuilt: the policy says how it wants to follow it."""
        self._decisions.is_over = False
        begin_rest = getattr(self._decisions.policy, "begin_rest", None)
        if begin_rest is None or not self._may_stop_early:
            return
        rest = begin_rest()
        self.saved_tensors.observer = rest.observer
        if not rest.observe_operations:
            self._listening.rest()

    @property
    def _may_stop_early(self) -> bool:
        """FSDP2 writes to parameters as it goes: then everything is observed to the end."""
        return not self._units and self._listening is not None

    # ----------------------------------------------------------------------------------- operations

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and write it down. Hot: what nearly all are, operations that read and
        return something new, is done right here.
        """
        if self.saved_tensors.copying:
            return func(*args, **kwargs)
        info = infos.get(id(func)) or info_of(func)
        if not info.simple or graph_task_id() != -1:
            return self._run_unusual(func, info, args, kwargs)
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        policy = self._decisions.policy
        if policy is None:
            self._record(func, info, args, kwargs, out, None, None)
            return out
        if type(out) is _Tensor:
            results = [out]
        else:
            results = results_of(info, args, kwargs, out)
            if not results:
                return out
        decision = policy.decide(func, results, args, kwargs)
        if decision is None:
            self._record(func, info, args, kwargs, out, None, None)
            return out
        choices, segment, last = decision
        if segment is not None:
            self.table.segment = segment
        if choices is not None:
            self._record(func, info, args, kwargs, out, None, choices, results)
        if last:
            self._begin_rest()
        return out

    def _run_unusual(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """All that `_observe` does not do right there. Still hot: each write comes here."""
        if info.view:  # rule 2
            return info.call(*args, **kwargs)
        if self._dead:
            self.table.remove_dead()
        if graph_task_id() != -1:
            return self._run_in_backward(info, args, kwargs)
        if info.collective:
            self.table.forget_before_write(_all_tensors(args, kwargs))
        random_state = None
        if info.random and generators.draws(info, args, kwargs):
            random_state = generators.capture(args, kwargs)
        if not info.writes:
            out = self._run_special(func, info, args, kwargs, random_state)
        else:
            if self.table.inherited:
                written = written_tensors(info, args, kwargs)
                self.table.copy_inherited(written, int(info.counts_first))
            if info.writes_self and type(args[0]) is _Tensor and args[0].layout is _strided:
                out = self._writes.run_method(func, info, args, kwargs, random_state)
            else:
                out = self._writes.run(func, info, args, kwargs, random_state)
        if self._decisions.is_over:
            self._begin_rest()
        return out

    def _run_in_backward(self, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Rule 6."""
        if info.writes:
            targets = written_tensors(info, args, kwargs)
            self.table.forget_before_write(targets)
            if info.writes_lists:
                increment_version(targets)  # as in `record_write.py`
        return info.call(*args, **kwargs)

    def _run_special(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, random_state: Any
    ) -> Any:
        """Random operations, those that make tensors from nothing, and those with hidden state."""
        updates = info.scratch and _in_training(args)
        if updates:
            self.table.forget_before_write(_running_statistics(info, args))
        out = info.call(*args, **kwargs)
        if info.chunks:
            self.table.split_results.add(out, self._values)
        results, choices = self._decisions.of(func, info, args, kwargs, out)
        if choices is ALL or not info.recordable:  # rule 5
            return out
        if updates:
            args = _with_scratch(info, args)
        if info.dtype or info.shape_only:
            info, args, kwargs = _as_replayed(info, args, kwargs, out)
        self._record(func, info, args, kwargs, out, random_state, choices, results)
        return out

    def _record(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        out: Any,
        random_state: Any,
        choices: Sequence[Choice] | None,
        results: list[torch.Tensor] | None = None,
    ) -> None:
        """Write one operation down; `choices` are for these `results`.

        Long, and to stay so: every microsecond here is paid hundreds of times per step, so what
        `StorageTable.refer` does for the common arguments is written out.
        """
        if self._dead:
            self.table.remove_dead()
        values = self._values
        inputs: list[TapeValue] = []
        references: list[Any] = []
        try:
            for argument in args:
                kind = type(argument)
                if kind is _Tensor:
                    key = storage_key(argument)
                    value = values.get(key)
                    if value is None:
                        base = argument._base
                        if type(base) is _Parameter and base.requires_grad and base.is_leaf:
                            references.append(self._refer_parameter(argument, key))
                        else:
                            references.append(self.table.refer(argument, inputs))
                    elif (
                        value.version != argument._version
                        or value.write_pending
                        or value.unwritten is not None
                    ):
                        references.append(self.table.refer(argument, inputs))
                    else:
                        if not inputs or len(inputs) > FEW or value not in inputs:
                            inputs.append(value)
                        geometry = place_of(argument)
                        references.append(
                            value if geometry == value.geometry else new_slice(value, geometry)
                        )
                elif kind is _Parameter and argument.requires_grad and argument.is_leaf:
                    references.append(self._refer_parameter(argument, storage_key(argument)))
                elif kind in ATOMS:
                    references.append(argument)
                elif kind is list:
                    references.append(
                        argument
                        if argument and type(argument[0]) is int  # and so are all
                        else self.table.refer_all(argument, inputs)
                    )
                elif kind is Scratch:
                    references.append(argument)
                else:
                    references.append(self.table.refer_all((argument,), inputs)[0])
            named = self.table.refer_kwargs(kwargs, inputs) if kwargs else NO_KWARGS
            single = type(out) is _Tensor
            new = [] if single else _new_results(out, inputs)
            if single:
                key = storage_key(out)
            elif new:
                key = new[0][2]
            else:
                return
        except (Untrackable, RuntimeError):  # rule 5
            return
        if key in values or (key in self._roots and self.table.root(key) is not None):
            return  # it gave back a tensor that was there before
        if self._unwatched and any(value.key == key for value in inputs):
            return
        if inputs and len(inputs) > FEW:
            inputs = each_once(inputs)
        op = TapeOperation()  # as `new_operation`
        op.index = next_index()
        op.func = func
        op.info = info
        op.args = references
        op.kwargs = named
        op.inputs = inputs
        op.outputs = op.written = ()
        op.unwanted = 0
        op.slices = False
        op.random_state = random_state
        if not single:
            self._add_several(op, new, choices, results)
            return
        choice = REBUILD if choices is None else choices[0]
        if choice is not KEEP:
            table = self.table
            op.outputs = (table.add_result(op, 0, out, key, choice),)
            table.register(op)

    def _add_several(
        self,
        op: TapeOperation,
        new: Results,
        choices: Sequence[Choice] | None,
        results: list[torch.Tensor] | None,
    ) -> None:
        for _, _, key in new[1:]:
            if key in self._values or (key in self._roots and self.table.root(key) is not None):
                return  # it gave back a tensor that was there before
        if choices is not None and results is not None and len(choices) != len(new):
            choices = choices_for(new, choices, results)
        self.table.add(op, new, choices)


def _methods(kind: type[Recorder]) -> list[Any]:
    return [kind._observe, kind._run_unusual, kind._run_special, kind._record]


_REFERENCE = _methods(Recorder)


def _is_reference(kind: type[Recorder]) -> bool:
    """Whether the native core does what a recorder would: not if somebody has changed how."""
    return _methods(kind) == _REFERENCE


def _new_results(out: Any, inputs: list[TapeValue]) -> Results:
    """Of several results, those that do not lie in an input's storage."""
    given = {value.key for value in inputs}
    new: Results = []
    for position, tensor in enumerate(out if type(out) is tuple else flat_results(out)):
        kind = type(tensor)
        if kind is _Tensor:
            key = storage_key(tensor)
            if key not in given:
                new.append((position, tensor, key))
        elif kind is list or kind is tuple:
            return _new_results(flat_results(out), inputs)
        elif isinstance(tensor, _Tensor):
            raise Untrackable
    return new


def _as_replayed(info: OpInfo, args: Any, kwargs: Any, out: Any) -> tuple[OpInfo, Any, Any]:
    """An operation as it is recorded, where that differs from how it was called."""
    if info.dtype and _depends_on_defaults(kwargs, out):
        kwargs = {**kwargs, "dtype": out.dtype, "device": out.device}
    if info.shape_only and (instead := without_content(info, args, kwargs, out)) is not None:
        return instead
    return info, args, kwargs


def _depends_on_defaults(kwargs: Any, out: Any) -> bool:
    """At replay another dtype may be the default one, and another accelerator the current one."""
    return isinstance(out, _Tensor) and ("dtype" not in kwargs or not out.is_cpu)


def _all_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten((args, tuple(kwargs.values()))) if isinstance(leaf, _Tensor)]


def _in_training(args: Any) -> bool:
    # in evaluation mode running statistics are ordinary inputs
    return not (len(args) > 5 and args[5] is False)


def _running_statistics(info: OpInfo, args: Any) -> list[torch.Tensor]:
    return [args[place] for place in info.scratch if isinstance(args[place], _Tensor)]


def _with_scratch(info: OpInfo, args: Any) -> list[Any]:
    """Replay must not update running statistics a second time: it gets tensors whose content is not
    read.
    """
    replaced = list(args)
    for place in info.scratch:
        statistics = args[place]
        if isinstance(statistics, _Tensor):
            replaced[place] = scratch(statistics.shape, statistics.dtype, place)
    return replaced
