"""Writes down what a forward pass does, and decides at each saved tensor whether autograd gets it
or a handle.

Rules, cited in this room where they are obeyed:

1. A storage is known by its address, and only while it lives: a watcher takes the address out when
   it dies.
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
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from gradfit._torch import graph_task_id, storage_key
from gradfit._torch_listen import (
    listening,
    pop_hooks,
    push_hooks,
    stop_tracing,
    trace_again,
    untraced,
)
from gradfit.choices import Choice
from gradfit.tape import generators, process_settings, replay
from gradfit.tape.decisions import Policy
from gradfit.tape.fsdp_boundaries import watch_units
from gradfit.tape.operators import OpInfo, info_of, infos, view_names
from gradfit.tape.record_write import Writer
from gradfit.tape.saved_tensors import ALL, unpack
from gradfit.tape.shape_only import without_content
from gradfit.tape.storage import Untrackable, flatten, place_of, written_tensors
from gradfit.tape.storage_table import (
    ATOMS,
    FEW,
    NO_KWARGS,
    Fresh,
    choices_for,
    each_once,
    next_index,
)
from gradfit.tape.stream import results_of
from gradfit.tape.values import Operation, Segment, Slice, Value, geometry_of

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_strided = torch.strided


class _Thread(threading.local):
    def __init__(self) -> None:
        # that are entered in this thread, the outermost first
        self.recorders: list[weakref.ref[Recorder]] = []


_thread = _Thread()


def _pass_on(recorder: Recorder) -> None:
    """A recording ends; one around it may go on."""
    outer = [
        one
        for reference in _thread.recorders
        if (one := reference()) is not None and one is not recorder
    ]
    _thread.recorders = [weakref.ref(one) for one in outer]
    if outer:
        outer[-1].inherit(recorder)


class Recorder(Writer):
    """Enter it around the code to record; `segment` is where it is."""

    def __init__(self, segment: Segment, policy: Policy | None = None) -> None:
        super().__init__(segment, policy)
        self._listening: Any = None
        self._hooked, self._thread = False, 0
        self._units: list[torch.utils.hooks.RemovableHandle] = []
        self._tracing: Any = None

    @untraced
    def __enter__(self) -> Recorder:
        self._tracing = stop_tracing()
        try:
            self._hooked, self._thread = True, threading.get_ident()
            push_hooks(self.pack, unpack)
            self._units = watch_units(self.keep, self._refilled)
            process_settings.recording_begins(self)
            _thread.recorders.append(weakref.ref(self))
            ear = listening(self._hear, view_names, self._doubt)
            ear.__enter__()
            self._listening = ear
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
                if self._hooked:
                    self._hooked = False
                    pop_hooks()
            finally:
                try:
                    process_settings.recording_ends(self)
                finally:
                    self._listening = None
                    _pass_on(self)
                    self._made.clear()  # the graph's saved tensors hold `pack`, and so this object
                    self._roots.clear()
                    self._leaves.clear()
                    self._unwatched.clear()
                    self._chunks.clear()
                    self._inherited.clear()
                    self.policy = self.watching = self.saving = None
                    while self._units:
                        self._units.pop().remove()
                    trace_again(self._tracing)

    def unhook(self) -> None:
        """Let autograd save by itself from now on. Only where it has just called `pack`: our hooks
        are the innermost.

        Not in a backward inside of the forward, nor in its threads: their hooks are copies of ours,
        which stay.
        """
        if self._hooked and graph_task_id() == -1 and threading.get_ident() == self._thread:
            self._hooked, self.saving = False, None
            pop_hooks()

    def _hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and write it down."""
        if self._copying:
            return func(*args, **kwargs)
        if self._dead:
            self._bury()
        info = infos.get(id(func)) or info_of(func)
        if info.simple and graph_task_id() == -1:
            out = info.call(*args, **kwargs)
            policy = self.policy
            if policy is None:
                self._record(func, info, args, kwargs, out, None, None)
                return out
            results = [out] if type(out) is _Tensor else results_of(info, args, kwargs, out)
            if not results:
                return out
            decision = policy.decide(func, results, args, kwargs)
            if decision is None:
                self._record(func, info, args, kwargs, out, None, None)
                return out
            if decision.segment is not None:
                self.segment = decision.segment
            if decision.choices is not None:
                self._record(func, info, args, kwargs, out, None, decision.choices, results)
            if decision.last:
                self.after_last()
            return out
        if info.view:  # rule 2
            return info.call(*args, **kwargs)
        if graph_task_id() != -1:  # rule 6
            if info.writes:
                targets = written_tensors(info, args, kwargs)
                self._lose(targets)
                if info.writes_lists:
                    increment_version(targets)
            return info.call(*args, **kwargs)
        return self._special(func, info, args, kwargs)

    def _special(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        if info.collective:
            self._lose(_all_tensors(args, kwargs))
        state = (
            generators.capture(args, kwargs)
            if info.random and generators.draws(info, args, kwargs)
            else None
        )
        if info.writes:
            if self._inherited:
                self._save_inherited(written_tensors(info, args, kwargs), int(info.counts_first))
            if info.writes_self and type(args[0]) is _Tensor and args[0].layout is _strided:
                return self._write_self(func, info, args, kwargs, state)
            return self._write(func, info, args, kwargs, state)
        if info.scratch and _in_training(args):
            self._lose(
                [args[position] for position in info.scratch if isinstance(args[position], _Tensor)]
            )
        out = info.call(*args, **kwargs)
        if info.chunks:
            self._add_chunks(out)
        results, choices = self._ask(func, info, args, kwargs, out)
        if choices is ALL or not info.recordable:  # rule 5
            return out
        if info.scratch and _in_training(args):
            args = [_scratch(each) if at in info.scratch else each for at, each in enumerate(args)]
        if info.dtype and isinstance(out, _Tensor) and ("dtype" not in kwargs or not out.is_cpu):
            # At replay another dtype may be the default one, and another accelerator the current
            # one.
            kwargs = {**kwargs, "dtype": out.dtype, "device": out.device}
        if info.shape_only and (instead := without_content(info, args, kwargs, out)) is not None:
            info, args, kwargs = instead
        self._record(func, info, args, kwargs, out, state, choices, results)
        return out

    def _record(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        out: Any,
        state: Any,
        choices: Sequence[Choice] | None,
        results: list[torch.Tensor] | None = None,
    ) -> None:
        """Every microsecond here is paid hundreds of times per step: what is common is written out.

        `choices` are for these `results`.
        """
        if self._dead:
            self._bury()
        made = self._made
        inputs: list[Value] = []
        template: list[Any] = []
        try:
            for argument in args:
                kind = type(argument)
                if kind is _Tensor:
                    key = storage_key(argument)
                    value = made.get(key)
                    if value is None:
                        base = argument._base
                        if type(base) is _Parameter and base.requires_grad and base.is_leaf:
                            template.append(self._leaf(argument, key))
                        else:
                            template.append(self._reference(argument, inputs))
                    elif value.fragile is not None or not 0 <= value.seen == argument._version:
                        template.append(self._reference(argument, inputs))
                    else:
                        if len(inputs) > FEW or value not in inputs:
                            inputs.append(value)
                        template.append(
                            value
                            if value.natural() is argument
                            else Slice(value, place_of(argument))
                        )
                elif kind in ATOMS:
                    template.append(argument)
                elif kind is _Parameter and argument.requires_grad and argument.is_leaf:
                    template.append(self._leaf(argument, storage_key(argument)))
                else:
                    template.append(self._template((argument,), inputs)[0])
            named = self._template_kwargs(kwargs, inputs) if kwargs else NO_KWARGS
            fresh = _fresh(out, inputs)
        except (Untrackable, RuntimeError):  # rule 5
            return
        if not fresh:
            return
        if choices is not None and results is not None and len(choices) != len(fresh):
            choices = choices_for(fresh, choices, results)
        for _, _, key in fresh:
            if key in made or (key in self._roots and self._root(key) is not None):
                return  # it gave back a tensor that was there before: nothing new was made
        op = Operation(next_index(), func, info, template, named, each_once(inputs))
        op.rng = state
        self._adopt(op, fresh, choices)


def _fresh(out: Any, inputs: list[Value]) -> Fresh:
    """The results that do not lie in an input's storage."""
    if type(out) is _Tensor:
        key = storage_key(out)
        for value in inputs:
            if value.key == key:
                return []
        return [(0, out, key)]
    fresh: Fresh = []
    given = {value.key for value in inputs}
    for position, tensor in enumerate(
        out if type(out) is tuple and list not in map(type, out) else flatten((out,))
    ):
        if type(tensor) is _Tensor:
            key = storage_key(tensor)
            if key not in given:
                fresh.append((position, tensor, key))
        elif isinstance(tensor, _Tensor):
            raise Untrackable
    return fresh


def _all_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten((args, tuple(kwargs.values()))) if isinstance(leaf, _Tensor)]


def _in_training(args: Any) -> bool:
    # in evaluation mode running statistics are ordinary inputs
    return not (len(args) > 5 and args[5] is False)


def _scratch(statistics: Any) -> Any:
    """Replay must not update running statistics a second time: it gets tensors whose content is not
    read.
    """
    return (
        replay.Scratch(geometry_of(statistics)) if isinstance(statistics, _Tensor) else statistics
    )
