"""What autograd saves while a forward is recorded: the tensor itself, or a handle on a value that
can be rebuilt.

The rules that are cited are those of `recorder.py`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from gradfit._torch import (
    FakeTensor,
    as_class,
    detached,
    graph_task_id,
    make_alias,
    storage_key,
)
from gradfit._torch_listen import pop_hooks, push_hooks, top_hooks, untraced
from gradfit.errors import ActivationOverwritten
from gradfit.interrupts import uninterrupted
from gradfit.source_line import Place, source_place
from gradfit.tape.decisions import SaveObserver
from gradfit.tape.native_session import hooks_of
from gradfit.tape.overwritten import overwritten
from gradfit.tape.replay import look, take
from gradfit.tape.storage import Untrackable, key_of, place_of
from gradfit.tape.storage_table import StorageTable, is_view_of_parameter
from gradfit.tape.values import (
    Geometry,
    Handle,
    OfSubclass,
    References,
    Tape,
    TapeValue,
    geometry_of,
    new_handle,
    shaped,
)
from gradfit.tape.version_counters import UNCOUNTED, version_of
from gradfit.tape.written_slices import is_small_slice, part_of, whole_of

_Tensor = torch.Tensor
_reference_to = weakref.ref


class SavedTensors:
    """Decides, at each tensor that autograd saves, whether it gets the tensor or a handle.

    The graph's nodes hold `pack`, and so this object, as long as they live: it holds no recorder
    and no policy.
    """

    def __init__(self, table: StorageTable, tape: Tape) -> None:
        self.tape = tape
        self.observer: SaveObserver | None = None
        self.copying = False  # what runs now is no operation of the forward
        self._table = table
        self._dead, self._values = table.dead, table.values  # they stay the same objects
        self._counted: set[int] = set()  # storages that autograd has, for the statistics
        self._hooked, self._thread = False, 0
        self._hook: Any = None  # what autograd calls: `pack`, or the native core's

    # ---------------------------------------------------------------------------------------- hooks

    def begin(self) -> None:
        """Be asked by autograd, in this thread."""
        self._hooked, self._thread = True, threading.get_ident()
        self._hook, unpack_hook = hooks_of(self, self._table) or (self.pack, unpack)
        push_hooks(self._hook, unpack_hook)

    def end(self) -> None:
        """Be asked no more; may be called twice."""
        self.observer = None
        if self._hooked:
            # By what is set now: Ctrl-C may have come before they were, or in the first call.
            top = top_hooks(True)
            if top is not None and top[0] == self._hook:
                pop_hooks()
            elif top is not None:
                self._take_out()
            self._hooked, self._hook = False, None

    def _take_out(self) -> None:
        """Take our hooks away from below those of somebody who has entered his later, and leaves
        them later.
        """
        above = []
        with uninterrupted():
            while (top := top_hooks(True)) is not None and top[0] != self._hook:
                above.append(top)
                pop_hooks()
            if top is not None:
                pop_hooks()
            for hooks in reversed(above):
                push_hooks(*hooks)

    def unhook(self) -> None:
        """Let autograd save by itself from now on. Only where it has just called `pack`: our hooks
        are the innermost.

        Not in a backward inside of the forward, nor in its threads: their hooks are copies of ours,
        which stay.
        """
        if self._hooked and graph_task_id() == -1 and threading.get_ident() == self._thread:
            self.end()

    # ----------------------------------------------------------------------------------------- pack

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves `tensor`: give it a handle if the tape can make the tensor again.

        Hot: once for each tensor that autograd saves. What is common is written out here.
        """
        if self.observer is not None:
            return self._pack_observed(self.observer, tensor)
        if self._dead:
            self._table.remove_dead()
        if tensor.is_leaf and tensor.requires_grad:  # it lives anyway, even if it was made inside
            return (tensor, tensor._version)
        if type(tensor) is not _Tensor:
            return self._pack_other_class(tensor)
        try:
            value = self._values.get(storage_key(tensor))
        except (RuntimeError, NotImplementedError):  # it has no storage
            return _pack_untracked(tensor)
        if value is None:
            return self._pack_root(tensor)
        if (
            value.version != tensor._version
            or value.position < 0
            or value.write_pending
            or value.unwritten is not None
        ):
            return self._pack_written(value, tensor)
        base = tensor._base
        if base is not None and base.is_leaf and base.requires_grad:
            return self._pack_root(tensor)  # `.data =` made the result a parameter's memory
        try:
            geometry: Geometry | None = place_of(tensor)
        except Untrackable:
            return self._pack_root(tensor)
        if geometry == value.geometry:
            geometry = None  # it is all of it
        handle = Handle()  # as `new_handle`
        handle.tape = self.tape
        handle.value = value
        handle.geometry = geometry
        handle.pass_number = 0
        handles = value.handles
        if handles is not None:
            value.handles = _and_another(handles, handle)
            return handle
        value.handles = (_reference_to(handle),)
        if value.evictable:
            if geometry is None and self.tape.on_held is None:  # as there, written out
                value.tensor = make_alias(_Tensor, tensor)
                value.held_version = value.version
            else:
                self._hold_evictable(value, tensor, geometry)
        elif (scope := self._table.segment.scope) is not None:
            scope.note_freed(value, tensor.untyped_storage().nbytes())
        return handle

    def _pack_observed(self, observer: SaveObserver, tensor: torch.Tensor) -> Any:
        self.observer = None  # for the call below
        try:
            is_last = observer.before_save(tensor)
            packed = self.pack(tensor)
        finally:
            self.observer = observer
        if is_last:
            self.unhook()
        observer.after_save(packed)
        return packed

    def _pack_other_class(self, tensor: torch.Tensor) -> Any:
        """A frozen Parameter, a subclass of the user's: whoever saved it gets one of its class
        back. A fake tensor is as good as a real one.
        """
        try:
            value = self._values.get(key_of(tensor))
        except Untrackable:
            return _pack_untracked(tensor)
        if not isinstance(tensor, FakeTensor):
            return OfSubclass(self.pack(detached(tensor)), tensor)
        return self._pack_root(tensor) if value is None else self._pack_written(value, tensor)

    def _pack_written(self, value: TapeValue, tensor: torch.Tensor) -> Any:
        """`pack` where somebody has written to the storage since its operation returned it, or
        nobody ever has.
        """
        if tensor._base is not None and is_view_of_parameter(tensor):
            return self._pack_root(tensor)
        try:
            geometry = place_of(tensor)
        except Untrackable:
            return self._pack_root(tensor)
        present = self._present(value, tensor)
        if present is None or present.op is None:
            return self._pack_root(tensor)
        if present.op.slices and present.position < 0 and is_small_slice(tensor):
            part = part_of(present, geometry)  # see `written_slices.py`
            if part is not None:
                return self._handle(part, geometry, tensor)
        return self._handle(present, None if geometry == present.geometry else geometry, tensor)

    def _present(self, value: TapeValue, tensor: torch.Tensor) -> TapeValue | None:
        """What the storage holds now; memory that nobody has written is held from now on."""
        if value.unwritten is None and value.version == tensor._version and not value.write_pending:
            return value
        present = self._table.find(value.key, tensor)
        if present is not None and present.unwritten is not None:
            self._hold_unwritten(present, tensor)
        return present

    def _hold_unwritten(self, value: TapeValue, tensor: torch.Tensor) -> None:
        self.copying = True  # autograd calls: what we do now would be observed
        try:
            self._table.hold_unwritten(value, tensor, detached)
        finally:
            self.copying = False

    def _pack_root(self, tensor: torch.Tensor) -> Any:
        """Hot: running statistics come here, too."""
        if tensor._base is not None and is_view_of_parameter(tensor):
            return (tensor, tensor._version)
        try:
            version = tensor._version
        except RuntimeError:  # made under inference mode
            version = UNCOUNTED
        # Not the tensor itself: it may get a graph, by a write, that holds this.
        alias = make_alias(_Tensor, tensor)
        itself = None if tensor.requires_grad else _reference_to(tensor)
        if self._table.segment.scope is None:
            return (alias, version, itself)
        key = storage_key(tensor)
        if key not in self._counted:
            self._count_kept(tensor)
        return (alias, version, itself, source_place(2))

    def _handle(self, value: TapeValue, geometry: Geometry | None, tensor: torch.Tensor) -> Handle:
        handle = new_handle(self.tape, value, geometry)
        if value.handles is not None:
            value.handles = _and_another(value.handles, handle)
            return handle
        value.handles = (_reference_to(handle),)
        if value.evictable:
            self._hold_evictable(value, tensor, geometry)
        else:
            self._count_freed(value, tensor)
        return handle

    def _hold_evictable(
        self, value: TapeValue, tensor: torch.Tensor, geometry: Geometry | None
    ) -> None:
        """Autograd saves it for the first time: it is there until somebody needs the memory."""
        whole = tensor if geometry is None else value.unmoved_forward_tensor()
        if whole is not None and (whole is tensor or whole is tensor._base):
            value.tensor = make_alias(_Tensor, whole)  # one counts the writes to both
        elif tensor.dtype is value.geometry[3]:
            # Through what is saved: a result of `unsafe_split`, as an RNN's gates are, counts its
            # writes for itself.
            value.tensor = shaped(detached(tensor), value.geometry)
        elif whole is not None:
            value.tensor = detached(whole)
        else:
            self._count_freed(value, tensor)
            return
        value.held_version = value.tensor._version
        if self.tape.on_held is not None:
            self.tape.on_held((value,))

    # ----------------------------------------------------------------------------------------- kept

    def keep(self, tensor: torch.Tensor) -> None:
        """Make a value of the tape a root: it is held from now on, and replays start from it."""
        self._table.remove_dead()
        try:
            value = self._table.find(key_of(tensor), tensor)
        except Untrackable:
            return
        if value is not None and value.op is not None:
            whole = _all_of(value, tensor, value.unmoved_forward_tensor())
            self._table.keep(value, whole, tensor._version)
            self._count_kept(tensor)

    # ----------------------------------------------------------------------------------- statistics

    def _count_kept(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._counted:  # autograd saves the same storage several times
            self._counted.add(key)
            if self._table.segment.scope is not None:
                self._table.segment.scope.note_kept(tensor.untyped_storage().nbytes())

    def _count_freed(self, value: TapeValue, tensor: torch.Tensor) -> None:
        scope = self._table.segment.scope
        if scope is None:
            return
        if (whole := whole_of(value)) is not None:
            scope.note_freed(whole, tensor.nbytes)
        else:
            scope.note_freed(value, tensor.untyped_storage().nbytes())


def _and_another(
    handles: References[weakref.ref[Handle]], handle: Handle
) -> References[weakref.ref[Handle]]:
    """A value's handles when it has one more."""
    if isinstance(handles, tuple):
        return [*handles, _reference_to(handle)]
    handles.append(_reference_to(handle))
    return handles


def _pack_untracked(tensor: torch.Tensor) -> Any:
    """One without a storage of its own. Without its graph, which would hold itself."""
    return (tensor.detach() if tensor.grad_fn is not None else tensor, version_of(tensor))


def _all_of(value: TapeValue, tensor: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    """All of a value's result, of which `tensor` may be a view."""
    return shaped(detached(tensor), value.geometry) if whole is None else detached(whole)


@untraced
def unpack(packed: Any) -> torch.Tensor:
    """Autograd wants it back: the kept tensor, if nobody wrote to it, or a replay."""
    if type(packed) is Handle:  # the most frequent first: this runs for each saved tensor
        return take(packed) if graph_task_id() != -1 else look(packed)
    if type(packed) is tuple:
        tensor: torch.Tensor = packed[0]
        version = packed[1]
        if version is not None and version >= 0 and tensor._version != version:
            raise _written_since(*packed)
        if len(packed) > 2 and packed[2] is not None:
            return _itself(packed[2](), tensor)
        return tensor
    return _unpack_subclass(packed)


def _itself(saved: torch.Tensor | None, alias: torch.Tensor) -> torch.Tensor:
    """The very tensor that was saved, as plain autograd gives it back, if it lives and still lies
    where it lay: `.data =` may have moved it.
    """
    if (
        saved is None
        or saved.requires_grad
        or storage_key(saved) != storage_key(alias)
        or geometry_of(saved) != geometry_of(alias)
    ):
        return alias
    return saved


def _unpack_subclass(packed: OfSubclass) -> torch.Tensor:
    alias = as_class(unpack(packed.content), packed.kind)
    vars(alias).update(packed.attributes)
    return _itself(packed.itself(), alias)


def _written_since(
    tensor: torch.Tensor, version: int, itself: Any = None, used_at: Place | None = None
) -> ActivationOverwritten:
    return overwritten(tensor, tensor._version, version, used_at=used_at)
