"""A plan at work: the policy that follows it operation by operation, and the recorder that is told by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import DispatchMode, untraced
from gradfit.planning.record import Plan
from gradfit.recompute.offload import Store
from gradfit.tape.graph import Segment
from gradfit.tape.mask import MASK, draws_mask, pack
from gradfit.tape.ops import info_of
from gradfit.tape.policy import DROP, KEEP, OFFLOAD
from gradfit.tape.record import Recorder
from gradfit.tape.save import unpack

_DECIDED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CHOICES = {"keep": KEEP, "rebuild": DROP, "offload": OFFLOAD}


class Diverged(Exception):
    """The forward pass is not the plan's; the text says where."""


class PlanPolicy:
    """Gives each result of each operation what the plan says, as long as the operations are the plan's.

    Where they are not (other shapes took another branch), `diverged` says where, and everything is kept from there.
    With `sizes`, the bytes of each value, a result that is larger is another operation too; and since a budget would
    not survive that, `Diverged` is raised at once.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int] | None = None) -> None:
        self.diverged: str | None = None
        self.store: Store | None = Store() if "offload" in plan.actions else None
        self._names = plan.operations
        self._steps = [
            (_CHOICES[action], segment)
            for action, segment in zip(plan.actions, plan.segments, strict=True)
            if action != "external"
        ]
        self._sizes = None
        if sizes is not None:
            self._sizes = [size for size, action in zip(sizes, plan.actions, strict=True) if action != "external"]
        self._parents = plan.segment_parents
        self._heard, self._last = plan.heard, _last_chosen(self._steps)
        self._operation = 0
        self._value = 0
        self._packing = False  # what is moved out next is a mask's bits
        self._segments: list[Segment] = []
        self._recorder: PlannedRecorder | None = None

    def attach(self, recorder: PlannedRecorder) -> None:
        """Follow the plan from its first operation, in this recording."""
        self._operation = self._value = 0
        self.diverged = None
        root = recorder.segment
        self._segments = [root]
        for parent in self._parents[1:]:
            self._segments.append(Segment(self._segments[parent], root.scope))
        self._recorder = recorder

    def choose(self, func: Any, results: list[torch.Tensor]) -> list[int] | None:
        packs = self._passes_bits(func, results)
        position = self._operation
        self._operation += 1
        if self.diverged is None:
            if position >= len(self._names) or not _is_called(func, self._names[position]):
                expected = self._names[position] if position < len(self._names) else "the end"
                self.leave(f"operation {position} is {name_of(func)}, the plan has {expected}")
            else:
                first, self._value = self._value, self._value + len(results)
                steps = self._steps[first : self._value]
                if self._sizes is not None:
                    self._measure(position, func, results, first)
                if self._recorder is not None:
                    self._recorder.segment = self._segments[steps[0][1]]
                    self._look_ahead()
                if packs and steps[0][0] == DROP:
                    self._packing = True
                    return [OFFLOAD]
                return [choice for choice, _ in steps]
        return [KEEP] * len(results)

    def keeps(self, func: Any, out: Any) -> bool:
        """Whether the plan keeps all that the next operation, `func`, made: then nobody need write it down."""
        position = self._operation
        if self.diverged is not None or position >= len(self._names) or not _is_called(func, self._names[position]):
            return False
        results = (out,) if type(out) is torch.Tensor else out
        if type(results) is not tuple:
            return False
        first = value = self._value
        for result in results:
            if type(result) is not torch.Tensor:
                return False
            if value >= len(self._steps) or self._steps[value][0] != KEEP:
                return False
            value += 1
        if self._sizes is not None:
            self._measure(position, func, results, first)
        self._operation, self._value = position + 1, value
        self._look_ahead()
        return True

    def _look_ahead(self) -> None:
        """Whether nothing that comes need be heard."""
        if self._recorder is not None and self._value > self._last and self._operation >= self._heard:
            self._recorder.begin_tail()

    def _measure(self, position: int, func: Any, results: Sequence[torch.Tensor], first: int) -> None:
        """Whether results are as large as the plan has them."""
        assert self._sizes is not None
        for number, result in enumerate(results, first):
            if (found := result.untyped_storage().nbytes()) > self._sizes[number]:
                size = self._sizes[number]
                self.leave(f"operation {position}, {name_of(func)}, made {found} bytes, the plan has {size}")

    def _passes_bits(self, func: Any, results: list[torch.Tensor]) -> bool:
        """Where the plan has a mask's bits as an operation of their own: pass it, and say whether it keeps them."""
        position = self._operation
        if self.diverged is not None or position >= len(self._names) or self._names[position] != MASK:
            return False
        if not draws_mask(info_of(func), results):
            return False  # another operation than the plan's
        choice, _ = self._steps[self._value]
        self._operation += 1
        self._value += 1
        return choice == KEEP

    def leave(self, where: str) -> None:
        """It is not the plan's forward any more; `where` says since when."""
        self.diverged = self.diverged or where
        if self._sizes is not None:
            raise Diverged(where)

    def offload(self, tensor: torch.Tensor) -> Any:
        """Copy a value out; returns the function that brings it back."""
        if self._packing:
            self._packing = False
            return pack(tensor)
        if self.store is None:
            raise RuntimeError("gradfit: the plan offloads nothing")
        return self.store.put(tensor)


