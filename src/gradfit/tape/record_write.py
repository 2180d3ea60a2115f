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
from gradfit.tape.operators import LOAD, OpInfo
from gradfit.tape.saved_tensors import Saver
from gradfit.tape.storage import Untrackable, fills_storage, fresh_results, key_of, written_tensors
from gradfit.tape.storage_table import (
    NO_KWARGS,
    UNCOUNTED,
    WRITTEN,
    Chunk,
    choices_for,
    each_once,
    expected,
    next_index,
    version_of,
)
from gradfit.tape.values import Operation, Value, nothing
from gradfit.tape.written_slices import is_small_slice

# how such a result was written need not be known
_NOT_WRITTEN_DOWN = frozenset({KEEP, OFFLOAD, PACK})


class Writer(Saver):
    """Records writes."""

    def _write_self(self, func: Any, info: OpInfo, args: Any, kwargs: Any, state: Any) -> Any:
        """`_write` for what nearly all writes are: a method on the very tensor that an operation
        has returned.
        """
        target: torch.Tensor = args[0]
        old = None if target.is_inference() else self._made.get(storage_key(target))
        if (
            old is None
            and not target.is_inference()
            and self._root(key := storage_key(target)) is None
        ):
            if key in self._leaves:
                self._save_leaves(key)
            self._write_unknown(target, key)
            # unknown before, unknown after: a counter of batches, mostly
            out = info.call(*args, **kwargs)
            self._offload([target], self._ask(func, info, args, kwargs, out)[1])
            return out
        if (
            old is None
            or old.natural() is not target
            or not expected(old, target._version)
            or (old.fragile is not None and info.reads_written)
            or (self._chunks and old.key in self._chunks)
        ):
            return self._write(func, info, args, kwargs, state)
        old.fragile = None
        inputs = [old]
        op: Operation | None = None
        try:
            template = [old, *self._template(args[1:], inputs)]
            named = self._template_kwargs(kwargs, inputs)
            op = Operation(next_index(), func, info, template, named, each_once(inputs))
        except Untrackable:  # rule 5
            pass
        if old.tensor is not None:
            self._save_value(old)
        out = info.call(*args, **kwargs)
        _, choices = self._ask(func, info, args, kwargs, out)
        key, watcher, natural = old.key, old.gone, old.natural
        old.gone, old.natural = None, nothing
        if op is None or (choices is not None and choices[0] in _NOT_WRITTEN_DOWN):
            self._made.pop(key, None)
            self._offload([target], choices)
            return out
        op.rng = state
        op.written = (old,)
        value = Value(
            key, old.geometry, self.segment, op, -1, WRITTEN - target._version, natural, watcher
        )
        if choices is not None and choices[0] is HOLD:
            value.evictable = True
        self._made[key] = value
        op.outputs.append(weakref.ref(value))
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
            targets = []
        if not targets:
            out = info.call(*args, **kwargs)
            self._ask(func, info, args, kwargs, out)
            return out
        early = int(info.counts_first)
        olds = [
            self._present(key, target, early) for key, target in zip(keys, targets, strict=True)
        ]
        op: Operation | None = None
        if info.recordable and None not in olds and len(set(keys)) == len(keys):
            if not info.reads_written:
                for old in olds:
                    old.fragile = None  # type: ignore[union-attr]  # written to, not read
            op = self._open(func, info, args, kwargs)
        for key, old, target in zip(keys, olds, targets, strict=True):
            if key in self._leaves:
                self._save_leaves(key, early)
            if old is not None:
                self._save_value(old)
            else:
                self._write_unknown(target, key)
        out = info.call(*args, **kwargs)
        if info.writes_lists:
            increment_version(targets)  # torch does not, under a dispatch mode
        fresh = []
        if out is not targets[0]:
            written_to = set(keys)
            fresh = [entry for entry in fresh_results(out, args) if entry[2] not in written_to]
        results, choices = self._ask(func, info, args, kwargs, out)
        for key, old in zip(keys, olds, strict=True):
            self._made.pop(key, None)
            self._roots.pop(key, None)
            if old is not None:
                old.gone = None
                old.natural = nothing
        if op is None or (choices is not None and not _NOT_WRITTEN_DOWN.isdisjoint(choices)):
            self._offload(targets, choices)
            return out  # rule 5: from here on it is a root, or lies elsewhere
        op.rng = state
        op.written = tuple(olds)  # type: ignore[arg-type]
        op.slices = is_small_slice(targets[0])
        written = [
            (-1 - number, target, key)
            for number, (target, key) in enumerate(zip(targets, keys, strict=True))
        ]
        entries = [*written, *fresh]
        if choices is not None and len(choices) != len(entries):
            choices = choices_for(entries, choices, results)
        self._adopt(op, entries, choices)
        self._written(targets, keys, olds)
        return out

    def _offload(self, targets: list[torch.Tensor], choices: Sequence[Choice] | None) -> None:
        """What was written moves out, if the policy says so; how it was written need not be
        known.
        """
        for target, choice in zip(targets, choices or (), strict=False):
            if choice in (OFFLOAD, PACK) and fills_storage(target):
                key = storage_key(target)
                self._roots.pop(key, None)
                self._adopt(
                    Operation(next_index(), None, LOAD, [], NO_KWARGS, []),
                    [(0, target, key)],
                    [choice],
                )
                self._written([target], [key], [None])

    def _written(
        self, targets: list[torch.Tensor], keys: list[int], olds: list[Value | None]
    ) -> None:
        """Note by which version counter a write will be counted, and that the others stay as they
        are.
        """
        for target, key, old in zip(targets, keys, olds, strict=True):
            version, value = version_of(target), self._made[key]
            counter: Value | Chunk = value
            if old is not None and (chunk := self._chunk(key, target)) is not None:
                counter, value.seen = chunk, old.seen
            counter.seen = version if version == UNCOUNTED else WRITTEN - version


def _refuse_views(func: Any, targets: list[torch.Tensor]) -> None:
    """torch forgets the history of a view that a `_foreach` operation writes to under any dispatch
    mode.
    """
    if torch.is_grad_enabled() and any(t.requires_grad and base_of(t) is not None for t in targets):
        raise UnsupportedOp(
            f"{func} writes to a view of a tensor that requires a gradient, and torch loses that"
            " gradient inside a scope. Call the operation on each tensor, or on copies."
        )
