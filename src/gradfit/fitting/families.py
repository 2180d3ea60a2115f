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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from gradfit.fitting.tested_plan import Shape, TestedPlan, covers, growth

MOST_PLANS = 64  # that are remembered
MOST_OPERATIONS = 500_000  # in their profiles, of which each takes about a kilobyte
_ROOM = 0.97  # of the budget that arithmetic may fill
_LARGER = 2.0  # a plan for batches so many times as large may be slower than one of their own


def with_slack(tested: TestedPlan, limit_bytes: int) -> TestedPlan:
    """With what it may grow by below this limit, as it was tested."""
    if not tested.steady or (tested.by_size and tested.plan.keeps_everything):
        return tested
    fixed = _fixed_bytes(tested)
    slack = (_ROOM * limit_bytes - fixed) / max(1, tested.tested_bytes - fixed)
    return dataclasses.replace(tested, slack=max(1.0, slack) if tested.tested_bytes else 1.0)


def within_memory(plans: Sequence[TestedPlan], last_used: Mapping[int, int]) -> list[TestedPlan]:
    """Those that may be remembered beside one more, in their order; what was not used for longest
    goes first.

    Args:
        plans: all there are.
        last_used: by a plan's address, when that was.
    """
    newest = sorted(plans, key=lambda known: -last_used.get(id(known), 0))
    kept: set[int] = set()
    profiles: set[int] = set()  # several plans may have one
    operations = 0
    for known in newest[: MOST_PLANS - 1]:
        if id(known.profile) not in profiles:
            operations += len(known.profile.operations)
            if operations > MOST_OPERATIONS:
                break
            profiles.add(id(known.profile))
        kept.add(id(known))
    return [known for known in plans if id(known) in kept]


def covering(known: Sequence[TestedPlan], shape: Shape, batch_size: int) -> list[TestedPlan]:
    """The plans for batches at least as large in everything, in the order given."""
    return [one for one in known if one.plan.batch_size >= batch_size and covers(one.shape, shape)]


def grown(
    known: Sequence[TestedPlan], shape: Shape, batch_size: int, limit_bytes: int
) -> TestedPlan | None:
    """The plan of the most similar smaller batches, for those of this shape; None if it would
    surely not hold.
    """
    found = [
        (size, place)
        for place, one in enumerate(known)
        if one.steady and one.tested_bytes and not one.by_size and one.plan.batch_size >= batch_size
        and math.isfinite(size := growth(one.shape, shape))
    ]  # fmt: skip
    for size, place in sorted(found):
        made = _at(
            known[place],
            _corner([*(one.shape for one in known), shape], known[place].shape, size),
            limit_bytes,
        )
        if made is not None:
            return made
    return None


def _corner(shapes: Sequence[Shape], old: Shape, size: float) -> Shape:
    """The shape with all that was seen to vary grown alike, by a little more than this."""
    step = 2 ** (math.ceil(4 * math.log2(size)) / 4)
    alike = [shape for shape in shapes if math.isfinite(growth(old, shape))]
    found = []
    for place, (sizes, dtype) in enumerate(old):
        varies = [len({shape[place][0][dim] for shape in alike}) > 1 for dim in range(len(sizes))]
        grown = [math.ceil(n * step) if does else n for n, does in zip(sizes, varies, strict=True)]
        found.append((tuple(grown), dtype))
    return tuple(found)


def _at(known: TestedPlan, shape: Shape, limit_bytes: int) -> TestedPlan | None:
    size = growth(known.shape, shape)
    plan = known.plan
    fixed = _fixed_bytes(known)
    growing = max(1, known.tested_bytes - fixed)
    room = _ROOM * limit_bytes - fixed
    if not plan.keeps_everything:
        return (
            dataclasses.replace(known, shape=shape, seen=False, seen_bytes=0, by_size=True)
            if size <= known.slack
            else None
        )
    kept = min(growing, plan.kept_bytes)
    most = (room - (growing - kept) * size**2) / max(1, kept)
    if most < size or known.saved_bytes is None:  # it grows at least as the batch does
        return None
    saved = int(known.saved_bytes + kept * (most - 1))
    return dataclasses.replace(
        known, shape=shape, saved_bytes=saved, slack=1.0, seen=False, seen_bytes=0, by_size=True
    )


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

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around a step; plans that are made inside are not counted as training."""
        started, before = time.perf_counter(), self.planning_seconds
        try:
            yield
        finally:
            self.training_seconds += (
                time.perf_counter() - started - (self.planning_seconds - before)
            )
