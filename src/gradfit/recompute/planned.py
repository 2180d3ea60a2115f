"""A plan at work: the policy that follows it operation by operation, and `apply`, which puts it around a model."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import DispatchMode
from gradfit.errors import MisuseError
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
        self._operation = 0
        self._value = 0
        self._packing = False  # what is moved out next is a mask's bits
        self._segments: list[Segment] = []
        self._recorder: Recorder | None = None

    def attach(self, recorder: Recorder) -> None:
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
                self._leave(f"operation {position} is {name_of(func)}, the plan has {expected}")
            else:
                first, self._value = self._value, self._value + len(results)
                steps = self._steps[first : self._value]
                if self._sizes is not None:
                    for result, size in zip(results, self._sizes[first : self._value], strict=True):
                        if (found := result.untyped_storage().nbytes()) > size:
                            self._leave(
                                f"operation {position}, {name_of(func)}, made {found} bytes, the plan has {size}"
                            )
                if self._recorder is not None:
                    self._recorder.segment = self._segments[steps[0][1]]
                if packs and steps[0][0] == DROP:
                    self._packing = True
                    return [OFFLOAD]
                return [choice for choice, _ in steps]
        return [KEEP] * len(results)

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

    def _leave(self, where: str) -> None:
        self.diverged = where
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
                raise Diverged(f"autograd saves {self.saved_bytes} bytes, {self.limit_bytes} were measured")
        if tensor.is_leaf and tensor.requires_grad:
            return (tensor, tensor._version)
        return (tensor.detach(), None if tensor.is_inference() else tensor._version)  # its graph would hold itself


class LooksAtData(DispatchMode):
    """Tells whether what runs inside takes numbers out of tensors, or makes tensors whose size the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found and not _DECIDED_BY_DATA.isdisjoint(func.tags):
            self.found = True
        return func(*args, **(kwargs or {}))


def recording(plan: Plan, sizes: Sequence[int] | None = None) -> tuple[Recorder, PlanPolicy]:
    """A recorder that follows the plan: enter it around the forward pass. With `sizes` it insists on the plan."""
    policy = PlanPolicy(plan, sizes)
    recorder = Recorder(Segment(None), policy)
    recorder.planned = True
    policy.attach(recorder)
    return recorder, policy


class AppliedPlan:
    """The handle that `apply` returns."""

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self.plan = plan
        self._local = threading.local()
        self._hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._block: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        return f"<plan {self.plan.signature} {'applied' if self._hooks else 'removed'}>"

    def remove(self) -> None:
        """Undo it: the model is as before `apply`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> AppliedPlan:
        if self._block is not None:
            raise MisuseError("This plan is entered already. Call gf.apply() again for a second block.")
        self._block = contextlib.ExitStack()
        self._block.enter_context(_follow(self.plan))
        self._local.depth = getattr(self._local, "depth", 0) + 1
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            self._local.depth -= 1
            block.__exit__(*error)
        self.remove()

    def _before(self, *_: Any) -> None:
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        if depth == 1 and torch.is_grad_enabled():
            self._local.follow = _follow(self.plan)
            self._local.follow.__enter__()

    def _after(self, *_: Any) -> None:
        self._local.depth -= 1
        follow = getattr(self._local, "follow", None)
        if self._local.depth == 0 and follow is not None:
            self._local.follow = None
            follow.__exit__(None, None, None)


@contextlib.contextmanager
def _follow(plan: Plan) -> Any:
    recorder, policy = recording(plan)
    with recorder:
        yield
    if policy.diverged is not None:
        warnings.warn(
            f"The forward pass no longer follows its plan: {policy.diverged}; from there on everything is kept. "
            "Gradients are the same, memory is not. Make a plan for this input with gf.profile and gf.plan.",
            stacklevel=3,
        )


def apply(model: torch.nn.Module, plan: Plan) -> AppliedPlan:
    """Put a plan to work on a model; gradients stay bit-identical.

    As a context manager it covers everything inside the block, the loss included, which is what `plan` was made for:

        with gf.apply(model, plan):
            loss = loss_fn(model, batch)
        loss.backward()

    Without `with` it covers the model's own forward until `.remove()` is called.
    """
    if not isinstance(plan, Plan):
        raise MisuseError(f"plan is a {type(plan).__name__}. Pass what gf.plan(...) returned.")
    return AppliedPlan(model, plan)
