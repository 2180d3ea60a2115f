"""Plans for the batches that come: one per input shape, each tried out and corrected until it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradfit.errors import BudgetInfeasible
from gradfit.planning.api import plan as make_plan
from gradfit.planning.record import Plan
from gradfit.profiling.measure import LossFunction, check_batch, profile, run_loss
from gradfit.profiling.meter import meter
from gradfit.profiling.record import Profile
from gradfit.profiling.state import untouched
from gradfit.recompute.evict import Online
from gradfit.recompute.offload import measure_bandwidth
from gradfit.recompute.planned import recording
from gradfit.tape.drop import DropAll
from gradfit.train.nominal import nominal
from gradfit.tree import leaves, repeat_rows, split_batch
from gradfit.units import format_bytes

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of each tensor of a batch, without the rows
_TRIES = 5


@dataclass(frozen=True)
class Fitted:
    """A plan that was measured to hold, the profile it comes from, and the peak that was measured."""

    plan: Plan
    profile: Profile
    shape: Shape
    peak_bytes: int
    steady: bool  # the same operations whatever the data: what was measured once holds again
    seen: bool = False  # the peak is that of a real step, not of a trial


class Planner:
    """Profiles, plans and tries out, per input shape; remembers what it found."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: LossFunction,
        budget_bytes: int,
        *,
        split: Callable[[Any, int], Iterable[Any]] | None = None,
        offload: bool = False,
        known: Iterable[Fitted] = (),
        reproducible: bool = False,
        reserved_bytes: int = 0,
        reduce_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.reserved_bytes = reserved_bytes  # of communication buckets, which no meter sees
        self.reduce_bytes = reduce_bytes  # what adding up over the ranks takes for a moment
        self.limit_bytes = budget_bytes - reserved_bytes
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._split = split
        self._offload = offload
        self._reproducible = reproducible
        self._fitted: list[Fitted] = list(known)

    @property
    def known(self) -> tuple[Fitted, ...]:
        """Every plan made so far, in the order in which they are tried for a batch."""
        return tuple(self._fitted)

    def parts(self, batch: Any, micro_batch: int) -> Iterable[Any]:
        """The batch in micro-batches."""
        return self._split(batch, micro_batch) if self._split is not None else split_batch(batch, micro_batch)

    def rows(self, batch: Any) -> int:
        """How many rows the batch has."""
        return check_batch(batch, self._split)

    def fitted(self, batch: Any, batch_size: int, *, limit_bytes: int | None = None) -> Fitted:
        """A plan for batches of this shape: one made before for this shape or a larger one, or a new one."""
        shape = shape_of(batch)
        if limit_bytes is None:
            for known in self._fitted:
                if known.plan.batch_size >= batch_size and _covers(known.shape, shape):
                    return known
        found = self._fit(batch, batch_size, shape, limit_bytes or self.limit_bytes)
        self._fitted = [known for known in self._fitted if known.shape != shape]
        self._fitted.append(found)
        self._fitted.sort(key=lambda known: known.plan.peak_bytes)
        return found

    def tighter(self, fitted: Fitted) -> Fitted:
        """A plan that needs less than this one did, at the same micro-batch while there is one.

        Where this one is the smallest there is, it is that one again: memory may have run out for another's sake.
        """
        if not fitted.steady:
            return self.replace(fitted, plan=smaller(fitted.plan), seen=False)
        plan = fitted.plan
        limit = int(min(fitted.peak_bytes, self.limit_bytes) * 0.9)
        try:
            plan = _plan_at(fitted.profile, limit, plan.batch_size, plan.micro_batch)
        except BudgetInfeasible as smallest:
            if smallest.min_bytes < plan.peak_bytes:
                plan = make_plan(fitted.profile, memory=smallest.min_bytes, batch_size=plan.batch_size)
        return self.replace(fitted, plan=plan, peak_bytes=plan.peak_bytes, seen=False)

    def rest_of(self, found: Profile) -> DropAll:
        """What to do with operations that are not in the plan: keep nothing, and rebuild it piece by piece."""
        return DropAll(max(1, self.limit_bytes - found.at(1).static_bytes) / 6)

    def replace(self, old: Fitted, **changes: Any) -> Fitted:
        """Remember what a step has taught about a plan."""
        new = dataclasses.replace(old, **changes)
        self._fitted = [new if known is old else known for known in self._fitted]
        return new

    def _fit(self, batch: Any, batch_size: int, shape: Shape, limit_bytes: int) -> Fitted:
        found = profile(
            self._model,
            self._loss_fn,
            batch,
            self._optimizer,
            memory_bytes=self.limit_bytes,
            split=self._split,
            host_bandwidth=measure_bandwidth(next(self._model.parameters()).device) if self._offload else 0.0,
        )
        timed = nominal(found) if self._reproducible else found
        target = limit_bytes
        for _ in range(_TRIES):
            plan = make_plan(timed, memory=target, batch_size=batch_size)
            measured, diverged = self._try_out(plan, batch, found)
            if diverged is not None:
                return self._fit_online(plan, batch, found, shape, limit_bytes)
            if measured <= limit_bytes:
                if self._reproducible:  # the micro-batch is chosen; what to keep in it changes no bit, so by the clock
                    other = _plan_at(found, target, batch_size, plan.micro_batch)
                    other_measured, _ = self._try_out(other, batch, found)
                    if other.micro_batch == plan.micro_batch and other_measured <= limit_bytes:
                        plan, measured = other, other_measured
                return Fitted(plan, found, shape, measured, steady=True)
            target = min(target, plan.peak_bytes) - (measured - limit_bytes)
            if target <= 0:
                break
        raise BudgetInfeasible(
            f"A plan predicted at {format_bytes(plan.peak_bytes)} was measured at {format_bytes(measured)}, above the "
            f"budget of {format_bytes(limit_bytes)}, and no smaller one was found in {_TRIES} tries. "
            f"Raise `memory` to {format_bytes(measured)}.",
            min_bytes=measured,
            breakdown=plan.breakdown,
        )

    def _fit_online(self, plan: Plan, batch: Any, found: Profile, shape: Shape, limit_bytes: int) -> Fitted:
        """The operations depend on the data, so no plan can name them: evict online, in micro-batches that fit."""
        while True:
            try:
                measured, _ = self._try_out(plan, batch, found, online_bytes=limit_bytes)
                return Fitted(plan, found, shape, measured, steady=False)
            except BudgetInfeasible:
                if plan.micro_batch == 1:
                    raise
            plan = smaller(plan)

    def _try_out(
        self, plan: Plan, batch: Any, found: Profile, *, online_bytes: int | None = None
    ) -> tuple[int, str | None]:
        """Run one or two micro-batches as planned: the peak of the whole step, and where they left the plan."""
        part = next(iter(self.parts(batch, plan.micro_batch)))
        if self._split is None:
            part = repeat_rows(part, plan.micro_batch)
        waiting = max(0, found.optimizer_bytes - _state_bytes(self._optimizer))  # what its first step will allocate
        # A part is a view: it holds the whole batch it was cut from, which may still be less than a step's.
        rest = max(0, int(plan.batch_size * found.batch_bytes.per_item) - meter(part).current_bytes)
        diverged = None
        with untouched(self._model), meter(self._model, self._optimizer, part) as live:
            for _ in range(min(2, plan.steps)):
                if online_bytes is not None:
                    with Online(online_bytes - waiting - rest) as online:
                        online.evictor.watch(self._model, self._optimizer, part)
                        loss, _ = run_loss(self._loss_fn, self._model, part)
                        torch.autograd.backward(loss)
                else:
                    recorder, policy = recording(plan, self.rest_of(found))
                    with recorder:
                        loss, _ = run_loss(self._loss_fn, self._model, part)
                    torch.autograd.backward(loss)
                    diverged = diverged or policy.diverged
                del loss
            passes = live.peak_bytes
            update = live.current_bytes + max(found.optimizer_burst_bytes, self.reduce_bytes)
            for parameter in self._model.parameters():
                parameter.grad = None
        return max(passes, update) + waiting + rest, diverged


