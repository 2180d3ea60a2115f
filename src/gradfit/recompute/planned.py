"""A plan at work: the policy that follows it operation by operation, and the recorder that is told by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import untraced
from gradfit.choices import KEEP, OFFLOAD, PACK, REBUILD
from gradfit.planning.plan import Plan
from gradfit.recompute.offload import Store
from gradfit.tape.graph import Handle, Segment
from gradfit.tape.listener import Listener
from gradfit.tape.mask import MASK, draws_mask
from gradfit.tape.ops import info_of
from gradfit.tape.policy import ALL_KEPT, Decision
from gradfit.tape.record import Recorder
from gradfit.tape.save import unpack
from gradfit.tape.stream import new_bytes

_DECIDED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CHOICES = {"keep": KEEP, "rebuild": REBUILD, "offload": OFFLOAD}


class Diverged(Exception):
    """The forward pass is not the plan's; the text says where."""


class Script:
    """A plan as it is followed, made once: what becomes of each value, in the order in which they are made.

    With `sizes`, the bytes of each value of the profile, a result that is larger is another operation than the plan's;
    and since a budget would not survive that, `Diverged` is raised at once.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int] | None = None) -> None:
        made = [value for value, action in enumerate(plan.actions) if action != "external"]
        self.names, self.parents = plan.operations, plan.segment_parents
        self.choices = [_CHOICES[plan.actions[value]] for value in made]
        self.segments = [plan.segments[value] for value in made]
        self.sizes = None if sizes is None else [sizes[value] for value in made]
        self.heard = plan.heard
        self.last = max((value for value, choice in enumerate(self.choices) if choice != KEEP), default=-1)
        self.root = Segment(None)
        self._segments = [self.root]
        for parent in self.parents[1:]:
            self._segments.append(Segment(self._segments[parent]))
        self._decisions: dict[tuple[int, int], Decision] = {}

    def decision(self, operation: int, first: int, after: int) -> Decision:
        """What becomes of these values, which one operation makes; made once."""
        found = self._decisions.get((first, after))
        if found is None:
            some = tuple(self.choices[first:after])
            last = after > self.last and operation + 1 >= self.heard
            kept = all(choice is KEEP for choice in some)
            segment = None if kept else self._segments[self.segments[first]]
            found = self._decisions[first, after] = Decision(None if kept else some, segment, last)
        return found


class PlanPolicy:
    """Gives each result of each operation what the plan says, as long as the operations are the plan's.

    Where they are not (other shapes took another branch), `diverged` says where, and everything is kept from there.
    """

    def __init__(self, script: Script) -> None:
        self.diverged: str | None = None
        self.store: Store | None = Store() if OFFLOAD in script.choices else None
        self._script = script
        self.root = script.root
        self._operation = 0
        self._value = 0

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> Decision:
        """Pass an operation, and say what becomes of its results."""
        if self.diverged is not None:
            return ALL_KEPT
        decision = self._next(func, results)
        if decision is None and self._is_at_bits(func, results):
            kept = self._script.choices[self._value] is KEEP
            self._operation, self._value = self._operation + 1, self._value + 1
            decision = self._next(func, results)
            if decision is not None and kept and decision.choices == (REBUILD,):
                return decision._replace(choices=(PACK,))
        if decision is not None:
            return decision
        position, names = self._operation, self._script.names
        expected = names[position] if position < len(names) else "the end"
        self.leave(f"operation {position} is {name_of(func)}, the plan has {expected}")
        return ALL_KEPT

    def _next(self, func: Any, results: list[torch.Tensor]) -> Decision | None:
        """Pass the next operation, if it is this one."""
        script, position, first = self._script, self._operation, self._value
        after = first + len(results)
        if position >= len(script.names) or after > len(script.choices):
            return None
        name = script.names[position]
        if _called.get(name) is not func and not _is_called(func, name):
            return None
        if script.sizes is not None:
            for number, result in enumerate(results, first):
                size = script.sizes[number]  # 0 where the result is not new: its bytes are another's
                if size and (found := new_bytes(result)) > size:
                    self.leave(f"operation {position}, {name}, made {found} bytes, the plan has {size}")
        self._operation, self._value = position + 1, after
        return script.decision(position, first, after)

    def _is_at_bits(self, func: Any, results: list[torch.Tensor]) -> bool:
        """Whether the plan has a mask's bits as an operation of their own before this one."""
        position, names = self._operation, self._script.names
        return position < len(names) and names[position] == MASK and draws_mask(info_of(func), results)

    def leave(self, where: str) -> None:
        """It is not the plan's forward any more; `where` says since when."""
        self.diverged = self.diverged or where
        if self._script.sizes is not None:
            raise Diverged(where)

    def offload(self, tensor: torch.Tensor) -> Any:
        """Copy a value out; returns the function that brings it back."""
        if self.store is None:
            raise RuntimeError("gradfit: the plan offloads nothing")
        return self.store.put(tensor)


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
    """Whether an operation is the plan's. Some of torch's own code writes in place, but not to fake tensors.

    A prediction is made of those. The result is as large either way, and what it was made from lives no longer, so the
    plan holds.
    """
    found = name_of(func)
    if found != name and found.replace("_.", ".", 1) != name.replace("_.", ".", 1):
        return False
    _called[name] = func
    return True


