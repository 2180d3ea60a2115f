"""Which value each living storage holds, as far as the tape knows, and how arguments refer to it.

The rules that are cited are those of `recorder.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gradfit._torch import base_of, detached_in_dispatch
from gradfit._torch_storage import Life, StorageWatch, watch_storage
from gradfit.choices import HOLD, KEEP, OFFLOAD, PACK, REBUILD, Choice
from gradfit.source_line import source_place
from gradfit.tape.dropout_mask import pack
from gradfit.tape.operators import CONSTANT, LOAD, OpInfo
from gradfit.tape.parameter_reads import ParameterReads, copy_for
from gradfit.tape.storage import (
    Untrackable,
    copy_storage,
    fills_storage,
    holds_only,
    key_of,
    parts_of,
    place_of,
)
from gradfit.tape.unwatched import copy_span, is_unwatched, share_memory
from gradfit.tape.unwatched_reads import UnwatchedReads
from gradfit.tape.values import (
    NOT_UNPACKED,
    ParameterRef,
    Segment,
    Slice,
    TapeOperation,
    TapeValue,
    geometry_of,
    new_operation,
    new_slice,
    new_value,
    nothing,
)
from gradfit.tape.version_counters import (
    UNCOUNTED,
    SplitResult,
    SplitResults,
    only_recorded_writes,
    version_of,
)

NO_KWARGS: dict[str, Any] = {}
# Arguments that are remembered as they are.
ATOMS = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
FEW = 8  # inputs that are looked through one by one: see `each_once`
Results = list[tuple[int, torch.Tensor, int]]  # position among the results, the tensor, its storage
next_index = itertools.count(0, 2).__next__  # numbers in between are for `written_slices.py`
_Tensor = torch.Tensor
_reference_to = weakref.ref

Offload = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


class StorageTable:
    """The newest value of every storage that is alive, by the storage's address (rule 1)."""

    def __init__(
        self,
        segment: Segment,
        *,
        offload: Offload | None = None,
        widen_segments: bool = True,
        recorded: Callable[[TapeOperation], object] | None = None,
    ) -> None:
        """
        Args:
            segment: that new values belong to; may be set to another one at any time.
            offload: moves a result out; returns the function that brings it back.
            widen_segments: False if segments come from a plan, which knows who reads what.
            recorded: called with every operation that is recorded.
        """
        self.segment = segment
        self.values: dict[int, TapeValue] = {}  # that a recorded operation has made
        self.roots: dict[int, weakref.ref[TapeValue]] = {}  # made by somebody else, and read
        self.parameters = ParameterReads()
        self.unwatched = UnwatchedReads()
        self.split_results = SplitResults()
        self._split_results = self.split_results.by_storage  # stays the same object
        # Watches of storages that are dead. Only noted when it happens: an interrupt in a weak
        # reference's callback would be swallowed, and leave an address in the table that is
        # somebody else's by then.
        self.dead: list[Any] = []
        self._note_death = self.dead.append  # must not hold the table: the storages would
        self.inherited: dict[int, list[weakref.ref[Any]]] = {}  # see `inherit`
        self._offload, self._recorded = offload, recorded
        self._widens_segments = widen_segments

    def close(self) -> None:
        """The recording is over. The graph's saved tensors still hold what refers to this table."""
        self.values.clear()
        self.roots.clear()
        self.parameters.by_storage.clear()
        self.unwatched.by_storage.clear()
        self._split_results.clear()
        self.inherited.clear()
        self._offload = self._recorded = None

    def remove_dead(self) -> None:
        """Take dead storages out; before anything is looked up."""
        dead, values = self.dead, self.values
        while dead:
            watch = dead.pop()
            key = watch.key
            value = values.get(key)
            if value is not None and value.death_watch is watch:
                del values[key]
                if self._split_results:
                    self._split_results.pop(key, None)

    # -------------------------------------------------------------------------------- what is there

    def find(self, key: int, tensor: torch.Tensor, counted_before: int = 0) -> TapeValue | None:
        """What is in a tensor's storage now; None if the tape does not know.

        Args:
            key: of the storage.
            tensor: any on that storage.
            counted_before: by how much an operation that has not run yet has already counted up
                the version.
        """
        value = self.values.get(key) or self.root(key)
        if value is None:
            return None
        version = version_of(tensor) - counted_before
        counter: TapeValue | SplitResult = value
        if self.split_results.by_storage:
            counter = self.split_results.find(key, tensor) or value
        if counter.version != version or counter.write_pending:
            if not only_recorded_writes(counter, version):
                if _is_read_through_data(value):
                    return value
                self._drop_changed(key, value)
                return None
            counter.version, counter.write_pending = version, False
        return value

    def root(self, key: int) -> TapeValue | None:
        """The root that a storage holds."""
        reference = self.roots.get(key)
        return None if reference is None else reference()

    def _drop_changed(self, key: int, value: TapeValue) -> None:
        """Rule 5: somebody wrote to it unseen."""
        self.values.pop(key, None)
        self.roots.pop(key, None)
        value.death_watch = None

    def overwritten_root(self) -> torch.Tensor | None:
        """Something that rebuilds start from, to which somebody has written since it was read, if
        there is one.
        """
        for reference in self.roots.values():  # in each step: no function is called for each
            root = reference()
            if root is None or root.tensor is None:
                continue
            if -1 < root.held_version != root.tensor._version:
                return root.tensor
        return self.parameters.overwritten()

    # ----------------------------------------------------------------------------------- references

    def refer(
        self, tensor: torch.Tensor, inputs: list[TapeValue]
    ) -> TapeValue | Slice | ParameterRef:
        """What stands for a tensor among an operation's arguments (rules 2 and 3); a value that it
        reads is added to `inputs`.
        """
        key = key_of(tensor)
        value = self.find(key, tensor)
        if value is None:
            if _is_of_parameter(tensor):
                return self.parameters.refer(tensor, key)
            if is_unwatched(tensor):  # rule 7
                value = self.unwatched.refer(tensor, key, self.segment)
                add_input(value, inputs)
                return value
            value = new_value(key, place_of(tensor), self.segment)
            self._hold(value, tensor)
        elif value.unwritten is not None:
            self.hold_unwritten(value, tensor)
        add_input(value, inputs)
        geometry = place_of(tensor)  # asked for, whoever it is: `.data =` may have changed it
        return value if geometry == value.geometry else new_slice(value, geometry)

    def refer_all(self, args: Iterable[Any], inputs: list[TapeValue]) -> list[Any]:
        """An operation's arguments with what stands for each tensor, in lists too."""
        references: list[Any] = []
        for argument in args:
            if type(argument) in ATOMS:
                references.append(argument)
            elif isinstance(argument, _Tensor):
                references.append(self.refer(argument, inputs))
            elif isinstance(argument, list | tuple):
                references.append(self.refer_all(argument, inputs))
            else:
                references.append(argument)
        return references

    def refer_kwargs(self, kwargs: Any, inputs: list[TapeValue]) -> dict[str, Any]:
        """The same for keyword arguments, which are mostly none or no tensors."""
        for argument in kwargs.values():
            if type(argument) not in ATOMS:
                return dict(zip(kwargs, self.refer_all(kwargs.values(), inputs), strict=True))
        return dict(kwargs) if kwargs else NO_KWARGS

    def open_operation(
        self, func: Any, info: OpInfo, args: Any, kwargs: Any
    ) -> TapeOperation | None:
        """An operation that is about to run; None if it cannot be replayed (rule 5)."""
        inputs: list[TapeValue] = []
        try:
            references = self.refer_all(args, inputs)
            named = self.refer_kwargs(kwargs, inputs)
        except Untrackable:
            return None
        return new_operation(next_index(), func, info, references, named, each_once(inputs))

    # ---------------------------------------------------------------------------------------- roots

    def _hold(
        self, value: TapeValue, tensor: torch.Tensor, alias: Any = detached_in_dispatch
    ) -> None:
        """Make a value a root."""
        value.geometry = place_of(tensor)  # raises if it is not what lies in its storage
        if is_unwatched(tensor):  # rule 7
            value.tensor, value.forward_tensor = copy_storage(tensor, value.geometry), nothing
            return
        # Not the tensor itself: it may have, or get, a graph that holds the tape.
        value.tensor = alias(tensor)
        value.forward_tensor = weakref.ref(tensor)
        value.held_version = value.version = version_of(tensor)
        value.write_pending = False
        self.roots[value.key] = weakref.ref(value)
        if self.segment.scope is not None:
            value.rare_facts().read_at = source_place(2)

    def hold_unwritten(
        self, value: TapeValue, tensor: torch.Tensor, alias: Any = detached_in_dispatch
    ) -> None:
        """Rule 5: somebody reads memory that no recorded operation wrote; what is in it now is all
        there is. A constant that is still one can be made again.
        """
        can_be_made_again = _is_still_constant(value, tensor)
        value.unwritten = None
        if can_be_made_again:
            return
        self.values.pop(value.key, None)
        value.death_watch = None
        value.op = None
        self._hold(value, tensor, alias)

    def keep(self, value: TapeValue, tensor: torch.Tensor, version: int) -> None:
        """Make a value that was recorded a root: it is held from now on, as this tensor."""
        self.values.pop(value.key, None)
        value.tensor, value.held_version = tensor, version
        value.death_watch = value.op = None
        value.unwritten = None
        self.roots[value.key] = weakref.ref(value)

    # ----------------------------------------------------------------------------------- new values

    def add(self, op: TapeOperation, results: Results, choices: Sequence[Choice] | None) -> None:
        """Make a value of each result that lies in a new storage."""
        outputs = op.outputs = []
        for number, (position, tensor, key) in enumerate(results):
            choice = REBUILD if choices is None else choices[number]
            kept = choice is KEEP
            outputs.append(None if kept else self.add_result(op, position, tensor, key, choice))
        self.register(op)

    def add_result(
        self, op: TapeOperation, position: int, tensor: torch.Tensor, key: int, choice: Choice
    ) -> weakref.ref[TapeValue] | None:
        """Make a value of one result that is not kept; gives what its operation refers to it by.

        Hot: once for each operation.
        """
        values = self.values
        if key in values:  # two results may share a storage: then it is one value
            return None
        try:
            geometry = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        except RuntimeError:  # rule 5: a nested tensor
            return None
        storage: Any = tensor.untyped_storage()
        if not storage.__dict__:  # as `watch_storage`
            life = storage.__dict__ = Life()
            watch = StorageWatch(life, self._note_death)
        else:
            watch = watch_storage(storage, self._note_death)
        watch.key = key
        try:
            version, forward_tensor = tensor._version, _reference_to(tensor)
        except RuntimeError:  # made under inference mode
            version, forward_tensor = UNCOUNTED, nothing  # type: ignore[assignment]
        value = values[key] = TapeValue()  # as `new_value`
        value.key = key
        value.geometry = geometry
        value.segment = self.segment
        value.op = op
        value.position = position
        value.version = version
        value.forward_tensor = forward_tensor
        value.death_watch = watch
        value.unwritten = op.info.unwritten
        value.write_pending = False
        value.evictable = choice is HOLD
        value.tensor = value.users = value.handles = value.rare = None
        value.held_version = -1
        value.unwanted = 0
        value.unpacked = NOT_UNPACKED
        moves = choice is not REBUILD and choice is not HOLD
        # What nobody has filled yet is not what will be read: a constant is made again.
        if moves and value.unwritten is None and fills_storage(tensor):
            self._move_out(op, value, tensor, choice)
            return None
        return _reference_to(value)

    def _move_out(
        self, op: TapeOperation, value: TapeValue, tensor: torch.Tensor, choice: Choice
    ) -> None:
        """Offload a result, or pack a mask: it is made again by loading it, not by its
        operation.
        """
        if choice is PACK:
            load = pack(tensor)
        elif self._offload is not None:
            load = self._offload(tensor)
        else:
            raise RuntimeError("gradfit: a policy that offloads must have a method `offload`")
        value.op = new_operation(op.index, load, LOAD, [], NO_KWARGS, [])
        value.op.outputs = (_reference_to(value),)
        value.position = 0
        value.forward_tensor = nothing  # so that writes go the long way: see `copy_value`

    def register(self, op: TapeOperation) -> None:
        """Tell an operation's inputs of it."""
        reference = _reference_to(op)
        segment = self.segment
        for value in op.inputs:
            if value.op is not None:
                users = value.users
                if users is None:
                    value.users = (reference,)
                elif isinstance(users, tuple):
                    value.users = [*users, reference]
                else:
                    users.append(reference)
                # It escapes from where it was made: whoever encloses both rebuilds it.
                if value.segment is not segment and self._widens_segments:
                    value.segment = value.segment.common(segment)
        if self._recorded is not None:
            self._recorded(op)

    def move_out_written(
        self, targets: Iterable[torch.Tensor], choices: Sequence[Choice] | None
    ) -> None:
        """What was written moves out, if its choice says so; how it was written need not be
        known.
        """
        for target, choice in zip(targets, choices or (), strict=False):
            if choice in (OFFLOAD, PACK) and fills_storage(target):
                self._move_out_target(target, choice)

    def _move_out_target(self, target: torch.Tensor, choice: Choice) -> None:
        key = key_of(target)
        self.roots.pop(key, None)
        load = new_operation(next_index(), None, LOAD, [], NO_KWARGS, [])
        self.add(load, [(0, target, key)], [choice])
        self.expect_counted_write(target, key, None)

    def expect_counted_write(self, target: torch.Tensor, key: int, old: TapeValue | None) -> None:
        """Note by which version counter a write will be counted, and that the others stay as they
        are.
        """
        version, value = version_of(target), self.values[key]
        counter: TapeValue | SplitResult = value
        if old is not None and (own := self.split_results.find(key, target)) is not None:
            counter = own
            value.version, value.write_pending = old.version, old.write_pending
        counter.version, counter.write_pending = version, version != UNCOUNTED

    # ------------------------------------------------------------------------------- before a write

    def before_write(
        self, key: int, target: torch.Tensor, old: TapeValue | None, counted_before: int = 0
    ) -> None:
        """Rule 4: whoever still needs what a write is about to change gets a copy of it."""
        if key in self.parameters.by_storage:
            self.parameters.copy_before_write(key, counted_before)
        if old is not None:
            self.copy_value(old)
        else:
            self.before_unknown_write(target, key)

    def copy_value(self, old: TapeValue) -> None:
        """An old version that is held by reference, or on its way out, is about to be lost."""
        if old.op is not None and old.op.info is LOAD:
            before_write = getattr(old.op.func, "before_write", None)
            if before_write is not None:
                before_write()
        if old.tensor is None or old.key in self.parameters.refilled:
            return
        if old.op is not None:
            old.tensor = None  # it can be rebuilt
        elif old.digest is not None:
            old.tensor, old.rare_facts().digest = copy_span(old.tensor), None
            old.geometry = geometry_of(old.tensor)
        elif old.held_version != -1:
            old.tensor = copy_storage(old.tensor, old.geometry)
            old.held_version = -1
            self._take_out_copied(old)

    def _take_out_copied(self, root: TapeValue) -> None:
        """Its copy is not what lies in the storage, even if the write now fails."""
        if self.root(root.key) is root:
            del self.roots[root.key]

    def before_unknown_write(self, target: torch.Tensor, key: int) -> None:
        """Somebody is about to write to a storage that no value of the table stands for.

        If torch did not allocate its memory (it came by DLPack, or by NumPy), other storages may
        lie in the same.
        """
        if self.unwatched.by_storage:
            for value in self.unwatched.values_in(key):
                self.copy_value(value)
        if not target.untyped_storage().resizable():  # `has_one_owner`, written out
            self._forget_sharing(target)

    def _forget_sharing(self, target: torch.Tensor) -> None:
        for key, value in list(self.values.items()):
            if _may_share_memory(value, target):
                self._forget_key(key)
        for key in list(self.roots):
            if _shares_memory(self.root(key), target):
                self._forget_key(key)
        self.parameters.copy_sharing(target)

    def forget_before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody is about to write to these without being recorded: they will be roots."""
        for tensor in tensors:
            try:
                key = key_of(tensor)
            except Untrackable:  # a wrapper: what it wraps will be written to
                self.forget_before_write(parts_of(tensor))
                continue
            if key in self.parameters.by_storage:
                self.parameters.copy_before_write(key)
            if self.inherited:
                self.copy_inherited([tensor])
            value = self.values.pop(key, None) or self.root(key)
            if value is None:
                self.before_unknown_write(tensor, key)
            else:
                self._forget_value(key, value)

    def _forget_key(self, key: int) -> None:
        value = self.values.pop(key, None) or self.root(key)
        if value is not None:
            self._forget_value(key, value)

    def _forget_value(self, key: int, value: TapeValue) -> None:
        self.copy_value(value)
        _let_go(value)
        self.roots.pop(key, None)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """What lies in these is not what was recorded: they are roots."""
        for tensor in tensors:
            with contextlib.suppress(Untrackable):
                key = key_of(tensor)
                _let_go(self.values.pop(key, None))
                _let_go(self.root(key))
                self.roots.pop(key, None)

    # -------------------------------------------------------------------------- recordings inside

    def inherit(self, inner: StorageTable) -> None:
        """Another recording ends inside of this one. What it reads from is copied before a write,
        too.

        Version counters alone would not always tell: two tensors may exchange their storages by
        `.data =`, and a write through one of them is then not counted by the other, through which
        the storage was read.
        """
        for key, references in inner.parameters.by_storage.items():
            self.inherited.setdefault(key, []).extend(references)
        for key, root in inner.roots.items():
            self.inherited.setdefault(key, []).append(root)
        for key, held in inner.inherited.items():
            self.inherited.setdefault(key, []).extend(held)

    def is_inherited(self, tensor: torch.Tensor) -> bool:
        """Whether somebody who may replay has read a tensor's storage in a recording inside."""
        with contextlib.suppress(Untrackable):
            return any(reference() for reference in self.inherited.get(key_of(tensor), ()))
        return False

    def copy_inherited(
        self, tensors: Iterable[torch.Tensor], counted_before: int = 0
    ) -> list[torch.Tensor]:
        """These are about to be written to: who has read them in a recording inside gets a copy;
        returns the copies.
        """
        copies: list[torch.Tensor] = []
        for tensor in tensors:
            with contextlib.suppress(Untrackable):
                references = self.inherited.pop(key_of(tensor), ())
                copies += self._copy_for([reference() for reference in references], counted_before)
        return copies

    def _copy_for(self, readers: Sequence[Any], counted_before: int) -> list[torch.Tensor]:
        """Give these, references to parameters and roots, a copy of what they have read."""
        read = [reader for reader in readers if isinstance(reader, ParameterRef)]
        copies = [copy_for(read, counted_before)]
        for root in readers:
            # At another version it is too late: then replay refuses.
            if isinstance(root, TapeValue) and _is_unchanged(root, counted_before):
                self.copy_value(root)
                copies.append(root.tensor)
        return [copy for copy in copies if copy is not None]


