"""Which tested plan serves a batch of a shape that was not seen before, by arithmetic, and when it
is worth a new one.

Of the `peak` bytes that a plan was measured to take, `fixed` do not depend on the batch. What a
model makes grows at most with the square of any size in its batch (attention's scores with that of
the tokens). So of a plan that keeps everything, for a batch that is g times as large where it has
grown most,

    fixed + kept · s + passing · g² ≤ limit

says by how much, s, what is kept may grow; that it does not grow more is watched while the forward
runs. A plan that rebuilds is watched value by value: each may grow by (limit − fixed) / (peak −
fixed), its *slack*. In the first steps with such a plan no operation is begun that would pass the
budget. A step in which more is made is repeated with a plan of its own. Sizes are rounded up to
powers of the fourth root of two, so that plans are shared.

Where a plan holds for no batch so large, its profile says at which smaller micro-batch everything
can be kept, by the same rule. That takes milliseconds, where a plan of their own takes many steps'
time: so such batches go by it until there is time for one.

And where a plan that rebuilds is for larger batches, its profile says whether smaller ones hold
with everything kept.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, takewhile
from typing import NamedTuple

from gradfit.fitting.batch_shapes import Shape, covers, growth, shrinkage
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.planning.api import plain_plan
from gradfit.planning.microbatch import even
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile

MOST_PLANS = 64  # that are remembered
MOST_OPERATIONS = 500_000  # in their profiles, of which each takes about a kilobyte
_ROOM = 0.97  # of the budget that arithmetic may fill
_CORRECTIONS = 6  # of a micro-batch that is too large
_ANY = 1 << 62  # bytes that nothing passes
_LARGER = 2.0  # a plan for batches so many times as large may be slower than one of their own


def with_slack(tested: TestedPlan, limit_bytes: int) -> TestedPlan:
    """With what it may grow by below this limit, as it was tested."""
    if not tested.steady or (tested.by_size and tested.plan.keeps_everything):
        return tested
    return dataclasses.replace(tested, slack=_slack(tested, limit_bytes))


def _slack(tested: TestedPlan, limit_bytes: int) -> float:
    if not tested.tested_bytes:
        return 1.0
    fixed = _fixed_bytes(tested.profile, tested.plan)
    # a trial of a model that skips layers may have run fewer of them than the profile
    plan = tested.plan
    predicted = 0 if "optimizer step" in plan.breakdown else plan.peak_bytes
    growing = max(1, max(tested.tested_bytes, predicted) - fixed, plan.kept_bytes)
    return max(1.0, (_ROOM * limit_bytes - fixed) / growing)


def within_memory(plans: Sequence[TestedPlan], last_used: Mapping[int, int]) -> list[TestedPlan]:
    """Those that may be remembered beside one more, in their order; what was not used for longest
    goes first.

    Args:
        plans: all there are.
        last_used: by a plan's address, when that was.
    """
    newest = sorted(plans, key=lambda tested: -last_used.get(id(tested), 0))
    operations = accumulate(_operations_added(newest[: MOST_PLANS - 1]))
    within = takewhile(lambda count: count <= MOST_OPERATIONS, operations)
    kept = {id(tested) for tested, _ in zip(newest, within, strict=False)}
    return [tested for tested in plans if id(tested) in kept]


def _operations_added(plans: Iterable[TestedPlan]) -> Iterator[int]:
    """By each plan to those before: none by one whose profile is there already."""
    profiles: set[int] = set()
    for tested in plans:
        is_new = id(tested.profile) not in profiles
        profiles.add(id(tested.profile))
        yield len(tested.profile.operations) if is_new else 0


def covering(plans: Sequence[TestedPlan], shape: Shape, batch_size: int) -> list[TestedPlan]:
    """The plans for batches at least as large in everything, in the order given."""
    return [one for one in plans if one.plan.batch_size >= batch_size and covers(one.shape, shape)]


def fewest_passes(plans: Sequence[TestedPlan], batch_size: int) -> TestedPlan | None:
    """The one of these plans that a batch is run by: the first; where that keeps everything in
    several micro-batches, the one with the fewest of those that do; where it rebuilds, one that
    arithmetic has found to keep everything in as few.
    """

    def passes(one: TestedPlan) -> int:
        return -(-batch_size // one.plan.micro_batch)

    first = next(iter(plans), None)
    if first is None:
        return None
    kept = (one for one in plans if one.steady and one.plan.keeps_everything)
    if first.plan.keeps_everything:
        return min((first, *kept), key=passes)
    return next((one for one in kept if one.by_size and passes(one) <= passes(first)), first)


def grown(
    plans: Sequence[TestedPlan], shape: Shape, batch_size: int, limit_bytes: int
) -> TestedPlan | None:
    """The plan of the most similar smaller batches, for those of this shape; None if it would
    surely not hold.
    """
    shapes = [*(one.shape for one in plans), shape]
    for size, tested in _nearest_first(plans, shape, batch_size):
        larger = _grown_to(tested, _corner(shapes, tested.shape, size), limit_bytes)
        if larger is not None:
            return larger
    return None


def in_smaller_parts(
    plans: Sequence[TestedPlan],
    shape: Shape,
    batch_size: int,
    limit_bytes: int,
    below: int | None = None,
) -> TestedPlan | None:
    """Everything kept in micro-batches so small that batches of this shape hold, by what was
    measured of the most similar smaller ones; None if one row would surely not.

    Args:
        plans: all there are.
        shape: of the batch.
        batch_size: its rows.
        limit_bytes: for all tensors.
        below: the micro-batch is smaller than this; None: as large as holds.
    """
    shapes = [*(one.shape for one in plans), shape]
    for size, tested in _nearest_first(plans, shape, 0):
        if tested.profile.splittable:
            corner = _corner(shapes, tested.shape, size)
            smaller = _kept_in_parts(tested, corner, batch_size, limit_bytes, below)
            if smaller is not None:
                return smaller
    return None


def _kept_in_parts(
    tested: TestedPlan, shape: Shape, batch_size: int, limit_bytes: int, below: int | None
) -> TestedPlan | None:
    rows, size = max(batch_size, tested.plan.batch_size), growth(tested.shape, shape)
    most = tested.plan.micro_batch if below is None else min(below - 1, tested.plan.micro_batch)
    room = int(_ROOM * limit_bytes)
    # Where not even a few rows hold if all that passes grows with the square, it may grow less:
    # nothing is begun that would pass the budget.
    for power in (2, 1):
        plan = _largest_kept(tested, rows, most, room, _Growth(size, size**power))
        if plan is not None:
            return _by_size(tested, plan, shape)
    return None


def in_larger_parts(
    tested: TestedPlan, shape: Shape, rows: int, passes_bytes: int, limit_bytes: int, below: int
) -> TestedPlan | None:
    """The same in micro-batches as large as hold, by what those of a step have taken: with more
    rows a micro-batch takes no more than so many times as much. None if that are no fewer of them.

    Args:
        tested: keeps everything, in small micro-batches, since it was for larger batches.
        shape: of the step's batch.
        rows: of that.
        passes_bytes: the most that its passes have taken.
        limit_bytes: for all tensors.
        below: the micro-batch is smaller than this.
    """
    plan, profile = tested.plan, tested.profile.updating(tested.plan.update_groups)
    fixed = _fixed_bytes(profile, plan)
    growing = max(1, passes_bytes - fixed)
    most = int(plan.micro_batch * (_ROOM * limit_bytes - fixed) / growing)
    size = even(rows, max(1, min(most, below - 1, rows)))
    larger = plain_plan(profile, memory=_ANY, batch_size=rows, micro_batch=size)
    if larger is None or -(-rows // size) >= -(-rows // plan.micro_batch):
        return None
    peak = int(fixed + growing * size / plan.micro_batch)
    larger = dataclasses.replace(larger, budget_bytes=plan.budget_bytes, peak_bytes=peak)
    return _by_size(tested, larger, shape)


def smaller_shape(tested: TestedPlan, shape: Shape) -> Shape | None:
    """The shape of batches that are smaller than those of a plan by a step of the sizes' rounding
    or several, as this one is; None if it is hardly smaller.
    """
    steps = math.floor(4 * math.log2(shrinkage(tested.shape, shape)))
    if steps < 1:
        return None
    times = 2 ** (steps / 4)
    return tuple(
        (
            tuple(
                math.ceil(old / times) if old != size else old
                for old, size in zip(sizes, smaller, strict=True)
            ),
            dtype,
        )
        for (sizes, dtype), (smaller, _) in zip(tested.shape, shape, strict=True)
    )


def kept_where_smaller(
    tested: TestedPlan, shape: Shape, batch_size: int, limit_bytes: int
) -> TestedPlan | None:
    """The same micro-batches with everything kept, for batches of a smaller shape; None if they
    would not hold.
    """
    if not _can_grow(tested, batch_size):
        return None
    rows, share = tested.plan.batch_size, 1 / shrinkage(tested.shape, shape)
    plan = _all_kept(tested, rows, tested.plan.micro_batch, _Growth(share, share))
    if plan is None or plan.peak_bytes > _ROOM * limit_bytes:
        return None
    return _by_size(tested, plan, shape)


def _by_size(tested: TestedPlan, plan: Plan, shape: Shape) -> TestedPlan:
    """A plan that keeps everything, found by arithmetic."""
    return dataclasses.replace(
        tested, plan=plan, shape=shape, peak_bytes=plan.peak_bytes, seen=False, seen_bytes=0,
        saved_bytes=None, asked=0, reads_data=True, by_size=True, slack=1.0,
    )  # fmt: skip


class _Growth(NamedTuple):
    """By how much a batch has grown, and what passes with it."""

    size: float
    passing: float


def _largest_kept(
    tested: TestedPlan, rows: int, most: int, room: int, grown: _Growth
) -> Plan | None:
    """The plan that keeps everything in as large micro-batches as hold, of `most` rows."""
    micro_batch = most
    for _ in range(_CORRECTIONS):
        plan = _all_kept(tested, rows, micro_batch, grown)
        if plan is None or plan.peak_bytes <= room:
            return plan
        smaller = int(micro_batch * room / plan.peak_bytes)
        micro_batch = max(tested.profile.min_batch, min(smaller, micro_batch - 1))
    return None


def _all_kept(tested: TestedPlan, rows: int, micro_batch: int, grown: _Growth) -> Plan | None:
    """The plan that keeps everything at this micro-batch, with what it takes for batches that have
    grown so; None if there is none.
    """
    profile = tested.profile.updating(tested.plan.update_groups)
    if micro_batch < profile.min_batch:
        return None
    plan = plain_plan(profile, memory=_ANY, batch_size=rows, micro_batch=even(rows, micro_batch))
    if plan is None or not plan.keeps_everything:
        return None
    fixed = _fixed_bytes(profile, plan)
    linear = plan.kept_bytes + plan.breakdown["batch"]
    passing = max(0, plan.peak_bytes - fixed - linear)
    # A parameter's gradient on its way is as large whatever the batch.
    constant = min(passing, max((node.peak_bytes.fixed for node in profile.nodes), default=0))
    peak = fixed + constant + linear * grown.size + (passing - constant) * grown.passing
    return dataclasses.replace(
        plan,
        budget_bytes=tested.plan.budget_bytes,
        peak_bytes=int(peak),
        step_seconds=plan.step_seconds * grown.size,
        plain_seconds=plan.plain_seconds * grown.size,
    )


def _nearest_first(
    plans: Sequence[TestedPlan], shape: Shape, batch_size: int
) -> list[tuple[float, TestedPlan]]:
    """Those that can grow to this shape, with how many times as large it is."""
    sized = [(growth(one.shape, shape), one) for one in plans if _can_grow(one, batch_size)]
    same_kind = [pair for pair in sized if math.isfinite(pair[0])]
    return sorted(same_kind, key=lambda pair: pair[0])


def _can_grow(tested: TestedPlan, batch_size: int) -> bool:
    """Whether what was measured of it says what larger batches of so many rows take."""
    was_measured = tested.tested_bytes > 0 and not tested.by_size
    return tested.steady and was_measured and tested.plan.batch_size >= batch_size


def _corner(shapes: Sequence[Shape], old: Shape, size: float) -> Shape:
    """The shape with all that was seen to vary grown alike, by a little more than this."""
    step = 2 ** (math.ceil(4 * math.log2(size)) / 4)
    alike = [shape for shape in shapes if math.isfinite(growth(old, shape))]
    seen = [[shape[place][0] for shape in alike] for place in range(len(old))]
    return tuple(
        (_grown_where_varying(sizes, others, step), dtype)
        for (sizes, dtype), others in zip(old, seen, strict=True)
    )


def _grown_where_varying(
    sizes: tuple[int, ...], seen: Sequence[tuple[int, ...]], step: float
) -> tuple[int, ...]:
    varies = [len(set(along)) > 1 for along in zip(*seen, strict=True)]
    return tuple(
        math.ceil(size * step) if does else size for size, does in zip(sizes, varies, strict=True)
    )


def _grown_to(tested: TestedPlan, shape: Shape, limit_bytes: int) -> TestedPlan | None:
    """The plan as one for batches of a larger shape; None if it would surely not hold."""
    size = growth(tested.shape, shape)
    larger = dataclasses.replace(tested, shape=shape, seen=False, seen_bytes=0, by_size=True)
    if not tested.plan.keeps_everything:
        return larger if size <= tested.slack else None
    fixed = _fixed_bytes(tested.profile, tested.plan)
    growing = max(1, tested.tested_bytes - fixed)
    room = _ROOM * limit_bytes - fixed
    kept = min(growing, tested.plan.kept_bytes)
    most = (room - (growing - kept) * size**2) / max(1, kept)
    if most < size or tested.saved_bytes is None:  # it grows at least as the batch does
        return None
    saved = int(tested.saved_bytes + kept * (most - 1))
    return dataclasses.replace(larger, saved_bytes=saved, slack=1.0)


def _fixed_bytes(profile: Profile, plan: Plan) -> int:
    """What a step holds whatever its batch."""
    static = profile.at(plan.micro_batch, rows=plan.batch_size).static_breakdown
    return sum(count for name, count in static.items() if name not in ("batch", "constants"))


def may_be_slow(tested: TestedPlan, shape: Shape, batch_size: int) -> bool:
    """Whether a plan of their own may be much faster for such batches than this one, which is for
    larger ones, or was only found by arithmetic.
    """
    if tested.plan.keeps_everything and tested.plan.micro_batch >= batch_size:
        return False
    return not tested.steady or tested.by_size or growth(shape, tested.shape) >= _LARGER


class PlanningTime:
    """The seconds that planning took, and those of the steps: what may be spent on plans that are
    not necessary.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.planning_seconds = self.training_seconds = 0.0
        self.plan_seconds = 0.0
        """What the last plan took to be made."""

    def has_room_for(self, seconds: float) -> bool:
        """Whether so many more seconds of planning are within its share."""
        return self.planning_seconds + seconds <= self.share * self.training_seconds

    @contextmanager
    def timing_a_plan(self, *, is_counted: bool) -> Iterator[None]:
        """Around the making of a plan of which others may be as slow; the first one is not
        counted, for nothing is trained without it.
        """
        started = time.perf_counter()
        with self.planning() if is_counted else nullcontext():
            yield
        self.plan_seconds = time.perf_counter() - started

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around the making of a plan."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.planning_seconds += time.perf_counter() - started

    def begin_step(self) -> float:
        """A step begins now; `end_step` gets what this returns."""
        return time.perf_counter() - self.planning_seconds

    def end_step(self, begun: float) -> None:
        """A step is over; plans that were made in it are not counted as training."""
        self.training_seconds += time.perf_counter() - self.planning_seconds - begun
