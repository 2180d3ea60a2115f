"""A plan at work: the policy that follows it, operation by operation, and the context in which a
forward does.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import untraced
from gradfit.choices import KEEP, OFFLOAD, PACK, REBUILD, Choice
from gradfit.planning.plan import Plan
from gradfit.recompute.offload import Store
from gradfit.tape.decisions import (
    ALL_KEPT,
    ExpectedOperation,
    FollowingPolicy,
    Rest,
    TapeDecision,
)
from gradfit.tape.dropout_mask import MASK, draws_mask
from gradfit.tape.listener import OperationListener
from gradfit.tape.native_session import counting_hooks
from gradfit.tape.operators import info_of
from gradfit.tape.overwritten import overwritten
from gradfit.tape.recorder import Recorder
from gradfit.tape.stream import new_bytes
from gradfit.tape.values import Handle, Segment

_DECIDED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MANY = sys.maxsize
_CHOICES = {"keep": KEEP, "rebuild": REBUILD, "offload": OFFLOAD}


class Diverged(Exception):
    """The forward pass is not the plan's; the text says where.

    `operation` is the number of the first operation that is another one, and `name` what it is, if
    that was observed.
    """

    def __init__(self, where: str, operation: int | None = None, name: str = "") -> None:
        super().__init__(where)
        self.operation, self.name = operation, name


class Script:
    """A plan as it is followed, made once: what becomes of each value, in the order in which they
    are made.

    With `sizes`, the bytes of each value of the profile, a result that is larger is another
    operation than the plan's; and since a budget would not survive that, `Diverged` is raised at
    once.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int] | None = None) -> None:
        results = [value for value, action in enumerate(plan.actions) if action != "external"]
        self.names, self.parents = plan.operations, plan.segment_parents
        self.choices = [_CHOICES[plan.actions[value]] for value in results]
        self.segments = [plan.segments[value] for value in results]
        self.sizes = None if sizes is None else [sizes[value] for value in results]
        self.recorded = plan.heard  # how many operations must be
        self.last = _last_not_kept(self.choices)
        self._decisions: dict[tuple[int, int], TapeDecision] = {}
        # As forwards that follow the plan have called them; none after the last.
        self.expected: list[ExpectedOperation | None] = [None] * (len(self.names) + 1)
        self._shared: dict[int, tuple[Script, int, int]] = {}

    def shared(self, other: Script) -> tuple[int, int]:
        """Up to how many operations and values a forward that has followed this plan has followed
        the other, too.
        """
        if id(other) not in self._shared:
            names = _common(self.names, other.names)
            self._shared[id(other)] = other, names, self._shared_values(other)
        return self._shared[id(other)][1:]

    def _shared_values(self, other: Script) -> int:
        """How many values, from the first, have the same choice in the same segment."""
        values = _common(self.choices, other.choices, _common(self.segments, other.segments))
        parents = _common(self.parents, other.parents)
        segments = enumerate(self.segments[:values])
        return next((n for n, segment in segments if segment >= parents), values)

    def has_room(self, result_bytes: Sequence[int]) -> bool:
        """Whether values of these sizes, from the first, are no larger than the plan reckons
        with.
        """
        sizes = self.sizes
        return sizes is None or all(
            nbytes <= size for nbytes, size in zip(result_bytes, sizes, strict=False) if size
        )

    def takes(self, position: int, first: int, func: Any, results: Sequence[torch.Tensor]) -> bool:
        """Whether this may be the plan's next operation."""
        if position >= len(self.names) or first + len(results) > len(self.choices):
            return False
        if self.names[position] == MASK:
            return draws_mask(info_of(func), list(results))
        if not _is_called(func, self.names[position]):
            return False
        sizes = self.sizes
        return sizes is None or all(
            new_bytes(r) <= sizes[n] for n, r in enumerate(results, first) if sizes[n]
        )

    def decision(self, operation: int, first: int, after: int) -> TapeDecision:
        """What becomes of these values, which one operation makes, made once; the segment is each
        recording's own.
        """
        decision = self._decisions.get((first, after))
        if decision is None:
            choices = tuple(self.choices[first:after])
            kept = all(choice is KEEP for choice in choices)
            last = after > self.last and operation + 1 >= self.recorded
            decision = TapeDecision(None if kept else choices, None, last)
            self._decisions[first, after] = decision
        return decision