def smaller(plan: Plan) -> Plan:
    """The same plan at half the micro-batch."""
    micro = max(1, plan.micro_batch // 2)
    return dataclasses.replace(plan, micro_batch=micro, steps=-(-plan.batch_size // micro))


def shape_of(batch: Any) -> Shape:
    """What a plan depends on beside the number of rows."""
    return tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in leaves(batch))


def _covers(large: Shape, small: Shape) -> bool:
    """Whether every tensor of the one shape is at least as large as the other's: then so are all activations."""
    return len(large) == len(small) and all(
        a_type == b_type and len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True))
        for (a, a_type), (b, b_type) in zip(large, small, strict=True)
    )


def _plan_at(found: Profile, limit_bytes: int, batch_size: int, micro_batch: int) -> Plan:
    """The plan for this very micro-batch if it can be, else for any."""
    try:
        return make_plan(found, memory=limit_bytes, batch_size=batch_size, micro_batch=micro_batch)
    except BudgetInfeasible:
        return make_plan(found, memory=limit_bytes, batch_size=batch_size)


def _state_bytes(optimizer: Any) -> int:
    states = getattr(optimizer, "state", {})
    return sum(
        tensor.untyped_storage().nbytes()
        for state in states.values()
        if isinstance(state, dict)
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )
