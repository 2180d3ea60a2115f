"""`apply` puts a plan around a model."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import torch

from gradfit._torch import graph_task_id
from gradfit._torch_listen import others_take_saves
from gradfit.arguments import read_instance
from gradfit.errors import MisuseError, StateError
from gradfit.not_copied import NotCopied
from gradfit.planning.plan import Plan
from gradfit.recompute.follow_plan import (
    Diverged,
    PlanFollower,
    PlannedForward,
    Script,
    UnrecordedRest,
    recording,
)
from gradfit.tiling.tile import tile_as

# of so many forwards one is watched after the plan's last decision, too: the others are as fast as
# plain
_WATCHED = 8


class AppliedPlan(NotCopied):
    """The handle that `apply` returns.

    Args:
        model: whose forwards follow the plan.
        plan: for the operations of this model.
    """

    _instead_of_copy = "Call remove(), copy the model, and apply the plan to both."

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self.plan = plan
        self._forwards = forwards_along(model, plan)
        self._local = threading.local()
        self._hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._block: _Following | None = None
        self._tiles = None if plan.tiles is None else tile_as(model, plan.tiles)

    def __repr__(self) -> str:
        return f"<plan {self.plan.signature} {'applied' if self._hooks else 'removed'}>"

    def remove(self) -> None:
        """Undo it: the model is as before `apply`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._tiles is not None:
            self._tiles.remove()

    def __enter__(self) -> AppliedPlan:
        if self._block is not None:
            raise MisuseError(
                "This plan is entered already. Call gf.apply() again for a second block."
            )
        block = _Following(self.plan, self._forwards)
        block.__enter__()
        self._block = block
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
            self._local.follow = _Following(self.plan, self._forwards)
            self._local.follow.__enter__()

    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        self._local.depth -= 1
        follow = getattr(self._local, "follow", None)
        if self._local.depth == 0 and follow is not None:
            self._local.follow = None
            follow.end(None, None, None, whole=result is not None)


class Forwards:
    """What a model's forwards along one plan have in common, however often it is applied.

    The first that comes to its end is observed all the way; what autograd saves after the last
    decision tells if others are alike.

    Args:
        plan: that they follow.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = weakref.ref(plan)
        self.rest: UnrecordedRest | None = None
        self._script = Script(plan)
        self._count = 0

    def begin(self) -> tuple[PlannedForward, PlanFollower]:
        """What the next one runs in, and the policy that tells how it went."""
        self._count += 1
        return recording(self._script, self.rest, watched=self._count % _WATCHED == 0)


_forwards: weakref.WeakKeyDictionary[torch.nn.Module, list[Forwards]] = weakref.WeakKeyDictionary()


def forwards_along(model: torch.nn.Module, plan: Plan) -> Forwards:
    """Those of a model along a plan, from the first time on that it is applied."""
    alive = [one for one in _forwards.get(model, ()) if one.plan() is not None]
    for forwards in alive:
        if forwards.plan() is plan:
            return forwards
    forwards = Forwards(plan)
    _forwards[model] = [*alive, forwards]
    return forwards


class _Following:
    """One forward along a plan: says so if it is another one."""

    def __init__(self, plan: Plan, forwards: Forwards) -> None:
        self._forwards = forwards
        # In a backward pass nothing is recorded: torch's checkpoint calls a model there.
        self._is_idle = plan.keeps_everything or graph_task_id() != -1 or others_take_saves()
        if not self._is_idle:
            self._forward, self._policy = forwards.begin()

    def __enter__(self) -> None:
        if not self._is_idle:
            self._forward.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.end(*error)

    def end(self, kind: Any, *error: Any, whole: bool = True) -> None:
        """Not `whole`: the forward may have failed though there is no error here."""
        if self._is_idle:
            return
        self._exit(kind, *error)
        if kind is not None:
            return
        if self._policy.diverged is not None:
            warnings.warn(
                f"The forward pass no longer follows its plan: {self._policy.diverged}; from there"
                " on everything is kept. Gradients are the same, memory is not. Make a plan for"
                " this input with gf.profile and gf.plan.",
                stacklevel=3,
            )
        elif whole:
            self._forwards.rest = self._forwards.rest or self._forward.rest

    def _exit(self, *error: Any) -> None:
        try:
            self._forward.__exit__(*error)
        except Diverged as left:
            raise StateError(
                f"The forward pass does not follow its plan: {left}, and what that held cannot be"
                " rebuilt. Make a plan for this input with gf.profile and gf.plan."
            ) from None


def apply(model: torch.nn.Module, plan: Plan) -> AppliedPlan:
    """Put a plan to work on a model; gradients stay bit-identical.

    As a context manager it covers everything inside the block, the loss included, which is what
    `plan` was made for:

        with gf.apply(model, plan):
            loss = loss_fn(model, batch)
        loss.backward()

    Without `with` it covers the model's own forward until `.remove()` is called. The first forward
    is compared with the plan to its end. Later ones are listened to only as far as the plan decides
    something; beyond that, one that writes over what a replay starts from raises a `StateError`,
    and one in eight that saves more is warned of.

    Args:
        model: the one that was profiled, or one that runs the same operations.
        plan: from `gf.plan`, or read from JSON.

    >>> import torch
    >>> import gradfit as gf
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.ones(32, 8)
    >>> plan = gf.plan(gf.profile(model, lambda model, x: model(x).sum(), x), memory="1 MiB")
    >>> with apply(model, plan):
    ...     model(x).sum().backward()
    """
    read_instance(model, "model", torch.nn.Module, "the torch.nn.Module that was profiled")
    read_instance(plan, "plan", Plan, "what gf.plan(...) returned")
    return AppliedPlan(model, plan)
