"""Operations that write to what is there: rule 4 of `recorder.py`, a write makes a new value."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from gradfit._torch import base_of, storage_key
from gradfit.choices import HOLD, KEEP, OFFLOAD, PACK, Choice
from gradfit.errors import UnsupportedOp
from gradfit.tape.decisions import Decisions
from gradfit.tape.operators import OpInfo
from gradfit.tape.storage import Untrackable, fresh_results, key_of, written_tensors
from gradfit.tape.storage_table import (
    ATOMS,
    NO_KWARGS,
    Results,
    StorageTable,
    choices_for,
    each_once,
    next_index,
)
from gradfit.tape.values import TapeOperation, TapeValue, new_operation, new_value, nothing
from gradfit.tape.version_counters import only_recorded_writes
from gradfit.tape.written_slices import is_small_slice

# How such a result was written is of no use: it will not be made again by its operation.
_NOT_WRITTEN_DOWN = frozenset({KEEP, OFFLOAD, PACK})
_MOVED_OUT = frozenset({OFFLOAD, PACK})
_Choices = Sequence[Choice] | None


class WriteRecorder:
    """Runs operations that write, and records what they do to the storages of a table."""

    def __init__(self, table: StorageTable, decisions: Decisions) -> None:
        self._table, self._decisions = table, decisions
        self._values, self._split_results = table.values, table.split_results.by_storage

    # ------------------------------------------------------------------- a method on its own tensor

    def run_method(self, func: Any, info: OpInfo, args: Any, kwargs: Any, random_state: Any) -> Any:
        """`run` for what nearly all writes are: a method on the very tensor that an operation has
        returned. Hot.
        """
        target: torch.Tensor = args[0]
        if target.is_inference():
            return self.run(func, info, args, kwargs, random_state)
        key = storage_key(target)
        old = self._values.get(key)
        if old is None and self._table.root(key) is None:
            return self._run_on_unknown(func, info, args, kwargs, key)
        if (
            old is None
            or old.forward_tensor() is not target
            or not old.is_whole(target)
            or not only_recorded_writes(old, target._version)
            or (old.unwritten is not None and info.reads_written)
            or (self._split_results and key in self._split_results)
        ):
            return self.run(func, info, args, kwargs, random_state)
        old.unwritten = None
        op = self._open_method(func, info, args, kwargs, old)
        if old.tensor is not None:
            self._table.copy_value(old)
        out = info.call(*args, **kwargs)
        choices = None
        if self._decisions.policy is not None:
            choices = self._decisions.choices_for(func, [target], args, kwargs)
        death_watch, forward_tensor = old.death_watch, old.forward_tensor
        old.death_watch, old.forward_tensor = None, nothing
        if op is None or (choices is not None and choices[0] in _NOT_WRITTEN_DOWN):
            self._values.pop(key, None)
            self._table.move_out_written((target,), choices)
            return out
        op.random_state = random_state
        op.written = (old,)
        value = new_value(
            key, old.geometry, self._table.segment, op, -1, target._version, forward_tensor,
            death_watch,
        )  # fmt: skip
        value.write_pending = True
        if choices is not None and choices[0] is HOLD:
            value.evictable = True
        self._values[key] = value
        op.outputs = (weakref.ref(value),)
        self._table.register(op)
        return out

    def _open_method(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, old: TapeValue
    ) -> TapeOperation | None:
        inputs = [old]
        references: list[Any] = [old]
        named = NO_KWARGS
        try:
            if len(args) == 2 and type(args[1]) in ATOMS:
                references.append(args[1])
            elif len(args) > 1:
                references += self._table.refer_all(args[1:], inputs)
            if kwargs:
                named = self._table.refer_kwargs(kwargs, inputs)
        except Untrackable:  # rule 5
            return None
        return new_operation(next_index(), func, info, references, named, each_once(inputs))

    def _run_on_unknown(self, func: Any, info: OpInfo, args: Any, kwargs: Any, key: int) -> Any:
        """Unknown before, unknown after: a counter of batches, mostly."""
        target = args[0]
        self._table.before_write(key, target, None)
        out = info.call(*args, **kwargs)
        if self._decisions.policy is not None:
            choices = self._decisions.choices_for(func, [target], args, kwargs)
            if choices is not None and choices[0] in _MOVED_OUT:
                self._table.move_out_written((target,), choices)
        return out

    # -------------------------------------------------------------------------------- any operation

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any, random_state: Any) -> Any:
        """Run an operation that writes, and record it."""
        targets = written_tensors(info, args, kwargs)
        if info.writes_lists:
            _refuse_views(func, targets)
        try:
            keys = [key_of(target) for target in targets]
        except Untrackable:
            self._table.forget_before_write(targets)
            return self._run_unrecorded(func, info, args, kwargs)
        if not targets:
            return self._run_unrecorded(func, info, args, kwargs)
        counted_before = int(info.counts_first)
        olds = [
            self._table.find(key, target, counted_before)
            for key, target in zip(keys, targets, strict=True)
        ]
        op = self._open(func, info, args, kwargs, keys, olds)
        self._copy_what_is_needed(keys, olds, targets, counted_before)
        out = info.call(*args, **kwargs)
        if info.writes_lists:
            # torch (2.10 to 2.13) does not count these writes where Python is called below
            # autograd: https://github.com/pytorch/pytorch/pull/191154.
            increment_version(targets)
        returned = _new_results(out, args, keys, targets)
        results, choices = self._decisions.of(func, info, args, kwargs, out)
        self._drop_olds(keys, olds)
        if op is None or not _NOT_WRITTEN_DOWN.isdisjoint(choices or ()):
            self._table.move_out_written(targets, choices)
            return out  # rule 5: from here on it is a root, or lies elsewhere
        op.random_state = random_state
        op.written = tuple(olds)  # type: ignore[arg-type]
        op.slices = is_small_slice(targets[0])
        self._add(op, targets, keys, returned, results, choices)
        return out

    def _run_unrecorded(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        out = info.call(*args, **kwargs)
        self._decisions.of(func, info, args, kwargs, out)  # it has a number all the same
        return out

    def _open(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Any,
        keys: list[int],
        olds: list[TapeValue | None],
    ) -> TapeOperation | None:
        """The operation, if it can be replayed: on storages of the table, each written once."""
        present = [old for old in olds if old is not None]
        if not info.recordable or len(present) < len(olds) or len(set(keys)) < len(keys):
            return None
        if not info.reads_written:
            for old in present:
                old.unwritten = None  # written to, not read
        return self._table.open_operation(func, info, args, kwargs)

    def _copy_what_is_needed(
        self,
        keys: list[int],
        olds: list[TapeValue | None],
        targets: list[torch.Tensor],
        counted_before: int,
    ) -> None:
        for key, old, target in zip(keys, olds, targets, strict=True):
            self._table.before_write(key, target, old, counted_before)

    def _drop_olds(self, keys: list[int], olds: list[TapeValue | None]) -> None:
        for key, old in zip(keys, olds, strict=True):
            self._values.pop(key, None)
            self._table.roots.pop(key, None)
            if old is not None:
                old.death_watch = None
                old.forward_tensor = nothing

    def _add(
        self,
        op: TapeOperation,
        targets: list[torch.Tensor],
        keys: list[int],
        returned: Results,
        results: list[torch.Tensor],
        choices: _Choices,
    ) -> None:
        written = [
            (-1 - number, target, key)
            for number, (target, key) in enumerate(zip(targets, keys, strict=True))
        ]
        entries = [*written, *returned]
        if choices is not None and len(choices) != len(entries):
            choices = choices_for(entries, choices, results)
        self._table.add(op, entries, choices)
        for target, key, old in zip(targets, keys, op.written, strict=True):
            self._table.expect_counted_write(target, key, old)


def _new_results(out: Any, args: Any, keys: list[int], targets: list[torch.Tensor]) -> Results:
    """What an operation returned beside what it wrote to."""
    if out is targets[0]:
        return []
    written = set(keys)
    return [result for result in fresh_results(out, args) if result[2] not in written]


def _refuse_views(func: Any, targets: list[torch.Tensor]) -> None:
    """torch forgets the history of a view that a `_foreach` operation writes to under any dispatch
    mode.
    """
    if torch.is_grad_enabled() and any(map(_is_view_with_gradient, targets)):
        raise UnsupportedOp(
            f"{func} writes to a view of a tensor that requires a gradient, and torch loses that"
            " gradient inside a scope. Call the operation on each tensor, or on copies."
        )


def _is_view_with_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and base_of(tensor) is not None
