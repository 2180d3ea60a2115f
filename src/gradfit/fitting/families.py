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
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile

from gradfit.fitting.tested_plan import Shape, TestedPlan, covers, growth

MOST_PLANS = 64  # that are remembered
MOST_OPERATIONS = 500_000  # in their profiles, of which each takes about a kilobyte
_ROOM = 0.97  # of the budget that arithmetic may fill
_LARGER = 2.0  # a plan for batches so many times as large may be slower than one of their own


def with_slack(tested: TestedPlan, limit_bytes: int) -> TestedPlan:
    """With what it may grow by below this limit, as it was tested."""
    if not tested.steady or (tested.by_size and tested.plan.keeps_everything):
        return tested
    return dataclasses.replace(tested, slack=_slack(tested, limit_bytes))


def _slack(tested: TestedPlan, limit_bytes: int) -> float:
    if not tested.tested_bytes:
        return 1.0
    fixed = _fixed_bytes(tested)
    return max(1.0, (_ROOM * limit_bytes - fixed) / max(1, tested.tested_bytes - fixed))


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
    fixed = _fixed_bytes(tested)
    growing = max(1, tested.tested_bytes - fixed)
    room = _ROOM * limit_bytes - fixed
    kept = min(growing, tested.plan.kept_bytes)
    most = (room - (growing - kept) * size**2) / max(1, kept)
    if most < size or tested.saved_bytes is None:  # it grows at least as the batch does
        return None
    saved = int(tested.saved_bytes + kept * (most - 1))
    return dataclasses.replace(larger, saved_bytes=saved, slack=1.0)


def _fixed_bytes(tested: TestedPlan) -> int:
    """What a step holds whatever its batch."""
    static = tested.profile.at(
        tested.plan.micro_batch, rows=tested.plan.batch_size
    ).static_breakdown
    return sum(count for name, count in static.items() if name not in ("batch", "constants"))


def may_be_slow(tested: TestedPlan, shape: Shape, batch_size: int) -> bool:
    """Whether a plan of their own may be much faster for such batches than this one, which is for
    larger ones.
    """
    if tested.plan.keeps_everything and tested.plan.micro_batch >= batch_size:
        return False
    return not tested.steady or growth(shape, tested.shape) >= _LARGER


class PlanningTime:
    """The seconds that planning took, and those of the steps: what may be spent on plans that are
    not necessary.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.planning_seconds = self.training_seconds = 0.0

    @property
    def is_left(self) -> bool:
        return self.planning_seconds <= self.share * self.training_seconds

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