def _last_chosen(steps: list[tuple[int, int]]) -> int:
    return max((value for value, (choice, _) in enumerate(steps) if choice != KEEP), default=-1)


_names: dict[Any, str] = {}


def name_of(func: Any) -> str:
    """An operator's name, made once."""
    name = _names.get(func)
    if name is None:
        name = _names[func] = str(func)
    return name


def _is_called(func: Any, name: str) -> bool:
    """Whether an operation is the plan's. Some of torch's own code writes in place only where no dispatch mode looks.

    Such a mode looks while a profile is made. The result is as large either way, and what it was made from lives no
    longer, so the plan holds.
    """
    found = name_of(func)
    return found == name or found.replace("_.", ".", 1) == name.replace("_.", ".", 1)


class PlannedRecorder(Recorder):
    """Writes down what a plan needs: neither what it keeps, nor anything after the last that it does not keep.

    With `limit_bytes`, that tail is not even listened to. What autograd saves of it is all that then shows whether the
    forward is the plan's; and if it writes over something that a rebuild starts from, which the plan's does not, there
    is no way back: `Diverged`, at the end of the forward.
    """

    def __init__(self, policy: PlanPolicy, limit_bytes: int | None = None) -> None:
        super().__init__(Segment(None), policy)
        self.saved_bytes = 0  # by autograd, in the tail; each tensor as often as it is saved
        self._limit, self._follows, self._tail = limit_bytes, policy, False
        self.planned, self.keeps = True, policy.keeps
        policy.attach(self)

    def begin_tail(self) -> None:
        """Nothing will be rebuilt that comes now."""
        if not self._units and self._listening is not None:  # FSDP2 writes to parameters as it goes
            self._tail = True
            if self._limit is not None:
                self._listening.rest()

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self._tail:
            return super().pack(tensor)
        if self._dead:
            self._bury()
        packed = super().pack(tensor) if self._made else _as_it_is(tensor)
        if type(packed) is tuple and tensor.layout is torch.strided:
            self.saved_bytes += tensor.nbytes
            if self._limit is not None and self.saved_bytes > self._limit:
                self._follows.leave(_too_much(self.saved_bytes, self._limit))
        return packed

    @untraced
    def __exit__(self, *error: Any) -> None:
        unheard = self._tail and self._limit is not None and error[0] is None
        written = self.written_over() if unheard else None
        super().__exit__(*error)
        if written is not None:
            raise Diverged(f"it writes in place to a tensor of shape {tuple(written.shape)}, which the plan's does not")


def _as_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """What `unpack` takes for a tensor that is kept."""
    if tensor.is_leaf and tensor.requires_grad:
        return (tensor, tensor._version)
    return (tensor.detach(), None if tensor.is_inference() else tensor._version)  # its graph would hold itself


def _too_much(saved_bytes: int, limit_bytes: float) -> str:
    return f"autograd saves {saved_bytes} bytes, {limit_bytes} were measured"


class Unrecorded:
    """Around a forward of which nothing is rebuilt: no tape, only an eye on how much autograd saves.

    More than `limit_bytes`, and it is another computation than the one that was measured: `Diverged`.
    """

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self.limit_bytes, self.saved_bytes = limit_bytes, 0  # each tensor as often as it is saved
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
            self.saved_bytes += tensor.nbytes
            if self.saved_bytes > self.limit_bytes:
                raise Diverged(_too_much(self.saved_bytes, self.limit_bytes))
        return _as_it_is(tensor)


class LooksAtData(DispatchMode):
    """Tells whether what runs inside takes numbers out of tensors, or makes tensors whose size the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found and not _DECIDED_BY_DATA.isdisjoint(func.tags):
            self.found = True
        return func(*args, **(kwargs or {}))


def recording(
    plan: Plan, sizes: Sequence[int] | None = None, limit_bytes: int | None = None
) -> tuple[PlannedRecorder, PlanPolicy]:
    """A recorder that follows the plan: enter it around the forward pass.

    With `sizes` it insists on the plan. With `limit_bytes`, what autograd saved of the plan's tail, it does not listen
    to that any more.
    """
    policy = PlanPolicy(plan, sizes)
    return PlannedRecorder(policy, limit_bytes), policy
