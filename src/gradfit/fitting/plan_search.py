"""The search for a plan that holds: in each way to cut along tokens while it may be worth it, and
the fastest of those that hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gradfit import _torch_distributed as distributed
from gradfit.batches.weights import UnreadableLoss
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.memory_lasts import where_memory_lasts
from gradfit.fitting.plan_tools import PlanTools
from gradfit.fitting.plan_until_held import plans_that_hold
from gradfit.fitting.plans_on_paper import best_plan
from gradfit.fitting.refused_budget import with_tiles_named
from gradfit.fitting.smallest_budget import Hopeless, smallest_that_holds
from gradfit.fitting.step_to_plan import PlanRequest
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.fitting.timed_plans import fastest
from gradfit.fitting.token_tiles import are_last_resort
from gradfit.fitting.trial import PastLimit
from gradfit.planning.named_choices import fix_by_name
from gradfit.profiling.profile import Profile
from gradfit.tiling.tiles import Tiles

_NEARLY_LEAST = 1.05  # times the least seconds there can be, nobody looks further


class _Failure(NamedTuple):
    """A way to cut for which no plan holds."""

    least_bytes: int
    profile: Profile
    error: BudgetInfeasible | None  # None where arithmetic alone says so


class _Ways(NamedTuple):
    """What has become of the ways to cut that were tried."""

    holding: list[TestedPlan]  # all plans that hold the budget, to be timed together
    failed: list[_Failure]
    refused: list[Tiles | None]  # measuring them would have passed the limit
    nameless: list[Profile]  # in tiles a named value need not exist whole


def search_plan(tools: PlanTools, request: PlanRequest) -> TestedPlan:
    """The best plan, tried out.

    Raises:
        BudgetInfeasible: no plan holds the budget, or there is less memory than that.
    """
    return where_memory_lasts(
        tools.step, lambda one: _best_that_is_read(tools, one), (request,), doing="was planned"
    )


def _best_that_is_read(tools: PlanTools, request: PlanRequest) -> TestedPlan:
    """The best tested plan; a compiled loss that cannot be read runs as it was written."""
    try:
        return _best(tools, request)
    except UnreadableLoss:
        if not tools.loss.run_as_written():
            raise
    return _best(tools, request)


def _best(tools: PlanTools, request: PlanRequest) -> TestedPlan:
    """The best tested plan of those without tiles and those with."""
    ways = _try_tilings(tools, request)
    if ways.holding:
        return fastest(tools, ways.holding, request.batch)
    smallest = min(ways.failed, key=lambda one: one.least_bytes)
    error = smallest.error
    if error is None:
        # Only the smallest of all is tried out: what it takes is the smallest budget.
        try:
            tested = smallest_that_holds(tools, smallest.profile, request)
            return fastest(tools, [tested], request.batch)
        except BudgetInfeasible as measured:
            error = measured
    if tools.step.tile:
        raise error
    least = min(_least_in_tiles(tools, request, error.min_bytes), default=error.min_bytes)
    raise with_tiles_named(error, least)


def _try_tilings(tools: PlanTools, request: PlanRequest) -> _Ways:
    """Each way to cut along tokens, while it may be worth it: none is even begun in more than the
    budget if there are others.
    """
    step, ways = tools.step, _Ways([], [], [], [])
    for tiles in tools.tiles.worth_trying(request.batch):
        if ways.holding and are_last_resort(tiles):
            break
        _try_tiling(tools, tiles, request, ways, step.limit_bytes if step.tile else None)
        if ways.holding and (not step.compares_ahead or _is_fast_enough(tools, ways.holding[0])):
            break
    if not ways.holding:
        _measure_refused(tools, request, ways)
    if ways.nameless and not ways.holding and not ways.failed:
        fix_by_name(ways.nameless[-1], step.named)  # says which name it is
    return ways


def _try_tiling(
    tools: PlanTools,
    tiles: Tiles | None,
    request: PlanRequest,
    ways: _Ways,
    most_bytes: int | None,
) -> None:
    """Find plans in one way to cut, in no more than so many bytes; None: in what it takes."""
    try:
        profile = tools.profiles.measure(request, tiles=tiles, most_bytes=most_bytes)
    except PastLimit:
        ways.refused.append(tiles)
        return
    if tiles is not None and profile.fixed != tools.step.named:
        ways.nameless.append(profile)
        return
    try:
        holding = plans_that_hold(tools, profile, request, is_only=most_bytes is None)
        ways.holding.extend(holding)
    except Hopeless as least:
        ways.failed.append(_Failure(least.needed_bytes, profile, None))
    except BudgetInfeasible as error:
        ways.failed.append(_Failure(error.min_bytes, profile, error))


def _measure_refused(tools: PlanTools, request: PlanRequest, ways: _Ways) -> None:
    """No way holds: what do those need that were refused? The last in the order takes the least;
    another is measured in no more than the least that is needed so far.
    """
    for tiles in reversed(ways.refused[:]):
        least = min((one.least_bytes for one in ways.failed), default=None)
        _try_tiling(tools, tiles, request, ways, least)


def _is_fast_enough(tools: PlanTools, tested: TestedPlan) -> bool:
    """Whether no other tiles need be tried."""
    return tools.step.reproducible or not may_be_beaten(tested)


def may_be_beaten(tested: TestedPlan) -> bool:
    """Whether tiles may make a step much faster: nothing is faster than a batch that is run whole
    with everything kept.
    """
    plan, profile = tested.plan, tested.profile
    if distributed.is_running():  # all ranks must profile the same, and each has its own clock
        return plan.is_short
    least = profile.plain_seconds(plan.batch_size) + profile.optimizer_seconds
    return plan.is_short and plan.step_seconds > _NEARLY_LEAST * least


def _least_in_tiles(tools: PlanTools, request: PlanRequest, below: int) -> Iterator[int]:
    """The smallest budget in each way to cut along tokens that can be measured below so many bytes,
    by arithmetic.
    """
    beside = tools.step.beside_bytes
    of_any_size = request._replace(batch_size=0)
    for tiles in tools.tiles.choices(request.batch).tiles:
        try:
            profile = tools.profiles.measure(of_any_size, tiles=tiles, most_bytes=below - beside)
            best_plan(tools, profile, 1, request.batch_size)
        except PastLimit:
            continue
        except BudgetInfeasible as smallest:
            yield smallest.min_bytes + beside


def plans_in_tiles(tools: PlanTools, request: PlanRequest) -> list[TestedPlan]:
    """Plans that cut along tokens, where others hold, too."""
    found: list[TestedPlan] = []
    for tiles in tools.tiles.choices(request.batch).tiles:
        if not are_last_resort(tiles):
            ways = _Ways([], [], [], [])
            _try_tiling(tools, tiles, request, ways, tools.step.limit_bytes)
            found += ways.holding
    return found