def _last_not_kept(choices: Sequence[Choice]) -> int:
    """The last value that is rebuilt or moved out; -1 if all are kept."""
    return max((value for value, choice in enumerate(choices) if choice != KEEP), default=-1)


def _common(first: Sequence[Any], second: Sequence[Any], most: int | None = None) -> int:
    """How many items the two have in common from the start."""
    pairs = zip(first[:most], second[:most], strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(len(first[:most]), len(second[:most]))
    )


@dataclass
class UnrecordedRest:
    """What autograd saves of a forward after the last decision of its plan."""

    saved_bytes: int = 0  # each tensor as often as it is saved
    saves: int = 0
    last_rebuilt: int = 0  # the position of the last save of a tensor that is rebuilt


class PlanFollower(FollowingPolicy):
    """The policy that gives each result of each operation what the plan says, as long as the
    operations are the plan's.

    Where they are not, another plan of which all that was done so far is a part is followed from
    there, if there is one among the `others`, each with the rest of its forward. Else `diverged`
    says where, and everything is kept.

    After the plan's last decision nothing is recorded. What autograd saves of this rest is compared
    with the `measured_rest` of an earlier forward, if there is one, unless it is not `watched`.

    Args:
        script: the plan.
        others: plans to go on with where this one is left.
        root: the segment of the recording.
        measured_rest: of a forward that was observed to its end; None: this one will be.
        watched: whether to compare what autograd saves of the rest.
    """

    def __init__(
        self,
        script: Script,
        others: Sequence[tuple[Script, UnrecordedRest | None]] = (),
        root: Segment | None = None,
        measured_rest: UnrecordedRest | None = None,
        *,
        watched: bool = True,
    ) -> None:
        self.diverged: str | None = None
        self.store: Store | None = Store() if OFFLOAD in script.choices else None
        self._script, self._others = script, list(others)
        self._watched = watched
        self._expect_rest(measured_rest)
        self._result_bytes: list[int] = []  # of each value so far, if there are others
        self.operation = 0
        self.value = 0
        self.segments = [Segment(None) if root is None else root]
        self._add_segments()
        self._expect()

    @property
    def script(self) -> Script:
        """The plan that is followed now."""
        return self._script

    def _add_segments(self) -> None:
        root = self.segments[0]
        for parent in self._script.parents[len(self.segments) :]:
            self.segments.append(Segment(self.segments[parent], root.scope))

    def _expect(self) -> None:
        """Whether each operation can be compared with the one of an earlier forward: there is no
        more to do than to go on.
        """
        can_be = self.diverged is None and self.store is None and not self._others
        self.expected = self._script.expected if can_be else None

    def _switch(self, func: Any, results: Sequence[torch.Tensor]) -> bool:
        """Go on by another plan that has come this far in the same way, and has this operation
        next.
        """
        for place, (script, rest) in enumerate(self._others):
            if self._has_come_this_far(script) and script.takes(
                self.operation, self.value, func, results
            ):
                del self._others[place]
                self._go_on_with(script, rest)
                return True
        return False

    def _has_come_this_far(self, script: Script) -> bool:
        """Whether all that was done so far is a part of this plan, too."""
        operations, values = self._script.shared(script)
        return (
            self.operation <= operations
            and self.value <= values
            and script.has_room(self._result_bytes)
        )

    def _go_on_with(self, script: Script, rest: UnrecordedRest | None) -> None:
        del self.segments[_common(self._script.parents, script.parents) :]
        self._script = script
        self._add_segments()
        if self.store is None and OFFLOAD in script.choices:
            self.store = Store()
        self._expect_rest(rest)
        self._expect()

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        """Pass an operation, and say what becomes of its results. Hot: asked for each of them."""
        if self.expected is not None:
            expected = self.expected[self.operation]
            if (
                expected is not None
                and expected[0] is func
                and expected[1] == self.value
                and _fit(results, expected)
            ):
                _, _, _, choices, segment, last, self.operation, self.value, _ = expected
                if choices is None:
                    return _LAST_KEPT if last else ALL_KEPT
                return TapeDecision(choices, self.segments[segment], last)
        return self._compare(func, results, *call)

    def _compare(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision:
        """The same, by the plan's names."""
        if self.diverged is not None:
            return ALL_KEPT
        position, first = self.operation, self.value
        decision = self._next(func, results)
        if decision is None and self._is_at_bits(func, results):
            decision = self._next_mask(func, results)
        if decision is not None:
            self._expect_again(position, first, func, results, decision)
            return decision
        if self._others and self._switch(func, results):
            return self.decide(func, results, *call)
        self._leave_at(func)
        return ALL_KEPT

    def _expect_again(
        self,
        position: int,
        first: int,
        func: Any,
        results: list[torch.Tensor],
        decision: TapeDecision,
    ) -> None:
        """What the plan's operation was this time, it will mostly be in the next forward."""
        if self.expected is None:
            return
        script, own = self._script, self.value - len(results)  # a mask has two numbers
        sizes = [0] * len(results) if script.sizes is None else script.sizes[own : self.value]
        self.expected[position] = ExpectedOperation(
            func, first, tuple(sizes), decision.choices, script.segments[own], decision.last,
            self.operation, self.value, own != first,
        )  # fmt: skip

    def _leave_at(self, func: Any) -> None:
        """This is not the plan's next operation."""
        position, names = self.operation, self._script.names
        expected = names[position] if position < len(names) else "the end"
        said = f"operation {position} is {name_of(func)}, the plan has {expected}"
        self.leave(said, position, name_of(func))

    def _next_mask(self, func: Any, results: list[torch.Tensor]) -> TapeDecision | None:
        """Pass the two operations that the drawing of a mask is to a plan: its bits, and the
        mask.
        """
        bits_are_kept = self._script.choices[self.value] is KEEP
        if self._others:
            self._result_bytes.append(0)  # it is an eighth of the mask that follows
        self.operation, self.value = self.operation + 1, self.value + 1
        decision = self._next(func, results)
        if decision is not None and bits_are_kept and decision.choices == (REBUILD,):
            return decision._replace(choices=(PACK,))
        return decision

    def _next(self, func: Any, results: Sequence[torch.Tensor]) -> TapeDecision | None:
        """Pass the next operation, if it is this one."""
        script, position, first = self._script, self.operation, self.value
        after = first + len(results)
        if position >= len(script.names) or after > len(script.choices):
            return None
        name = script.names[position]
        if _called.get(name) is not func and not _is_called(func, name):
            return None
        if script.sizes is not None and (too_large := self._too_large(results)) is not None:
            if self._others and self._switch(func, results):
                return self._next(func, results)
            self._leave_for_size(func, *too_large)
        if self._others:
            self._result_bytes += [new_bytes(result) for result in results]
        self.operation, self.value = position + 1, after
        if self.store is not None and after > script.last:
            self.store.finish()  # from here on nobody may hear who writes to what
        decision = script.decision(position, first, after)
        if decision.choices is None:
            return decision
        return TapeDecision(decision.choices, self.segments[script.segments[first]], decision.last)

    def _leave_for_size(self, func: Any, nbytes: int, size: int) -> None:
        """This is the plan's next operation, but larger."""
        position = self.operation
        name = self._script.names[position]
        said = f"operation {position}, {name}, made {nbytes} bytes, the plan has {size}"
        self.leave(said, position, name_of(func))

    def _too_large(self, results: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """The bytes of the first result that is larger than the plan reckons with, and what it
        reckons with.
        """
        sizes = self._script.sizes or ()
        for result, size in zip(results, sizes[self.value :], strict=False):
            # 0 where the result is not new: its bytes are another's
            if size and (nbytes := new_bytes(result)) > size:
                return nbytes, size
        return None

    def _is_at_bits(self, func: Any, results: list[torch.Tensor]) -> bool:
        """Whether the plan has a mask's bits as an operation of their own before this one."""
        position, names = self.operation, self._script.names
        return (
            position < len(names) and names[position] == MASK and draws_mask(info_of(func), results)
        )

    def leave(self, where: str, operation: int | None = None, name: str = "") -> None:
        """It is not the plan's forward any more; `where` says since when."""
        self.diverged = self.diverged or where
        self._expect()
        if self.store is not None:
            self.store.finish()
        if self._script.sizes is not None:
            raise Diverged(where, operation, name)

    def offload(self, tensor: torch.Tensor) -> Any:
        """Copy a value out; returns the function that brings it back."""
        if self.store is None:
            raise RuntimeError("gradfit: the plan offloads nothing")
        load = self.store.put(tensor)
        if self.value > self._script.last:
            self.store.finish()
        return load

    # ------------------------------------------------------------------------- the unrecorded rest

    def begin_rest(self) -> Rest:
        """The last decision is made. A rest that was measured need not be observed again."""
        self.in_rest = True
        return Rest(self, observe_operations=self._measured_rest is None)

    def _expect_rest(self, measured: UnrecordedRest | None) -> None:
        """What was measured of the rest of the plan's forward; it has not begun."""
        self.in_rest = False
        self._measured_rest = measured
        self.saves = self.saved_bytes = self.last_rebuilt = 0
        self.most_saves = self.most_bytes = _MANY
        if measured is not None:
            self.most_bytes = measured.saved_bytes
            if not self._watched:
                self.most_saves = measured.last_rebuilt

    @property
    def rest(self) -> UnrecordedRest:
        """What autograd has saved since the last decision."""
        return UnrecordedRest(self.saved_bytes, self.saves, self.last_rebuilt)

    def before_save(self, tensor: torch.Tensor) -> bool:
        """Count what autograd saves. True once neither this forward nor its plan needs it."""
        if not self.in_rest:  # another plan is followed now, whose rest has not begun
            return False
        self.saves += 1
        if self.saves > self.most_saves:
            return True
        if tensor.layout is torch.strided:
            self.saved_bytes += tensor.nbytes
            if self.saved_bytes > self.most_bytes:
                self.leave(_too_much(self.saved_bytes, self.most_bytes))
        return False

    def after_save(self, packed: Any) -> None:
        """A tensor that is rebuilt may be the last."""
        if self.in_rest and type(packed) is Handle:
            self.last_rebuilt = self.saves

    @property
    def is_unobserved(self) -> bool:
        """Whether no operation of the forward is observed any more."""
        return self.in_rest and self._measured_rest is not None


_LAST_KEPT = TapeDecision(None, None, last=True)


def _fit(results: list[torch.Tensor], expected: ExpectedOperation) -> bool:
    """Whether results are no larger than those of an operation."""
    sizes = expected[2]
    if len(results) != len(sizes):
        return False
    for result, size in zip(results, sizes, strict=True):
        # 0 where the result is not new: its bytes are another's
        if size and new_bytes(result) > size:
            return False
    return not expected[8] or draws_mask(info_of(expected[0]), results)


_names: dict[int, str] = {}  # by address: hashing an operator runs Python code
_called: dict[str, Any] = {}  # the operator that was last seen to be the one of this name


def name_of(func: Any) -> str:
    """An operator's name, made once."""
    name = _names.get(id(func))
    if name is None:
        info_of(func)  # which sees to it that the address is not used again
        name = _names[id(func)] = str(func)
    return name


def _is_called(func: Any, name: str) -> bool:
    """Whether an operation is the plan's. Some of torch's own code writes in place, but not to fake
    tensors.

    A prediction is made of those. The result is as large either way, and what it was made from
    lives no longer, so the plan holds.
    """
    called = name_of(func)
    if called != name and called.replace("_.", ".", 1) != name.replace("_.", ".", 1):
        return False
    _called[name] = func
    return True


class PlannedForward:
    """What a forward runs in that is to follow a plan: a recorder, and the plan's follower.

    Neither what the plan keeps is written down, nor anything after the last that it does not keep.
    If the unobserved rest writes over something that a rebuild starts from, which the plan's does
    not, there is no way back: `Diverged`, at the end of the forward.
    """

    def __init__(self, follower: PlanFollower, root: Segment) -> None:
        self._follower = follower
        self._recorder = Recorder(root, follower, widen_segments=False)
        # For whoever has hooks of his own on saved tensors.
        self.pack = self._recorder.pack

    @property
    def rest(self) -> UnrecordedRest:
        """What autograd saved after the plan's last decision."""
        return self._follower.rest

    @untraced
    def __enter__(self) -> PlannedForward:
        self._recorder.__enter__()
        return self

    @untraced
    def __exit__(self, *error: Any) -> None:
        unobserved = self._follower.is_unobserved and error[0] is None
        written = self._recorder.table.overwritten_root() if unobserved else None
        self._recorder.__exit__(*error)
        if written is not None:
            raise Diverged(
                f"it writes in place to a tensor of shape {tuple(written.shape)}, which the plan's"
                " does not"
            )


def _too_much(saved_bytes: int, limit_bytes: float) -> str:
    return f"autograd saves {saved_bytes} bytes, {round(limit_bytes)} were measured to fit"


_COUNTER = struct.Struct("qd")  # bytes that autograd has saved, and how many it may save


class Unrecorded:
    """Around a forward of which nothing is rebuilt: no tape, only an eye on how much autograd
    saves.

    More than `limit_bytes`, and it is another computation than the one that was measured:
    `Diverged`.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes = limit_bytes
        self.rest = UnrecordedRest()  # which is the whole forward here
        self._saved_bytes = 0
        self._counter = bytearray(_COUNTER.pack(0, limit_bytes))  # the native core's
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Unrecorded:
        native = counting_hooks(self._counter, self._pack_unusual)
        self._hooks = saved_tensors_hooks(*(native or (self._pack, _unpack_kept)))
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        hooks, self._hooks = self._hooks, None  # which hold this object
        if hooks is not None:
            hooks.__exit__(*error)
        self.rest.saved_bytes = max(self._saved_bytes, _COUNTER.unpack(self._counter)[0])

    @untraced
    def _pack_unusual(self, tensor: torch.Tensor) -> Any:
        """What the native core leaves to Python."""
        self._saved_bytes = _COUNTER.unpack(self._counter)[0]
        packed = self._pack(tensor)
        _COUNTER.pack_into(self._counter, 0, self._saved_bytes, self.limit_bytes)
        return packed

    @untraced
    def _pack(self, tensor: torch.Tensor) -> Any:
        """Add up the bytes that autograd saves.

        Hot: called for each save, in every step. So it looks little up, and asks no tensor what
        kind it is: those that have no bytes or no version to tell raise.
        """
        version: int | None
        try:
            self._saved_bytes += tensor.nbytes
            version = tensor._version
        except (RuntimeError, NotImplementedError):  # sparse, for one
            version = None if tensor.is_inference() else tensor._version
        if self._saved_bytes > self.limit_bytes:
            raise Diverged(_too_much(self._saved_bytes, self.limit_bytes))
        if tensor.is_leaf:
            return tensor, version
        return tensor.detach(), version  # its graph would hold itself


def _unpack_kept(packed: Any) -> torch.Tensor:
    """The tensor that autograd saved, if nobody wrote to it. Hot, as the above."""
    tensor: torch.Tensor
    tensor, version = packed
    if version is not None and tensor._version != version:
        raise overwritten(tensor, tensor._version, version)
    return tensor


class LooksAtData(OperationListener):
    """Tells whether what runs inside takes numbers out of tensors, or makes tensors whose size the
    data decide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_data = False

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and look at what kind it is."""
        if not self.reads_data and not _DECIDED_BY_DATA.isdisjoint(func.tags):
            self.reads_data = not _takes_positions(func, args)
        return func(*args, **kwargs)


def _takes_positions(func: Any, args: Any) -> bool:
    """Whether it is an index by numbers: torch has one operator for these and for masks, whose
    results are as large as the data say.
    """
    return name_of(func) == "aten.index.Tensor" and all(
        index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]
    )


def recording(
    script: Script,
    measured_rest: UnrecordedRest | None = None,
    *,
    watched: bool = True,
    others: Sequence[tuple[Script, UnrecordedRest | None]] = (),
) -> tuple[PlannedForward, PlanFollower]:
    """What a forward runs in to follow the plan, and the policy that tells how it went.

    Args:
        script: the plan.
        measured_rest: what a first forward says of the rest saves the later ones from observing it.
        watched: whether to compare what autograd saves of the rest.
        others: plans to go on with where this one is left.
    """
    root = Segment(None)
    follower = PlanFollower(script, others, root, measured_rest, watched=watched)
    return PlannedForward(follower, root), follower
