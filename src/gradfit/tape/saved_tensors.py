"""What autograd saves while a forward is recorded: the tensor itself, or a handle on a value that
can be rebuilt.

The rules that are cited are those of `recorder.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gradfit._torch import FakeTensor, as_class, base_of, detached, graph_task_id, storage_key
from gradfit.choices import KEEP, Choice
from gradfit.source_line import source_line
from gradfit.tape import replay
from gradfit.tape.decisions import ALL_KEPT, Policy
from gradfit.tape.operators import OpInfo
from gradfit.tape.overwritten import overwritten
from gradfit.tape.storage import Untrackable, key_of, place_of
from gradfit.tape.storage_table import Known, version_of
from gradfit.tape.stream import results_of
from gradfit.tape.values import Handle, OfSubclass, Segment, Tape, Value, shaped
from gradfit.tape.written_slices import is_small_slice, part_of, whole_of

ALL = (KEEP,)  # of `_ask`: all results are kept, however many they are


class Saver(Known):
    """Decides, at each tensor that autograd saves, whether it gets the tensor or a handle."""

    def __init__(self, segment: Segment, policy: Policy | None) -> None:
        super().__init__(segment, policy)
        self.tape = Tape(threading.RLock())
        self.saving: Any = None  # called with every tensor that autograd saves
        self._copying = False  # what runs now is no operation of the forward
        self._kept: set[int] = set()  # storages that autograd has, for the statistics

    def _ask(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any, out: Any
    ) -> tuple[list[torch.Tensor], Sequence[Choice] | None]:
        """An operation's results, and what becomes of each: `ALL` if all are kept, None if all are
        rebuilt.

        The policy is asked once for every operation, right after it ran.
        """
        if self.policy is None:
            return [], None
        results = results_of(info, args, kwargs, out)
        decision = self.policy.decide(func, results, args, kwargs) if results else ALL_KEPT
        if decision is None:
            return results, None
        if decision.segment is not None:
            self.segment = decision.segment
        if decision.last:
            self.after_last()
        return results, ALL if decision.choices is None else decision.choices

    def after_last(self) -> None:
        """Nothing that comes now will be rebuilt."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves `tensor`: give it a handle if the tape can make the tensor again."""
        if self.saving is not None:
            self.saving(tensor)
        if self._dead:
            self._bury()
        if tensor.requires_grad and tensor.is_leaf:  # it lives anyway, even if it was made inside
            return (tensor, tensor._version)
        try:
            key = storage_key(tensor) if type(tensor) is torch.Tensor else key_of(tensor)
        except (Untrackable, RuntimeError, NotImplementedError):
            return (tensor.detach() if tensor.grad_fn is not None else tensor, version_of(tensor))
        if type(tensor) is not torch.Tensor and not isinstance(tensor, FakeTensor):
            return self._pack_subclass(tensor)
        value = self._made.get(key)
        if value is None or (value.position < 0 and _is_of_a_parameter(tensor)):
            return self._pack_root(tensor)
        natural = value.natural()
        geometry = None
        if natural is not tensor:
            try:
                geometry = place_of(tensor)
            except Untrackable:
                return self._pack_root(tensor)
            if geometry == value.geometry:
                geometry = None
        if value.fragile is not None or value.seen != tensor._version:
            value = self._present(value.key, tensor)
            if value is not None and value.fragile is not None:
                self._copying = True  # autograd calls: what we do now would be heard
                try:
                    self._settle(value, tensor, detached)
                finally:
                    self._copying = False
            if value is None or value.op is None:
                return self._pack_root(tensor)
        if (
            value.position < 0
            and value.op is not None
            and value.op.slices
            and is_small_slice(tensor)
        ):
            place = place_of(tensor)
            part = part_of(value, place)
            if part is not None:
                value, geometry = part, place
        handle = Handle(self.tape, value, geometry)
        if value.handles is None:
            self._first_pack(value, tensor, natural)
            value.handles = [weakref.ref(handle)]
        else:
            value.handles.append(weakref.ref(handle))
        return handle

    def _pack_subclass(self, tensor: torch.Tensor) -> Any:
        """A frozen Parameter, a subclass of the user's: whoever saved it gets one of its class
        back.
        """
        saving, self.saving = self.saving, None
        try:
            return OfSubclass(self.pack(detached(tensor)), tensor)
        finally:
            self.saving = saving

    def _pack_root(self, tensor: torch.Tensor) -> Any:
        if _is_of_a_parameter(tensor):
            return (tensor, tensor._version)
        if self.segment.scope is None:
            return (detached(tensor), version_of(tensor))
        self._note_kept(tensor)
        return (detached(tensor), version_of(tensor), source_line())

    def _first_pack(self, value: Value, tensor: torch.Tensor, natural: torch.Tensor | None) -> None:
        forward_tensor = (
            natural if natural is tensor or not value.evictable else value.forward_tensor()
        )
        if value.evictable and (forward_tensor is not None or tensor.dtype is value.geometry[3]):
            value.tensor = _whole(value, tensor, forward_tensor)
            value.version = tensor._version
            if self.tape.holding is not None:
                self.tape.holding((value,))
        elif self.segment.scope is not None:
            if (whole := whole_of(value)) is not None:
                self.segment.scope.note_freed(whole, tensor.nbytes)
            else:
                self.segment.scope.note_freed(value, tensor.untyped_storage().nbytes())

    def keep(self, tensor: torch.Tensor) -> None:
        """Make a value of the tape a root: it is held from now on, and replays start from it."""
        self._bury()
        try:
            value = self._present(key_of(tensor), tensor)
        except Untrackable:
            return
        if value is not None and value.op is not None:
            self._made.pop(value.key, None)
            value.tensor = _whole(value, tensor, value.forward_tensor())
            value.version = tensor._version
            value.gone = value.op = None
            value.fragile = None
            self._roots[value.key] = weakref.ref(value)
            self._note_kept(tensor)

    def written_over(self) -> torch.Tensor | None:
        """Something that rebuilds start from and that somebody has written to since it was read, if
        there is.
        """
        for root in self._roots.values():
            value = root()
            if (
                value is not None
                and value.tensor is not None
                and -1 < value.version != value.tensor._version
            ):
                return value.tensor
        for reference in (each for leaves in self._leaves.values() for each in leaves):
            leaf = reference()
            if leaf is not None and leaf.overwritten:
                return leaf.content
        return None

    def _note_kept(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._kept:  # autograd saves the same storage several times
            self._kept.add(key)
            if self.segment.scope is not None:
                self.segment.scope.note_kept(tensor.untyped_storage().nbytes())


def _is_of_a_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a view of one: no activation, even if somebody has written to the parameter."""
    base = base_of(tensor)
    return base is not None and base.is_leaf and base.requires_grad


def _whole(value: Value, tensor: torch.Tensor, forward_tensor: torch.Tensor | None) -> torch.Tensor:
    """All of a value's result, of which `tensor` may be a view."""
    if forward_tensor is None:
        return shaped(detached(tensor), value.geometry)
    return detached(forward_tensor)


def unpack(packed: Any) -> torch.Tensor:
    """Autograd wants it back: the kept tensor, if nobody wrote to it, or a replay."""
    if type(packed) is Handle:
        return replay.take(packed) if graph_task_id() != -1 else replay.look(packed)
    if type(packed) is OfSubclass:
        alias = as_class(unpack(packed.content), packed.kind)
        vars(alias).update(packed.attributes)
        return alias
    tensor: torch.Tensor = packed[0]
    if packed[1] is not None and packed[1] >= 0 and tensor._version != packed[1]:
        raise overwritten(
            tensor, tensor._version, packed[1], line=packed[2] if len(packed) > 2 else ""
        )
    return tensor