@dataclass
class Tail:
    """What autograd saves of a forward after the last decision of its plan."""

    saved_bytes: int = 0  # each tensor as often as it is saved
    saves: int = 0
    asked: int = 0  # the last save that was of something to be rebuilt


class PlannedRecorder(Recorder):
    """Writes down what a plan needs: neither what it keeps, nor anything after the last that it does not keep.

    With the `tail` of a forward that was heard to its end, it is not even listened to. What autograd saves of it is all
    that then shows whether the forward is the plan's, unless that is not `watched` either; and if it writes over
    something that a rebuild starts from, which the plan's does not, there is no way back: `Diverged`, at the end of the
    forward.
    """

    def __init__(self, policy: PlanPolicy, tail: Tail | None = None, *, watched: bool = True) -> None:
        super().__init__(policy.root, policy)
        self.tail = Tail()  # as this forward has it
        self._known, self._watched, self._in_tail = tail, watched, False
        self.planned = True

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        if self._in_tail and type(packed) is Handle:
            self.tail.asked = self.tail.saves
        return packed

    def after_last(self) -> None:
        """Nothing that comes now will be rebuilt."""
        if not self._units and self._listening is not None:  # FSDP2 writes to parameters as it goes
            self._in_tail, self.saving = True, self._see
            if self._known is not None:
                self._listening.rest()

    def _see(self, tensor: torch.Tensor) -> None:
        tail, known = self.tail, self._known
        tail.saves += 1
        if known is not None and not self._watched and tail.saves > known.asked:
            self.unhook()
        elif tensor.layout is torch.strided:
            tail.saved_bytes += tensor.nbytes
            if known is not None and tail.saved_bytes > known.saved_bytes:
                cast(PlanPolicy, self.policy).leave(_too_much(tail.saved_bytes, known.saved_bytes))

    @untraced
    def __exit__(self, *error: Any) -> None:
        unheard = self._in_tail and self._known is not None and error[0] is None
        written = self.written_over() if unheard else None
        super().__exit__(*error)
        if written is not None:
            raise Diverged(f"it writes in place to a tensor of shape {tuple(written.shape)}, which the plan's does not")


def _too_much(saved_bytes: int, limit_bytes: float) -> str:
    return f"autograd saves {saved_bytes} bytes, {limit_bytes} were measured"


class Unrecorded:
    """Around a forward of which nothing is rebuilt: no tape, only an eye on how much autograd saves.

    More than `limit_bytes`, and it is another computation than the one that was measured: `Diverged`.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes, self.tail = limit_bytes, Tail()  # which is the whole forward here
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> Unrecorded:
        self._hooks = saved_tensors_hooks(self._pack, unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is torch.strided:
            self.tail.saved_bytes += tensor.nbytes
            if self.tail.saved_bytes > self.limit_bytes:
                raise Diverged(_too_much(self.tail.saved_bytes, self.limit_bytes))
        if tensor.is_leaf and tensor.requires_grad:
            return (tensor, tensor._version)
        return (tensor.detach(), None if tensor.is_inference() else tensor._version)  # its graph would hold itself


class LooksAtData(Listener):
    """Tells whether what runs inside takes numbers out of tensors, or makes tensors whose size the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def _hear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and look at what kind it is."""
        if not self.found and not _DECIDED_BY_DATA.isdisjoint(func.tags):
            self.found = True
        return func(*args, **kwargs)


def recording(script: Script, tail: Tail | None = None, *, watched: bool = True) -> tuple[PlannedRecorder, PlanPolicy]:
    """A recorder that follows the plan: enter it around the forward pass. What a first forward says of the plan's tail
    saves the later ones from listening to it."""
    policy = PlanPolicy(script)
    return PlannedRecorder(policy, tail, watched=watched), policy
