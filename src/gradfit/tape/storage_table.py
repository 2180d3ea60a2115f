"""What lies in each storage now, as far as the tape knows: the recorder's table, and how arguments
refer to it.

The rules that are cited are those of `recorder.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from gradfit._torch import base_of, detached_in_dispatch, storage_key
from gradfit._torch_storage import watch_storage
from gradfit.choices import HOLD, KEEP, OFFLOAD, PACK, REBUILD, Choice
from gradfit.source_line import source_line
from gradfit.tape.decisions import OffloadingPolicy, Policy
from gradfit.tape.dropout_mask import pack
from gradfit.tape.operators import CONSTANT, LOAD, OpInfo
from gradfit.tape.storage import (
    Untrackable,
    copy_storage,
    fills_storage,
    holds_only,
    key_of,
    parts_of,
    place_of,
)
from gradfit.tape.unwatched import (
    LARGE_BYTES,
    copy_span,
    digest_of,
    has_one_owner,
    is_unwatched,
    same_content,
    share_memory,
    span_bytes,
)
from gradfit.tape.values import (
    Geometry,
    Leaf,
    Operation,
    Segment,
    Slice,
    Value,
    geometry_of,
    nothing,
    shaped,
)

NO_KWARGS: dict[str, Any] = {}
# `Value.seen`: not known, made under inference mode, and see `expected`
UNKNOWN, UNCOUNTED, WRITTEN = -1, -2, -4
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
Fresh = list[tuple[int, torch.Tensor, int]]  # position among the results, the tensor, its storage
next_index = itertools.count(0, 2).__next__  # numbers in between are for `written_slices.py`
_Tensor = torch.Tensor
_reference_to = weakref.ref
_MANY = 16  # references to one parameter, before dead ones are looked for


class Chunk:
    """A tensor in a storage of the table that counts its writes by itself: a result of
    `unsafe_split`.
    """

    __slots__ = ("seen", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.seen = tensor._version  # as `Value.seen`


class Known:
    """The newest version of every storage that is alive, by the storage's address."""

    def __init__(self, segment: Segment, policy: Policy | None) -> None:
        self.segment = segment
        self.policy = policy
        self.planned = False  # segments come from a plan and are not to be widened
        self.watching: Any = None  # called with every operation that is recorded
        self._made: dict[int, Value] = {}  # made by a recorded operation
        self._roots: dict[int, weakref.ref[Value]] = {}  # made by somebody else, and read
        self._leaves: dict[int, list[weakref.ref[Leaf]]] = {}  # parameters that were read
        # likewise, and held by content
        self._unwatched: dict[int, dict[Geometry, weakref.ref[Value]]] = {}
        self._chunks: dict[int, dict[int, Chunk]] = {}  # of a storage, by the tensor's identity
        self._inherited: dict[int, list[weakref.ref[Leaf | Value]]] = {}  # see `inherit`
        # always hold the same when they hold anything: see fsdp_boundaries.py
        self._refilled: set[int] = set()
        # Watchers of storages that are gone. Only noted when it happens: an interrupt in a weak
        # reference's callback would be swallowed, and leave an address in the table that is
        # somebody else's by then.
        self._dead: list[Any] = []
        self._forget = self._dead.append  # must not hold the recorder: the storages would

    def _bury(self) -> None:
        """Take dead storages out of the table; before anything is looked up there."""
        while self._dead:
            watcher = self._dead.pop()
            value = self._made.get(watcher.key)
            if value is not None and value.gone is watcher:
                del self._made[watcher.key]
                self._chunks.pop(watcher.key, None)

    def _template(self, args: Any, inputs: list[Value]) -> list[Any]:
        template: list[Any] = []
        for argument in args:
            if isinstance(argument, _Tensor):
                template.append(self._reference(argument, inputs))
            elif isinstance(argument, list | tuple):
                template.append(self._template(argument, inputs))
            else:
                template.append(argument)
        return template

    def _template_kwargs(self, kwargs: Any, inputs: list[Value]) -> dict[str, Any]:
        for argument in kwargs.values():
            if type(argument) not in ATOMS:
                return dict(zip(kwargs, self._template(kwargs.values(), inputs), strict=True))
        return dict(kwargs) if kwargs else NO_KWARGS

    def _reference(self, tensor: torch.Tensor, inputs: list[Value]) -> Any:
        key = key_of(tensor)
        value = self._present(key, tensor)
        if value is None:  # rule 3
            base = base_of(tensor)
            owner = tensor if base is None else base
            if owner.requires_grad and owner.is_leaf and not tensor.is_inference():
                return self._leaf(tensor, key)
            if is_unwatched(tensor):
                value = self._by_content(tensor, key)
                if len(inputs) > FEW or value not in inputs:
                    inputs.append(value)
                return value
            value = Value(key, None, self.segment)
            self._hold(value, tensor)
        elif value.fragile is not None:
            self._settle(value, tensor)
        if len(inputs) > FEW or value not in inputs:
            inputs.append(value)
        if value.natural() is tensor:
            return value
        geometry = place_of(tensor)
        return value if geometry == value.geometry else Slice(value, geometry)

    def _by_content(self, tensor: torch.Tensor, key: int) -> Value:
        """Rule 7. If it is read again, and what is in it is still the same, so is the value."""
        geometry = place_of(tensor)
        small = span_bytes(tensor) < LARGE_BYTES
        digest = None if small else digest_of(tensor)
        earlier = self._unwatched.setdefault(key, {})
        value = earlier[geometry]() if geometry in earlier else None
        if value is not None and value.tensor is not None:
            same = (
                value.digest == digest
                if value.digest is not None
                else same_content(value.tensor, tensor)
            )
            if same:
                return value
        value = Value(key, None, self.segment)
        value.tensor, value.digest = (
            copy_span(tensor) if small else detached_in_dispatch(tensor),
            digest,
        )
        earlier[geometry] = _reference_to(value)
        return value

    def _leaf(self, tensor: torch.Tensor, key: int) -> Leaf:
        leaf = Leaf(tensor)
        others = self._leaves.get(key)
        if others is None:
            self._leaves[key] = [_reference_to(leaf)]
        else:
            others.append(_reference_to(leaf))
            if len(others) >= _MANY and len(others) & (len(others) - 1) == 0:
                others[:] = [reference for reference in others if reference() is not None]
        return leaf

    def _save_leaves(self, key: int, early: int = 0) -> None:
        """Rule 4: a parameter is about to be written to, so who has read it gets a copy (`early`:
        see `_present`).
        """
        if key in self._refilled:
            return
        alive = (
            leaf for reference in self._leaves.pop(key, ()) if (leaf := reference()) is not None
        )
        _copy_leaves(alive, early)

    def inherit(self, inner: Known) -> None:
        """Another recording ends inside of this one. What it reads from is copied before a write,
        too.

        Version counters alone would not always tell: two tensors may exchange their storages by
        `.data =`, and a write through one of them is then not counted by the other, through which
        the storage was read.
        """
        for key, leaves in inner._leaves.items():
            self._inherited.setdefault(key, []).extend(leaves)  # type: ignore[arg-type]
        for key, root in inner._roots.items():
            self._inherited.setdefault(key, []).append(root)  # type: ignore[arg-type]
        for key, held in inner._inherited.items():
            self._inherited.setdefault(key, []).extend(held)

    def _save_inherited(self, tensors: list[torch.Tensor], early: int = 0) -> None:
        for tensor in tensors:
            with contextlib.suppress(Untrackable):
                held = [reference() for reference in self._inherited.pop(key_of(tensor), ())]
                _copy_leaves((leaf for leaf in held if isinstance(leaf, Leaf)), early)
                for root in held:
                    # At another version it is too late: then replay refuses.
                    if isinstance(root, Value) and _is_at(root, early):
                        self._save_value(root)

    def _save_value(self, old: Value) -> None:
        """Rule 4: an old version that is held by reference is about to be lost."""
        if old.tensor is None or old.key in self._refilled:
            return
        if old.op is not None:
            old.tensor = None  # it can be rebuilt
        elif old.digest is not None:
            old.tensor, old.digest, old.known_geometry = copy_span(old.tensor), None, None
        elif old.version != -1:
            old.tensor = copy_storage(old.tensor, old.geometry)
            old.version = -1
            if self._root(old.key) is old:
                # the copy is not what lies there, even if the write now fails
                del self._roots[old.key]

    def _present(self, key: int, tensor: torch.Tensor, early: int = 0) -> Value | None:
        """What the tape knows to be in a tensor's storage now; None if it does not know.

        `early` is by how much an operation that has not run yet has already changed the version
        counter.
        """
        value = self._made.get(key)
        if value is None:
            value = self._root(key)
            if value is None:
                return None
        version = version_of(tensor) - early
        counter = (self._chunk(key, tensor) if self._chunks else None) or value
        if counter.seen != version:
            if not expected(counter, version):
                if (
                    value.op is None
                    and value.tensor is not None
                    and 0 <= value.version == value.tensor._version
                ):
                    return value  # it was read through `.data`, which counts for itself
                # Rule 5: somebody wrote to it unseen.
                self._made.pop(key, None)
                self._roots.pop(key, None)
                value.gone = None
                return None
            counter.seen = version
        return value

    def _chunk(self, key: int, tensor: torch.Tensor) -> Chunk | None:
        """The one that a tensor is, or is a view of."""
        chunks = self._chunks.get(key)
        if chunks is None:
            return None
        owner = base_of(tensor)
        owner = tensor if owner is None else owner
        chunk = chunks.get(id(owner))
        return chunk if chunk is not None and chunk.tensor() is owner else None

    def _add_chunks(self, results: Any) -> None:
        """These lie in a storage of the table, and count for themselves from now on.

        torch leaves it to the caller not to write to both them and the tensor that they are chunks
        of.
        """
        for tensor in results:
            if (
                type(tensor) is _Tensor
                and not tensor.is_inference()
                and (key := storage_key(tensor)) in self._made
            ):
                alive = {
                    i: chunk
                    for i, chunk in self._chunks.get(key, {}).items()
                    if chunk.tensor() is not None
                }
                self._chunks[key] = alive | {id(tensor): Chunk(tensor)}

    def _root(self, key: int) -> Value | None:
        reference = self._roots.get(key)
        return None if reference is None else reference()

    def _settle(
        self, value: Value, tensor: torch.Tensor, alias: Any = detached_in_dispatch
    ) -> None:
        """Rule 5: somebody reads memory that no recorded operation wrote; what is in it now is all
        there is.
        """
        constant = value.fragile == CONSTANT and tensor.device.type == "cpu"
        if constant and holds_only(tensor, _constant_of(value.op)):
            value.fragile = None
            return
        value.fragile = None
        self._made.pop(value.key, None)
        value.gone = None
        value.op = None
        value.known_geometry = None
        self._hold(value, tensor, alias)

    def _hold(self, value: Value, tensor: torch.Tensor, alias: Any = detached_in_dispatch) -> None:
        geometry = place_of(tensor)  # or it is not what lies in its storage
        if is_unwatched(tensor):  # rule 7
            value.tensor, value.natural = copy_storage(tensor, geometry), nothing
            return
        # Not the tensor itself: it may have, or get, a graph that holds the tape.
        value.tensor = alias(tensor)
        value.natural = weakref.ref(tensor)
        value.version = value.seen = version_of(tensor)
        self._roots[value.key] = weakref.ref(value)
        if self.segment.scope is not None:
            value.line = source_line()

    # ----------------------------------------------------------------------------------- new values

    def _open(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Operation | None:
        inputs: list[Value] = []
        try:
            template = self._template(args, inputs)
            named = self._template_kwargs(kwargs, inputs)
        except Untrackable:  # rule 5
            return None
        return Operation(next_index(), func, info, template, named, each_once(inputs))

    def _adopt(self, op: Operation, fresh: Fresh, choices: Sequence[Choice] | None) -> None:
        """Make a value of each new storage."""
        made = self._made
        fragile = op.info.fragile
        outputs = op.outputs
        segment = self.segment
        forget = self._forget
        choice = REBUILD
        for number, (position, tensor, key) in enumerate(fresh):
            if choices is not None:
                choice = choices[number]
                if choice is KEEP:
                    outputs.append(None)
                    continue
            if key in made:  # two results may share a storage: then it is one value
                outputs.append(None)
                continue
            try:
                geometry = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
            except RuntimeError:  # rule 5: a nested tensor
                outputs.append(None)
                continue
            watcher = watch_storage(tensor.untyped_storage(), forget)
            watcher.key = key
            try:
                seen, natural = tensor._version, _reference_to(tensor)
            except RuntimeError:  # made under inference mode
                seen, natural = UNCOUNTED, nothing  # type: ignore[assignment]
            value = made[key] = Value(key, geometry, segment, op, position, seen, natural, watcher)
            if fragile is not None:
                value.fragile = fragile
            if choice is HOLD:
                value.evictable = True
            elif (choice is OFFLOAD or choice is PACK) and fills_storage(tensor):
                load = (
                    pack(tensor)
                    if choice is PACK
                    else cast(OffloadingPolicy, self.policy).offload(tensor)
                )
                value.op = Operation(op.index, load, LOAD, [], NO_KWARGS, [])
                value.op.outputs.append(_reference_to(value))
                value.position = 0
                outputs.append(None)
                continue
            outputs.append(_reference_to(value))
        self._register(op)

    def _register(self, op: Operation) -> None:
        """Tell an operation's inputs of it."""
        reference = _reference_to(op)
        segment = self.segment
        for value in op.inputs:
            if value.op is not None:
                if value.users is None:
                    value.users = [reference]
                else:
                    value.users.append(reference)
                # It escapes from where it was made: whoever encloses both rebuilds it.
                if value.segment is not segment and not self.planned:
                    value.segment = value.segment.common(segment)
        if self.watching is not None:
            self.watching(op)

    def _doubt(self, tensors: list[torch.Tensor]) -> None:
        """What lies in these is not what was recorded: they are roots."""
        for tensor in tensors:
            with contextlib.suppress(Untrackable):
                key = key_of(tensor)
                for value in (self._made.pop(key, None), self._root(key)):
                    if value is not None:
                        value.gone = None
                        value.natural = nothing
                self._roots.pop(key, None)

    def _lose(self, tensors: Any) -> None:
        """Somebody is about to write to these without being recorded: they will be roots."""
        for tensor in tensors:
            try:
                key = key_of(tensor)
            except Untrackable:  # a wrapper: what it wraps will be written to
                self._lose(parts_of(tensor))
                continue
            if key in self._leaves:
                self._save_leaves(key)
            if self._inherited:
                self._save_inherited([tensor])
            if key not in self._made and self._root(key) is None:
                self._write_unknown(tensor, key)
            self._lose_key(key)

    def _lose_key(self, key: int) -> None:
        value = self._made.pop(key, None) or self._root(key)
        if value is not None:
            self._save_value(value)
            value.gone = None
            value.natural = nothing
        self._roots.pop(key, None)

    def _write_unknown(self, target: torch.Tensor, key: int) -> None:
        """Somebody is about to write to a storage that no value of the table stands for.

        If torch did not allocate its memory (it came by DLPack, or by NumPy), other storages may
        lie in the same.
        """
        for reference in self._unwatched.get(key, {}).values():
            if (value := reference()) is not None:
                self._save_value(value)
        if has_one_owner(target):
            return
        for other, value in list(self._made.items()):
            tensor = value.forward_tensor()
            # None: only views are left, nobody can say of what
            if tensor is None or share_memory(tensor, target):
                self._lose_key(other)
        for other in list(self._roots):
            root = self._root(other)
            if root is not None and root.tensor is not None and share_memory(root.tensor, target):
                self._lose_key(other)
        for other, leaves in list(self._leaves.items()):
            leaf = next((leaf for reference in leaves if (leaf := reference()) is not None), None)
            if leaf is not None and share_memory(leaf.content, target):
                self._save_leaves(other)


def _is_at(root: Value, early: int) -> bool:
    """Whether a held root is at the version at which it was read."""
    return root.tensor is not None and root.version == root.tensor._version - early


def _copy_leaves(leaves: Iterable[Leaf], early: int) -> None:
    """Give all who have read one storage a copy of it, if nobody has written to it yet."""
    copy: torch.Tensor | None = None
    for leaf in leaves:
        source = leaf.source
        if source is None or source._version - early != leaf.version or source.is_conj():
            continue  # nobody needs it, or it is too late: then replay refuses
        if copy is None:
            copy = copy_storage(leaf.content, geometry_of(leaf.content))
        leaf.content, leaf.source = shaped(copy, geometry_of(leaf.content)), None


def choices_for(
    fresh: Fresh, choices: Sequence[Choice], results: list[torch.Tensor]
) -> list[Choice]:
    """Of the choices for all results, those for the ones that are new."""
    chosen = {id(tensor): choice for tensor, choice in zip(results, choices, strict=True)}
    return [chosen[id(tensor)] for _, tensor, _ in fresh]


def each_once(inputs: list[Value]) -> list[Value]:
    """Without repetitions. While they are few, nobody lets one in; looking through many would take
    their square.
    """
    return inputs if len(inputs) <= FEW else list(dict.fromkeys(inputs))


def expected(value: Value | Chunk, version: int) -> bool:
    """Whether a version counter says that only recorded operations have written to a value's
    storage.

    When one has just written, autograd will count up, or not at all: WRITTEN - n stands for n or n
    + 1.
    """
    seen = value.seen
    return seen in (version, UNKNOWN) or (seen <= WRITTEN and 0 <= version + seen - WRITTEN <= 1)


def version_of(tensor: torch.Tensor) -> int:
    return UNCOUNTED if tensor.is_inference() else tensor._version


def _constant_of(op: Operation | None) -> Any:
    """The number that a constant tensor was filled with."""
    if op is None:
        return None
    name = op.func.__name__
    if "full" not in name:
        return 1 if "ones" in name else 0
    return op.kwargs["fill_value"] if "fill_value" in op.kwargs else op.args[-1]