def add_input(value: TapeValue, inputs: list[TapeValue]) -> None:
    """Once, while there are few: see `each_once`."""
    if len(inputs) > FEW or value not in inputs:
        inputs.append(value)


def each_once(inputs: list[TapeValue]) -> list[TapeValue]:
    """Without repetitions. While they are few, `add_input` lets none in; looking through many would
    take their square.
    """
    return inputs if len(inputs) <= FEW else list(dict.fromkeys(inputs))


def choices_for(
    results: Results, choices: Sequence[Choice], all_results: list[torch.Tensor]
) -> list[Choice]:
    """Of the choices for all results, those for the ones that are new."""
    chosen = {id(tensor): choice for tensor, choice in zip(all_results, choices, strict=True)}
    return [chosen[id(tensor)] for _, tensor, _ in results]


def is_view_of_parameter(tensor: torch.Tensor) -> bool:
    """No activation, even if somebody has written to the parameter."""
    base = base_of(tensor)
    return base is not None and base.is_leaf and base.requires_grad


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is one, or a view of one; not under inference mode, where nothing is counted."""
    base = base_of(tensor)
    owner = tensor if base is None else base
    return owner.requires_grad and owner.is_leaf and not tensor.is_inference()


def _let_go(value: TapeValue | None) -> None:
    """A value stands no longer for the storage that it was seen in."""
    if value is not None:
        value.death_watch = None
        value.forward_tensor = nothing


def _may_share_memory(value: TapeValue, target: torch.Tensor) -> bool:
    tensor = value.unmoved_forward_tensor()
    # None: only views are left, nobody can say of what
    return tensor is None or share_memory(tensor, target)


def _shares_memory(root: TapeValue | None, target: torch.Tensor) -> bool:
    return root is not None and root.tensor is not None and share_memory(root.tensor, target)


def _is_read_through_data(root: TapeValue) -> bool:
    """Whether a root was read through `.data`, which counts for itself, and is as it was."""
    return (
        root.op is None
        and root.tensor is not None
        and 0 <= root.held_version == root.tensor._version
    )


def _is_unchanged(root: TapeValue, counted_before: int) -> bool:
    """Whether a held root is at the version at which it was read."""
    return root.tensor is not None and root.held_version == root.tensor._version - counted_before


def _is_still_constant(value: TapeValue, tensor: torch.Tensor) -> bool:
    if value.unwritten != CONSTANT or tensor.device.type != "cpu":
        return False
    return holds_only(tensor, _constant_of(value.op))


def _constant_of(op: TapeOperation | None) -> Any:
    """The number that a constant tensor was filled with."""
    if op is None:
        return None
    name = op.func.__name__
    if "full" not in name:
        return int("ones" in name)
    return op.kwargs["fill_value"] if "fill_value" in op.kwargs else op.args[-1]
