"""Plans for the batches that come: one per input shape, each tried out and corrected until it
holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory
from gradfit._torch_compile import is_compiled
from gradfit._torch_distributed import local_part
from gradfit._torch_fsdp import drop_gradients, units_of
from gradfit.batches.additivity import has_count
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, MicroBatchRunner, Part, as_written
from gradfit.batches.snapshot import untouched
from gradfit.batches.weights import BatchWeights, UnreadableLoss
from gradfit.devices import counted_device, devices_of, free_cached_memory, wait_for
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.fitting.batch_rows import BatchRows
from gradfit.fitting.families import (
    PlanningTime,
    covering,
    grown,
    in_smaller_parts,
    may_be_slow,
    with_slack,
    within_memory,
)
from gradfit.fitting.fixed_cost import with_computed_seconds
from gradfit.fitting.modes import Planned
from gradfit.fitting.plan_comparison import PlanComparison
from gradfit.fitting.progress import OnProgress, ProgressReport
from gradfit.fitting.race import Race
from gradfit.fitting.reserved import ReservedMemory
from gradfit.fitting.tested_plan import (
    Shape,
    TestedPlan,
    covers,
    shape_of,
    smaller,
    with_update_copy,
)
from gradfit.fitting.trial import NeedsMore, PastLimit, Trials, meter_below, refusing, state_bytes
from gradfit.fitting.update_rollback import UpdateSnapshot
from gradfit.planning.allocator import SEGMENT_BYTES
from gradfit.planning.api import (
    beginning_like,
    plain_plan,
    plan_for_fit,
    predicted,
    recomputing_plan,
    updates_within,
    with_alternatives,
)
from gradfit.planning.microbatch import even
from gradfit.planning.named_choices import Named, fix_by_name, fix_known_names
from gradfit.planning.plan import Plan, fixed_text
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.measure import (
    MeasuredStep,
    MeasuringLimits,
    additivity_within,
    choose_tiles,
    measure_sizes,
)
from gradfit.profiling.profile import Profile
from gradfit.profiling.room_for_rows import RoomForRows
from gradfit.profiling.tile_choices import TileChoices
from gradfit.profiling.update_groups import may_be_cut, with_bursts
from gradfit.recompute.follow_plan import Diverged
from gradfit.recompute.offload import measure_bandwidth
from gradfit.tiling.heads import find_heads
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles
from gradfit.tree import leaves
from gradfit.units import format_bytes

_Way = TypeVar("_Way")
_Found = TypeVar("_Found")
_TRIES = 5
_TRIES_ONLINE = 3
_ONLINE_MARGIN = 1.03  # above the smallest limit that was held online
# By how much a prediction may be above the budget, and a trial still tell; or above the least
# seconds there can be, and nobody looks further.
_NEARLY = 1.05
_DOUBT = 1.3  # by how much a prediction may be slower, and the clock is still asked
# Looking for rivals of a plan, and for plans in tiles, takes about so many of its steps.
_RIVALS_STEPS, _TILES_STEPS = 4.0, 10.0
# Of the budget, what a plan that is tried out in the middle of training may take on paper.
_CAREFUL_SHARE = 0.98
_LONGEST_NUMBER = 8  # bytes
_NUMBERS_BYTES = 2048  # weights and norms of the accumulator, as scalars
_LOSS_IS_COMPILED = (
    "The loss is made inside of a compiled function, which does not say what it was divided by: so"
    " that micro-batches can be weighed, compiled functions are run as they were written. To run"
    " them compiled, return gf.Loss(sum=…, count=…) from loss_fn, or use gf.losses (causal_lm and"
    " others), or compute the loss outside of what is compiled."
)


class _Hopeless(NeedsMore):
    """No plan can hold the budget, by arithmetic; nothing was tried out."""


class _LeavesPlan(Exception):
    """The forward leaves a plan while it is tried out."""


class _Request(NamedTuple):
    """What a plan is wanted for."""

    batch: Any
    batch_size: int
    shape: Shape


class _Served(NamedTuple):
    """Which plan serves a batch, as long as there are no others."""

    plans: list[TestedPlan]
    additivity: Additivity
    batch_size: int
    shape: Shape
    served: TestedPlan


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


@dataclasses.dataclass
class _StillToDo:
    """What is left to be done for a plan while training runs."""

    comparison: PlanComparison | None  # None: the plan stays until there are others
    looks_for_rivals: bool = True
    looks_for_tiles: bool = True


class _Measured(NamedTuple):
    """What was measured last."""

    profile: Profile | None = None
    unlike: Sequence[Profile] = ()  # of sizes at which other operations were run
    by_the_way: bool = False  # in passes that were not quite those of a step

    def has(self, profile: Profile) -> bool:
        return any(profile is one for one in (self.profile, *self.unlike))


@dataclasses.dataclass
class _Search:
    """How far the search for a plan that holds has come."""

    profile: Profile
    timed: Profile  # the same, with the seconds that the micro-batch is chosen by
    target_bytes: int  # what the next plan may take, on paper
    least_bytes: int  # what is needed, as far as is known
    micro_batch: int | None = None  # None while any will do


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
        named: Named | None = None,
        known: Iterable[TestedPlan] = (),
        reproducible: bool = False,
        reserved_bytes: int = 0,
        reduce_bytes: int = 0,
        wide: torch.dtype | None = None,
        copies: bool = False,
        micro_batch: int | None = None,
        whole: bool = False,
        exact: bool = True,
        tile: bool = True,
        planning_share: float = 0.05,
        plan_ahead: bool = True,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        # by shape, what is left to be done for its plan; nothing if all is done before its first
        # step, as it is where clocks must not decide, or each rank has its own
        self._later: dict[Shape, _StillToDo] = {}
        self._plans_ahead = plan_ahead or reproducible
        self._described: tuple[Plan, Plan] | None = None  # the last plan that was asked for
        self._progress = ProgressReport(on_progress)
        self.exact = exact  # what does not add up is not cut
        self.additivity: Additivity | None = None
        self._tile = tile  # whether plans may cut along tokens
        # the size that was asked for, or never to cut
        self._micro_batch, self._whole = micro_batch, whole
        self.reserved_bytes = reserved_bytes  # of communication buckets, which no meter sees
        self.reduce_bytes = reduce_bytes  # what adding up over the ranks takes for a moment
        # while the optimizer steps there is a copy of what it changes, if the budget has room
        self._copies = copies
        self._wide = wide  # in which the optimizer works, if the parameters are narrower
        # A step holds copies of the buffers, to go back to, and a few numbers for the accumulator.
        self._own_bytes = sum(buffer.nbytes for buffer in model.buffers()) + _NUMBERS_BYTES
        self.limit_bytes = max(1, budget_bytes - reserved_bytes - self._own_bytes)
        self.runner = MicroBatchRunner(model, loss_fn, split)
        self.resident = (model, optimizer)  # whose tensors are there all the time
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self.device = counted_device(model)  # whose memory the budget is about
        self._devices = devices_of(model.parameters())
        self.reserved = ReservedMemory(self._devices)
        self._trials = Trials(
            self.runner, optimizer, self.limit_bytes, self.reserved, self._weights_of
        )
        self._offload = offload
        self._named = named or {}  # what becomes of values by their names
        self._reproducible = reproducible
        self._copy_pace = 0.0  # seconds for a byte of the copy, once it was made
        self.time = PlanningTime(planning_share)
        self._measured = _Measured()
        self._is_as_written = False  # compiled functions are not run compiled
        self._sharded_choices: TileChoices | None = None
        self._has_count: bool | None = None  # the loss of one row; None before it was asked
        self._counted: BatchRows | None = None  # of a step's batch
        self._plans: list[TestedPlan] = []  # a new list whenever one comes or goes
        self._last_served: _Served | None = None
        self._used: dict[int, int] = {}  # by a plan's address: when it was last used
        self._clock = 0
        self.take_up(known)

    @property
    def known(self) -> tuple[TestedPlan, ...]:
        """Every plan that is gone by so far, in the order in which they are tried for a batch."""
        return tuple(self._plans)

    def take_up(self, plans: Iterable[TestedPlan]) -> None:
        """Go by these plans from now on, and by what was measured of the loss when they were
        made.
        """
        self._later.clear()
        # of another optimizer, perhaps, which may be updated in groups where this one may not
        plans = [one for one in plans if may_be_cut(self._optimizer, one.plan.update_groups)]
        self._plans = [with_slack(plan, self.limit_bytes) for plan in plans]
        self.additivity = self._plans[0].profile.additivity if self._plans else None

    def parts(self, batch: Any, micro_batch: int) -> Iterable[Any]:
        """The batch in micro-batches."""
        return self.runner.cut(batch, micro_batch)

    def rows(self, batch: Any) -> int:
        """How many rows the batch has."""
        if self._counted is not None and self._counted.batch is batch:
            return self._counted.exact
        return self.runner.rows(batch)

    def count(self, batch: Any) -> BatchRows:
        """The rows of a step's batch, which are counted once, or not at all where that need not
        be; until `forget_batch`.
        """
        self._counted = BatchRows(self.runner, batch)
        return self._counted

    def forget_batch(self) -> None:
        """The step is over."""
        self._counted = None

    def rows_at_most(self, rows: BatchRows) -> int:
        """The rows of a batch; or, where they would have to be counted and a plan that keeps
        everything serves it whole, no more than that one is for.
        """
        if rows.is_counted:
            return rows.exact
        larger = covering(self._plans, self.shape(rows.batch), 0)
        sizes = [one.plan.batch_size for one in larger if _keeps_whole_batch(one.plan)]
        return rows.at_most(max(sizes, default=None))

    def run_as_written(self) -> bool:
        """From now on compiled functions are run as they were written, where a loss that is made
        inside of one does not say what it was divided by; whether they were not before.
        """
        if self._is_as_written:
            return False
        self._is_as_written = True
        self.runner.loss_fn = self._loss_fn = as_written(self._loss_fn)
        if is_compiled(self._model, self._loss_fn):
            warnings.warn(_LOSS_IS_COMPILED, stacklevel=2)
        return True

    def shape(self, batch: Any) -> Shape:
        """By which a batch's plans are found."""
        return shape_of(batch, rows=self.runner.split is not None)

    def tested_plan(self, batch: Any, batch_size: int) -> TestedPlan:
        """A plan for batches of this shape: one made before for this shape or a larger one, or a
        new one.
        """
        request = _Request(batch, batch_size, self.shape(batch))
        self._measure_missing_additivity(request)
        tested = self._find(request)
        if tested is None:
            tested = self._fitted(request)
        elif self._is_due(tested, request):
            with self.time.planning(), self._progress.running():
                self._look_for_faster(tested, request)
        return self._mark_used(self._in_turn(tested, request))

    def _fitted(self, request: _Request) -> TestedPlan:
        """A new plan, which may still be improved."""
        with self.time.timing_a_plan(is_counted=bool(self._plans)):
            tested = self._add(self._fit(request))
        if tested.steady and not self._ahead:
            self._later[tested.shape] = _StillToDo(
                PlanComparison([tested]),
                looks_for_tiles=self._tile and tested.plan.tiles is None,
            )
        return tested

    @property
    def _ahead(self) -> bool:
        """Whether all plans are compared before the first step."""
        return self._plans_ahead or distributed.is_running()

    # -- improving a plan while training runs -----------------------------------------------------

    def _later_for(self, tested: TestedPlan, request: _Request) -> _StillToDo | None:
        """What is left to be done, if this batch is one that tells."""
        later = self._later.get(tested.shape)
        is_usual = (request.shape, request.batch_size) == (tested.shape, tested.plan.batch_size)
        return later if is_usual else None

    def _in_turn(self, tested: TestedPlan, request: _Request) -> TestedPlan:
        """The plan whose turn it is, of those that are compared."""
        later = self._later_for(tested, request)
        if later is None or later.comparison is None or later.comparison.tested is tested:
            return tested
        return self._exchange(tested, later.comparison.tested)

    def _exchange(self, old: TestedPlan, new: TestedPlan) -> TestedPlan:
        """Go by another plan for the same batches."""
        self._used[id(new)] = self._used.pop(id(old), 0)
        self._plans = [new if one is old else one for one in self._plans]
        return new

    def is_compared(self, tested: TestedPlan) -> bool:
        """Whether it matters how long a step by this plan takes."""
        later = self._later.get(tested.shape)
        comparison = None if later is None else later.comparison
        return comparison is not None and comparison.tested is tested

    def took(self, tested: TestedPlan, batch: Any, seconds: float) -> TestedPlan:
        """A whole step by this plan has taken so long, and nothing beside it was measured; gives
        the plan that is gone by now.
        """
        later = self._later.get(tested.shape)
        if later is None or later.comparison is None or not self.is_compared(tested):
            return tested
        if self._counted is not None and not self._counted.is_counted:
            return tested  # it is served whole, by a plan that keeps everything: none is faster
        if self.shape(batch) != tested.shape or self.rows(batch) != tested.plan.batch_size:
            return tested
        if not later.comparison.took(seconds):
            return tested
        fastest, later.comparison = later.comparison.fastest, None
        if math.isinf(self._steps_of_next(fastest, later)):
            del self._later[tested.shape]
        return self._exchange(tested, fastest)

    def settle(self, tested: TestedPlan | None = None) -> None:
        """Compare no more plans, or none of those that this one is compared with: the one that is
        the fastest, as far as is known, stays.
        """
        for shape in [*self._later] if tested is None else [tested.shape]:
            later = self._later.pop(shape, None)
            if later is not None and later.comparison is not None:
                now = [one for one in later.comparison.plans if any(one is x for x in self._plans)]
                for one in now:
                    self._exchange(one, later.comparison.fastest)

    def _is_due(self, tested: TestedPlan, request: _Request) -> bool:
        """Whether to look for faster plans now: those that there are were compared, and it takes no
        more than its share of the time.
        """
        later = self._later_for(tested, request)
        if later is None or later.comparison is not None:
            return False
        return self.time.has_room_for(self._steps_of_next(tested, later) * tested.plan.step_seconds)

    def _steps_of_next(self, tested: TestedPlan, later: _StillToDo) -> float:
        """How many steps' time is taken by what would be looked for next; infinite if that is
        nothing.
        """
        if later.looks_for_rivals and not _keeps_whole_batch(tested.plan):
            return _RIVALS_STEPS
        if later.looks_for_tiles and _may_be_beaten(tested):
            return _TILES_STEPS
        return math.inf

    def _look_for_faster(self, tested: TestedPlan, request: _Request) -> None:
        """Try out other plans for these batches; those that hold take turns with this one."""
        later = self._later[tested.shape]
        found: list[TestedPlan] = []
        if later.looks_for_rivals:
            later.looks_for_rivals = False
            with contextlib.suppress(UnreadableLoss):  # then it is not cut for the clock's sake
                found = list(self._others(tested, request.batch, self.limit_bytes))
        else:
            later.looks_for_tiles = False
            found = self._in_tiles(request)
        if found:
            later.comparison = PlanComparison([tested, *map(self._finished, found)])
        elif math.isinf(self._steps_of_next(tested, later)):
            del self._later[tested.shape]

    def _in_tiles(self, request: _Request) -> list[TestedPlan]:
        """Plans that cut along tokens, where others hold, too."""
        found: list[TestedPlan] = []
        for tiles in self._tile_choices(request.batch).tiles:
            if not _are_last_resort(tiles):
                ways = _Ways([], [], [], [])
                self._try_tiling(tiles, request, ways, self.limit_bytes)
                found += ways.holding
        return found

    def described(self, tested: TestedPlan) -> Plan:
        """The plan with the next ones for less memory and for more, and whether it may change."""
        if self._described is None or self._described[0] is not tested.plan:
            self._described = (tested.plan, with_alternatives(tested.profile, tested.plan))
        later, plan = self._later.get(tested.shape), self._described[1]
        if later is None or later.comparison is None or not later.comparison.is_between_plans:
            return plan
        others = [one.plan for one in later.comparison.plans if one is not tested]
        said = " and ".join(f"micro-batch {one.split_text}, {one.kept_text}" for one in others)
        return dataclasses.replace(plan, comparing=said)

    # -- finding a plan ---------------------------------------------------------------------------

    def _measure_missing_additivity(self, request: _Request) -> None:
        """Of plans of single rows, or from a version that did not measure it."""
        if not self._plans or self.additivity is not None:
            return
        if request.batch_size > 1 or self.rows(request.batch) > 1:
            with untouched(self._model) as before:
                of_what = (self._model, self._loss_fn, request.batch, self.runner.split)
                room = RoomForRows(*of_what, self.limit_bytes, optimizer=self._optimizer)
                self.additivity = additivity_within(*of_what, room, before.rewind)

    def _find(self, request: _Request) -> TestedPlan | None:
        """A plan made before for this shape or a larger one, or what arithmetic makes of one."""
        larger = self._plan_for_larger(request)
        if larger is not None:
            return None if self._wants_own(larger, request) else larger
        return self._plan_by_size(request)

    def _plan_for_larger(self, request: _Request) -> TestedPlan | None:
        """The first plan that holds, for batches at least as large as this one."""
        return next(iter(covering(self._holding(), request.shape, request.batch_size)), None)

    def _plan_by_size(self, request: _Request) -> TestedPlan | None:
        if distributed.is_running():  # where ranks run forwards, and so plan, together
            return None
        by_size = grown(self._holding(), request.shape, request.batch_size, self.limit_bytes)
        return self._plan_in_parts(request) if by_size is None else self._remember(by_size)

    def _plan_in_parts(self, request: _Request, below: int | None = None) -> TestedPlan | None:
        """Micro-batches so small that they hold by arithmetic, until there is time for a plan of
        their own; or, where one of so many rows has not, of fewer.
        """
        if self._ahead or self._micro_batch is not None:
            return None
        by_size = in_smaller_parts(
            self._holding(), request.shape, request.batch_size, self.limit_bytes, below
        )
        return None if by_size is None else self._remember(by_size)

    def _holding(self) -> list[TestedPlan]:
        return [tested for tested in self._plans if self._holds(tested)]

    def _mark_used(self, tested: TestedPlan) -> TestedPlan:
        self._used[id(tested)] = self._clock = self._clock + 1
        return tested

    def serving(self, batch: Any, batch_size: int) -> TestedPlan | None:
        """The plan that `tested_plan` would give, if it was made before and nothing need be
        measured.
        """
        shape = self.shape(batch)
        last = self._last_served
        if (
            last is not None
            and last.plans is self._plans
            and last.additivity is self.additivity
            and last.batch_size == batch_size
            and last.shape == shape
        ):
            return self._mark_used(last.served)
        request = _Request(batch, batch_size, shape)
        larger = self._plan_for_larger(request)
        if self.additivity is None or larger is None or self._wants_own(larger, request):
            return None
        if self._is_due(larger, request):
            return None
        # else it depends on the time there is, or other plans are still compared
        if not may_be_slow(larger, shape, batch_size) and larger.shape not in self._later:
            self._last_served = _Served(self._plans, self.additivity, batch_size, shape, larger)
        return self._mark_used(self._in_turn(larger, request))

    def _wants_own(self, larger: TestedPlan, request: _Request) -> bool:
        """Whether batches of this shape should have a plan of their own, and there is time to make
        it.
        """
        return (
            not self._reproducible
            and not distributed.is_running()
            and may_be_slow(larger, request.shape, request.batch_size)
            and self.time.has_room_for(self.time.plan_seconds)
        )

    def kept_meanwhile(self, tested: TestedPlan, batch: Any) -> TestedPlan | None:
        """Everything kept in smaller micro-batches, which holds whatever the operations are, for
        batches whose forward leaves this plan; None if there is time for a plan of their own, or
        that cannot be.
        """
        if self._reproducible or self.time.has_room_for(self.time.plan_seconds):
            return None
        return self._plan_in_parts(_Request(batch, self.rows(batch), tested.shape))

    def outgrown(self, tested: TestedPlan, batch: Any) -> TestedPlan:
        """A plan of its own for a batch that is too large for one that arithmetic had found for
        it.
        """
        self._plans = [other for other in self._plans if other is not tested]
        request = _Request(batch, self.rows(batch), self.shape(batch))
        smaller = self._plan_in_parts(request, below=tested.plan.micro_batch)
        return self._fitted(request) if smaller is None else smaller

    def _holds(self, tested: TestedPlan) -> bool:
        """Whether a plan is one for this budget: it may come from a step with a larger one, or from
        another loss.
        """
        return self._within_budget(tested) and (tested.plan.steps == 1 or self._may_be_in_parts)

    @property
    def _may_be_in_parts(self) -> bool:
        """Whether, as far as was measured, a batch may be cut."""
        return not self.exact or self.additivity is None or self.additivity.adds_up

    def _add(self, tested: TestedPlan) -> TestedPlan:
        """Take in a plan that was tried out, in the place of one for the same shape and the same
        operations.
        """
        return self._remember(self._finished(tested))

    def _finished(self, tested: TestedPlan) -> TestedPlan:
        """A plan that was tried out, as a step goes by it."""
        tested = with_slack(
            dataclasses.replace(tested, tested_bytes=tested.peak_bytes), self.limit_bytes
        )
        tested = self._with_update_copy(tested, self.limit_bytes)
        return dataclasses.replace(
            tested, plan=dataclasses.replace(tested.plan, budget_bytes=self.budget_bytes)
        )

    def _remember(self, tested: TestedPlan) -> TestedPlan:
        others = [other for other in self._plans if not _takes_the_place_of(tested, other)]
        kept = within_memory(others, self._used)
        self._plans = sorted([*kept, tested], key=lambda one: one.plan.peak_bytes)
        shapes = {one.shape for one in self._plans}
        self._later = {shape: one for shape, one in self._later.items() if shape in shapes}
        self._used = {id(one): self._used.get(id(one), 0) for one in self._plans}
        return tested

    def plan_of_part(self, part: Any, tested: TestedPlan) -> TestedPlan | None:
        """A plan for what this micro-batch does, where another one of its size was planned for;
        None if there is none. One of fewer rows than those that were planned for has a plan for
        such alone, which is not remembered here.

        Raises:
            BudgetInfeasible: only a smaller micro-batch could do that.
        """
        with self._progress.running():
            return self._plan_of_part(part, tested)

    def _plan_of_part(self, part: Any, tested: TestedPlan) -> TestedPlan | None:
        plan, rows = tested.plan, self.rows(part)
        profile = self._profile(part, rows=rows, tiles=plan.tiles)
        if rows < plan.micro_batch:
            own = plan_for_fit(
                profile, memory=self.limit_bytes, batch_size=plan.batch_size, micro_batch=rows
            )
            untested = TestedPlan(own, profile, tested.shape, 0, steady=True)
            tried = self._try_within_limit(untested, part)
            return None if tried is None else self._finished(tried)
        best = self._plan(profile, self.limit_bytes, plan.batch_size, plan.micro_batch)
        # Rather one that begins as the other does, so that a forward can go over from one to the
        # other.
        alike = beginning_like(profile, best, plan)
        for candidate in (best,) if alike is None else (alike, best):
            untested = TestedPlan(candidate, profile, tested.shape, 0, steady=True)
            tried = self._try_within_limit(untested, part)
            if tried is not None:
                return self._add(tried)
        return None

    def _within_budget(self, tested: TestedPlan) -> bool:
        """Whether its measured peak is within the budget. A real step's has in it what a trial does
        not hold.
        """
        has_stepped = tested.seen_bytes > 0
        return tested.peak_bytes <= (
            self.budget_bytes - self.reserved_bytes if has_stepped else self.limit_bytes
        )

    def tighter(self, tested: TestedPlan, share: float = 0.9) -> TestedPlan:
        """A plan that needs less than this one did, at the same micro-batch while there is one.

        Where this one is the smallest there is, it is that one again: memory may have run out for
        another's sake.

        Args:
            tested: the plan that memory ran out with.
            share: of what it needed.
        """
        if not tested.steady:
            return self.replace(tested, plan=self._cut_smaller(tested), seen=False)
        limit = int(min(tested.peak_bytes, self.limit_bytes) * share)
        plan = self._plan_or_smallest(tested, limit)
        untested = dataclasses.replace(
            tested, plan=plan, peak_bytes=plan.peak_bytes, saved_bytes=None, seen=False,
            copied=False, slack=1.0, tested_bytes=0, reserved_bytes=0, copied_reserved_bytes=0,
        )  # fmt: skip
        return self._put(tested, self._with_update_copy(untested, limit))

    def _cut_smaller(self, tested: TestedPlan) -> Plan:
        """Its plan at half the micro-batch, if it may be cut."""
        if not self._may_cut(tested.profile):
            return tested.plan
        return smaller(tested.plan, tested.profile.min_batch)

    def _plan_or_smallest(self, tested: TestedPlan, limit_bytes: int) -> Plan:
        """A plan from its profile for this limit; if there is none, the smallest there is."""
        plan, profile = tested.plan, tested.profile
        try:
            return self._plan_at(profile, limit_bytes, plan.batch_size, plan.micro_batch)
        except BudgetInfeasible as smallest:
            if smallest.min_bytes >= plan.peak_bytes:
                return plan
            return self._plan(profile, smallest.min_bytes, plan.batch_size)

    def _with_update_copy(self, tested: TestedPlan, limit_bytes: int) -> TestedPlan:
        if not self._copies:
            return tested
        changed = _local_bytes(_trained(self._model))
        copied = changed + tested.profile.optimizer_bytes
        with_copy = with_update_copy(tested, copied, limit_bytes)
        if not with_copy.copied or not changed or not self._ahead:  # else steps tell the seconds
            return with_copy
        seconds = copied * self._seconds_per_copied_byte(changed)
        return dataclasses.replace(with_copy, plan=with_copy.plan.with_extra_seconds(seconds))

    def _seconds_per_copied_byte(self, changed: int) -> float:
        """As measured once; `changed` is how many bytes of parameters are copied."""
        if not self._copy_pace:
            seconds = min(self._copy_seconds() for _ in range(2))
            self._copy_pace = seconds / (changed + state_bytes(self._optimizer))
        return self._copy_pace

    def _copy_seconds(self) -> float:
        wait_for(self._devices)
        started = seconds_now()
        with UpdateSnapshot(self._model.parameters(), self._optimizer, taken=True):
            wait_for(self._devices)
            return seconds_now() - started

    def has_optimizer_state(self, tested: TestedPlan) -> bool:
        """Whether the optimizer holds by now all that it will hold."""
        return state_bytes(self._optimizer) >= tested.profile.optimizer_bytes

    def stepped(
        self, tested: TestedPlan, peak_bytes: int, saved_bytes: int, **changes: Any
    ) -> TestedPlan:
        """Remember what a measured step has taught: its peak, and how much autograd saved of a
        micro-batch. A plan that arithmetic has found may save as much more as there is room for.
        """
        if tested.by_size and tested.saved_bytes is None and tested.plan.keeps_everything:
            changes["saved_bytes"] = saved_bytes + max(0, self.limit_bytes - peak_bytes)
        return self.replace(tested, peak_bytes=peak_bytes, **changes)

    def replace(self, old: TestedPlan, **changes: Any) -> TestedPlan:
        """Remember what a step has taught about a plan."""
        return self._put(old, dataclasses.replace(old, **changes))

    def _put(self, old: TestedPlan, new: TestedPlan) -> TestedPlan:
        """Go by the new one where the old one was gone by."""
        later = self._later.get(old.shape)
        if later is not None and later.comparison is not None:
            later.comparison.replace(old, new)
        return self._exchange(old, new)

    def _fit(self, request: _Request) -> TestedPlan:
        with self._progress.running():
            return self._where_memory_lasts(
                self._best_that_is_read, (request,), doing="was planned"
            )

    def _best_that_is_read(self, request: _Request) -> TestedPlan:
        """The best tested plan; a compiled loss that cannot be read runs as it was written."""
        try:
            return self._best(request)
        except UnreadableLoss:
            if not self.run_as_written():
                raise
        return self._best(request)

    def _best(self, request: _Request) -> TestedPlan:
        """The best tested plan of those without tiles and those with."""
        ways = self._try_tilings(request)
        if ways.holding:
            return self._fastest(ways.holding, request.batch)
        smallest = min(ways.failed, key=lambda one: one.least_bytes)
        error = smallest.error
        if error is None:
            # Only the smallest of all is tried out: what it takes is the smallest budget.
            try:
                return self._fastest(self._fit_smallest(smallest.profile, request), request.batch)
            except BudgetInfeasible as measured:
                error = measured
        raise error if self._tile else self._with_tiles_named(error, request)

    def _try_tilings(self, request: _Request) -> _Ways:
        """Each way to cut along tokens, while it may be worth it: none is even begun in more than
        the budget if there are others.
        """
        ways = _Ways([], [], [], [])
        for tiles in self._worth_trying(request):
            if ways.holding and _are_last_resort(tiles):
                break
            self._try_tiling(tiles, request, ways, self.limit_bytes if self._tile else None)
            if ways.holding and (not self._ahead or self._is_fast_enough(ways.holding[0])):
                break
        if not ways.holding:
            self._measure_refused(request, ways)
        if ways.nameless and not ways.holding and not ways.failed:
            fix_by_name(ways.nameless[-1], self._named)  # says which name it is
        return ways

    def _try_tiling(
        self, tiles: Tiles | None, request: _Request, ways: _Ways, most_bytes: int | None
    ) -> None:
        """Find plans in one way to cut, in no more than so many bytes; None: in what it takes."""
        try:
            profile = self._profile(
                request.batch, tiles=tiles, batch_size=request.batch_size, most_bytes=most_bytes
            )
        except PastLimit:
            ways.refused.append(tiles)
            return
        if tiles is not None and profile.fixed != self._named:
            ways.nameless.append(profile)
            return
        try:
            ways.holding.extend(self._fit_as(profile, request, is_only=most_bytes is None))
        except _Hopeless as least:
            ways.failed.append(_Failure(least.needed_bytes, profile, None))
        except BudgetInfeasible as error:
            ways.failed.append(_Failure(error.min_bytes, profile, error))

    def _measure_refused(self, request: _Request, ways: _Ways) -> None:
        """No way holds: what do those need that were refused? The last in the order takes the
        least; another is measured in no more than the least that is needed so far.
        """
        for tiles in reversed(ways.refused[:]):
            least = min((one.least_bytes for one in ways.failed), default=None)
            self._try_tiling(tiles, request, ways, least)

    def _is_fast_enough(self, tested: TestedPlan) -> bool:
        """Whether no other tiles need be tried."""
        return self._reproducible or not _may_be_beaten(tested)

    def _worth_trying(self, request: _Request) -> Iterator[Tiles | None]:
        """Without tiles first, unless one row's logits alone, of which three are there at once,
        pass the budget.
        """
        if not self._tile:
            yield None
            return
        if self._surely_holds_logits(request):
            yield None
            yield from self._tile_choices(request.batch).tiles
            return
        choices = self._tile_choices(request.batch)
        least = 2 * _local_bytes(_trained(self._model)) + 3 * choices.whole_bytes
        if not choices.tiles or least <= self.limit_bytes:
            yield None
        yield from choices.tiles

    def _surely_holds_logits(self, request: _Request) -> bool:
        """Whether one row's logits are small beside the budget, so that nothing need be run to
        see it: for each number of the row at most one for each word.
        """
        if distributed.is_running():  # all ranks must run the same
            return False
        heads: list[Any] = [self._model.get_submodule(name) for name in find_heads(self._model)]
        words = max((int(head.out_features) for head in heads), default=0)
        numbers = [tensor.numel() for tensor in leaves(request.batch)]
        row = max(numbers, default=0) / max(1, self.rows(request.batch))
        least = 2 * _local_bytes(_trained(self._model)) + 6 * row * words * _LONGEST_NUMBER
        return least <= self.limit_bytes

    def _tile_choices(self, batch: Any) -> TileChoices:
        if not units_of(self._model):
            return choose_tiles(self._model, self._loss_fn, batch, self.runner.split)
        # FSDP2 gathers in every forward, from all ranks: looked for once, when all of them fit.
        if self._sharded_choices is None:
            self._sharded_choices = choose_tiles(
                self._model, self._loss_fn, batch, self.runner.split
            )
        return self._sharded_choices

    def _with_tiles_named(self, error: BudgetInfeasible, request: _Request) -> BudgetInfeasible:
        """What the smallest budget would be with tiles, if that is less."""
        least = min(self._least_in_tiles(request, error.min_bytes), default=error.min_bytes)
        if least >= error.min_bytes:
            return error
        text = f"{error} With tile=True, about {format_bytes(least)} would be enough."
        return BudgetInfeasible(text, min_bytes=error.min_bytes, breakdown=error.breakdown)

    def _least_in_tiles(self, request: _Request, below: int) -> Iterator[int]:
        """The smallest budget in each way to cut along tokens that can be measured below so many
        bytes, by arithmetic.
        """
        most = below - self._own_bytes - self.reserved_bytes
        for tiles in self._tile_choices(request.batch).tiles:
            try:
                profile = self._profile(request.batch, tiles=tiles, most_bytes=most)
                self._plan(profile, 1, request.batch_size)
            except PastLimit:
                continue
            except BudgetInfeasible as smallest:
                yield smallest.min_bytes + self._own_bytes + self.reserved_bytes

    def _fit_as(self, profile: Profile, request: _Request, *, is_only: bool) -> list[TestedPlan]:
        """Tested plans from this profile, the one that is predicted to be the fastest first.

        Args:
            profile: of a way to cut.
            request: what for.
            is_only: there is no other way, so the smallest budget is measured, which takes as much.

        Raises:
            _Hopeless: there is none, by arithmetic.
            BudgetInfeasible: there is none, as measured.
        """
        search = _Search(
            profile, self._with_choosing_seconds(profile), self.limit_bytes, profile.measuring_bytes
        )
        if profile.measuring_bytes <= self.limit_bytes:
            holding = self._correct_until_held(search, request)
            if holding:
                return holding
        if search.least_bytes > _NEARLY * self.limit_bytes:
            raise _Hopeless(search.least_bytes)
        return self._fit_smallest(
            search.profile, request, most_bytes=None if is_only else self.limit_bytes
        )

    def _correct_until_held(self, search: _Search, request: _Request) -> list[TestedPlan]:
        """Try out plans, each for as much less as the one before took too much; none if none
        holds.
        """
        for _ in range(_TRIES):
            plan = self._next_plan(search, request.batch_size)
            if plan is None:
                break
            if self._go_by_size(plan.micro_batch, search):
                continue
            untested = TestedPlan(plan, search.profile, request.shape, 0, steady=True)
            tried = self._try_out(untested, request.batch, most_bytes=self.limit_bytes)
            if tried is None:
                if self._was_profiled_at(plan.micro_batch, search.profile, request.batch):
                    return [self._fit_online(untested, request.batch)]
                self._profile_at(plan.micro_batch, search, request)
            elif tried.peak_bytes <= self.limit_bytes:
                return [*self._rivals(tried, request.batch, search.target_bytes)]
            else:
                search.target_bytes = self._lower_target(search.target_bytes, tried)
        return []

    def _lower_target(self, target_bytes: int, tried: TestedPlan) -> int:
        """Less by what a trial took too much; where that were segments, no more than as many of
        them as the budget has room for, or a tenth less: with a little less another plan may need
        one fewer.
        """
        target = min(target_bytes, tried.plan.peak_bytes)
        # a hundredth at least: where a trial was refused, its peak is not known
        too_much = max(tried.peak_bytes - self.limit_bytes, target // 100)
        if tried.reserved_bytes != tried.peak_bytes:
            return target - too_much
        in_segments = tried.peak_bytes - SEGMENT_BYTES * math.ceil(too_much / SEGMENT_BYTES)
        if in_segments < target:
            return in_segments
        return target - min(too_much, max(1, target // 10))

    def _next_plan(self, search: _Search, batch_size: int) -> Plan | None:
        """For what may be taken now; None if there is none."""
        if search.target_bytes <= 0:
            return None
        try:
            return self._plan(
                search.timed,
                search.target_bytes,
                batch_size,
                search.micro_batch,
                quickly=not self._ahead,
            )
        except BudgetInfeasible as error:
            search.least_bytes = max(search.least_bytes, error.min_bytes)
            return None

    def _was_profiled_at(self, micro_batch: int, profile: Profile, batch: Any) -> bool:
        """Whether a profile is of this very size, or there are too few rows for one that is."""
        if micro_batch > self.rows(batch):
            return True
        by_the_way = self._measured.by_the_way and self._measured.has(profile)
        return micro_batch == profile.batch_size and not by_the_way

    def _go_by_size(self, micro_batch: int, search: _Search) -> bool:
        """Whether other operations were seen at this very size than a profile has: plan by those
        from now on.
        """
        for one in self._measured.unlike if search.profile is self._measured.profile else ():
            if one.batch_size == micro_batch:
                search.micro_batch, search.profile = micro_batch, one
                search.timed = self._with_choosing_seconds(one)
                return True
        return False

    def _profile_at(self, micro_batch: int, search: _Search, request: _Request) -> None:
        """A batch of one row need not do what larger ones do: look at this very size."""
        search.micro_batch = micro_batch
        search.profile = self._profile(
            request.batch,
            rows=micro_batch,
            tiles=search.profile.tiles,
            batch_size=request.batch_size,
        )
        search.timed = self._with_choosing_seconds(search.profile)

    def _with_choosing_seconds(self, profile: Profile) -> Profile:
        """With the seconds by which the micro-batch is chosen."""
        return with_computed_seconds(profile) if self._reproducible else profile

    def _rivals(self, tried: TestedPlan, batch: Any, target: int) -> Iterator[TestedPlan]:
        """A plan that holds, and others that hold and may be faster by the clock."""
        if self._reproducible:
            yield self._kept_by_measured_seconds(tried, batch, target)
            return
        yield tried
        if self._micro_batch is None and self._ahead:
            yield from self._others(tried, batch, target)

    def _others(self, tried: TestedPlan, batch: Any, target: int) -> list[TestedPlan]:
        """What a search that takes its time finds, if there was none yet; and with recomputation
        where the plan has none, without where it has some.
        """
        better = [] if self._ahead else self._more_careful(tried, batch)
        if self._micro_batch is not None:
            return better
        best = better[0] if better else tried
        if not best.plan.keeps_everything and tried.plan.keeps_everything:
            return better  # both ways are there
        find = self._recomputing if best.plan.keeps_everything else self._plain
        return [*better, *find(best, batch, target)]

    def _more_careful(self, tried: TestedPlan, batch: Any) -> list[TestedPlan]:
        """The best plan by a search that takes its time, tried out, if it is predicted to be faster
        than this one, which was found quickly.
        """
        rows = tried.plan.batch_size
        peak, seconds = predicted(tried.profile, tried.plan)
        # less by what this one's trial took beyond its prediction
        room = self.limit_bytes - max(0, tried.tested_bytes - peak)
        # a profile of a single size may know nothing of others
        for size in (None, tried.plan.micro_batch):
            with contextlib.suppress(BudgetInfeasible):
                plan = self._plan(tried.profile, int(_CAREFUL_SHARE * room), rows, size)
                if plan.step_seconds < seconds:
                    untested = dataclasses.replace(tried, plan=plan)
                    found = self._try_within_limit(untested, batch)
                    if found is not None:
                        return [found]
        return []

    def _kept_by_measured_seconds(self, tried: TestedPlan, batch: Any, target: int) -> TestedPlan:
        """The micro-batch is chosen; what to keep in it changes no bit, so that may be chosen by
        what was measured.
        """
        size = tried.plan.micro_batch
        plan = self._plan_at(tried.profile, target, tried.plan.batch_size, size)
        if plan.micro_batch != size:
            return tried
        return self._try_within_limit(dataclasses.replace(tried, plan=plan), batch) or tried

    def _profile(
        self,
        batch: Any,
        *,
        rows: int | None = None,
        tiles: Tiles | None = None,
        batch_size: int = 0,
        memory_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> Profile:
        """What a step does, in these tiles; `batch_size` is how many rows a step has, 0 if that is
        open. With less memory than the budget, fewer rows are measured.

        Raises:
            PastLimit: it would have taken more than `most_bytes`.
        """
        tiled = " in tiles of tokens" if tiles is not None else ""
        self._progress.begin(f"measuring a step's operations{tiled}")
        loss_fn = with_tiles(self._loss_fn, tiles)
        step = MeasuredStep(self._model, loss_fn, batch, self._optimizer, self.runner.split)
        is_open = by_the_way = False

        def measure(limit_bytes: int) -> list[Profile]:
            nonlocal is_open, by_the_way
            bandwidth = self._host_bandwidth()
            is_open = self.additivity is None and self._is_never_cut(batch, batch_size, loss_fn)
            limits = MeasuringLimits(
                limit_bytes,
                rows,
                bandwidth,
                meter_below(most_bytes),
                self._least_rows(batch),
                shares_passes=not self._ahead and self._micro_batch is None and self.exact,
            )
            by_the_way = limits.shares_passes and self.additivity is None
            with refusing(0):
                return measure_sizes(step, limits, Additivity(None) if is_open else self.additivity)

        # where there is less memory than the budget says, with as few rows as can be
        found = self._where_memory_lasts(measure, (memory_bytes or self.limit_bytes, 1))
        if not is_open:
            self.additivity = found[0].additivity
        measured, *others = [self._as_run_here(one, tiles) for one in found]
        self._measured = _Measured(measured, others, by_the_way)
        return measured

    def _as_run_here(self, measured: Profile, tiles: Tiles | None) -> Profile:
        """What was measured, with what only this step knows."""
        bursts = [self._update_burst(measured, way.burst_bytes) for way in measured.update_ways]
        measured = dataclasses.replace(
            measured,
            tiles=tiles,
            additivity=self.additivity,
            splittable=self._is_splittable(measured),
            optimizer_burst_bytes=self._update_burst(measured, measured.optimizer_burst_bytes),
            # somebody else's step is not run in groups
            update_ways=with_bursts(measured.update_ways, bursts)
            if self._updates_in_groups
            else (),
        )
        is_first = tiles is None and not self._plans
        return (fix_by_name if is_first else fix_known_names)(measured, self._named)

    def _where_memory_lasts(
        self, run: Callable[[_Way], _Found], ways: Sequence[_Way], *, doing: str = "was measured"
    ) -> _Found:
        """What `run` gives for the first of these ways for which memory does not run out.

        Raises:
            BudgetInfeasible: it does for all of them.
        """
        for way in ways:
            try:
                return run(way)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold tensors
            drop_gradients(self._model)
            free_cached_memory()
        least = (self.limit_bytes * 11 // 10) + self._own_bytes + self.reserved_bytes
        raise BudgetInfeasible(
            f"Memory ran out while a step {doing}, below the budget of"
            f" {format_bytes(self.budget_bytes)}: there is less of it than that, or a cap on it."
            " Nothing was changed. Free some, or lower the batch size and `memory`.",
            min_bytes=least,
        )

    def _host_bandwidth(self) -> float:
        """Bytes a second to the host, where values may be moved there."""
        if not self._offload:
            return 0.0
        device = next(self._model.parameters()).device
        return measure_bandwidth(device, min(16 << 20, 1024 + self.limit_bytes // 8))

    def _is_splittable(self, profile: Profile) -> bool:
        """Whether a batch is cut: as it was asked for, or as it was measured."""
        if self._whole:
            return False
        return profile.splittable if self.exact else True

    def _least_rows(self, batch: Any) -> int | None:
        """How many rows are run at once in any case; None: as it is measured."""
        if self._whole or self._micro_batch is not None:
            rows = self.rows(batch)
            return rows if self._whole else min(rows, self._micro_batch or rows)
        return None if self.exact else 1

    def _is_never_cut(self, batch: Any, batch_size: int, loss_fn: LossFunction) -> bool:
        """Whether how parts add up need not be known, which takes many forwards to measure: the
        step is one row, it is ours alone, and the loss says no count, which might be a wrong one.
        """
        if not self._copies or distributed.is_running() or not self._is_one_row(batch, batch_size):
            return False
        if self._has_count is None:
            with untouched(self._model):
                self._has_count = has_count(self._model, loss_fn, batch)
        return not self._has_count

    def _is_one_row(self, batch: Any, batch_size: int) -> bool:
        return batch_size == 1 and self.rows(batch) <= 1

    def _plan(
        self,
        profile: Profile,
        limit_bytes: int,
        batch_size: int,
        micro_batch: int | None = None,
        *,
        quickly: bool = False,
    ) -> Plan:
        """The best plan, or about that; at this very micro-batch, or at the one that was asked for,
        if any.
        """
        if self._micro_batch is not None:
            micro_batch = self._asked_size(self._micro_batch, batch_size, profile)
        self._progress.begin(f"planning for {format_bytes(limit_bytes)}")
        return plan_for_fit(
            profile,
            memory=limit_bytes,
            batch_size=batch_size,
            micro_batch=micro_batch,
            quickly=quickly,
        )

    def _asked_size(self, micro_batch: int, batch_size: int, profile: Profile) -> int:
        """The micro-batch that was asked for, if the batch may be cut."""
        if micro_batch < batch_size and not profile.splittable:
            raise MisuseError(
                f"micro_batch={micro_batch} cuts the batch of {batch_size}, and its loss"
                f" does not add up: {self._why_whole()}. Leave micro_batch out, or pass"
                " exact=False to cut all the same."
            )
        return min(micro_batch, batch_size)

    def _plan_at(
        self, profile: Profile, limit_bytes: int, batch_size: int, micro_batch: int
    ) -> Plan:
        """The plan for this very micro-batch if it can be, else for any."""
        try:
            return self._plan(profile, limit_bytes, batch_size, min(micro_batch, batch_size))
        except BudgetInfeasible:
            return self._plan(profile, limit_bytes, batch_size)

    def _may_cut(self, profile: Profile) -> bool:
        return profile.splittable and self._micro_batch is None

    def _why_whole(self) -> str:
        additivity = self.additivity
        if additivity is None or additivity.adds_up:
            return "micro_batch='whole'"
        return f"relative error {additivity.error:.2g} on a few rows; {additivity.reason}"

    @property
    def _updates_in_groups(self) -> bool:
        """Whether the update may be run over groups of parameters: it is ours, and no gradient is
        sparse.
        """
        return self._copies and not any(
            getattr(module, "sparse", False) for module in self._model.modules()
        )

    def _update_burst(self, profile: Profile, burst_bytes: int) -> int:
        """What an update takes for a moment where the optimizer's temporaries are so large."""
        return max(burst_bytes + self._widening_bytes(profile, burst_bytes), self.reduce_bytes)

    def _widening_bytes(self, profile: Profile, burst_bytes: int) -> int:
        """What a step takes more if parameters and state are widened for it, and its temporaries
        are as wide.
        """
        trained = _trained(self._model)
        if self._wide is None or not trained:
            return 0
        sized = [(local_part(p).nbytes, _widened_by(p.dtype, self._wide)) for p in trained]
        copies = sum(size * ratio for size, ratio in sized if ratio > 1)
        wider = sum(size * (ratio - 1) for size, ratio in sized)
        states = profile.optimizer_bytes * wider / _local_bytes(trained)
        most = max(ratio for _, ratio in sized)
        return round(copies + states + burst_bytes * (most - 1))

    def _fit_smallest(
        self, profile: Profile, request: _Request, most_bytes: int | None = None
    ) -> list[TestedPlan]:
        """The plan of the smallest peak.

        What is named, and taken where nothing else holds, is the plan of a profile that is measured
        in as little memory as can be, by seconds that are the same in every run: so `min_bytes` is
        always enough. Another profile's smallest plan takes other bytes, or other segments, and
        which sizes it is of depends on the budget and the clock: it is taken if it holds.

        Raises:
            _Hopeless: it would take more than `most_bytes`.
            BudgetInfeasible: it takes more than the budget.
        """
        if not self._is_of_least_rows(profile):
            own = self._smallest_within_limit(profile, request)
            if own is not None:
                return [own]
            little = self._profile_of_least_rows(profile, request, most_bytes)
            with contextlib.suppress(_LeavesPlan):  # else what few rows do is not what more do
                return [self._tried_smallest(little, request, most_bytes)]
        try:
            return [self._tried_smallest(profile, request, most_bytes)]
        except _LeavesPlan:
            plan = self._smallest_plan(profile, request.batch_size)
            untested = TestedPlan(plan, profile, request.shape, 0, steady=True)
            return [self._fit_online(untested, request.batch)]

    def _is_of_least_rows(self, profile: Profile) -> bool:
        return profile.batch_size == profile.min_batch

    def _profile_of_least_rows(
        self, profile: Profile, request: _Request, most_bytes: int | None
    ) -> Profile:
        """Of the same step, whatever the budget is.

        Raises:
            _Hopeless: measuring it would take more than `most_bytes`.
        """
        try:
            little = self._profile(
                request.batch,
                tiles=profile.tiles,
                batch_size=request.batch_size,
                memory_bytes=1,
                most_bytes=most_bytes,
            )
        except PastLimit as refusal:
            raise _Hopeless(refusal.needed_bytes) from None
        measuring = max(profile.measuring_bytes, little.measuring_bytes)
        return dataclasses.replace(little, measuring_bytes=measuring)

    def _smallest_within_limit(self, profile: Profile, request: _Request) -> TestedPlan | None:
        """The smallest plan from this profile, if it holds."""
        plan = self._smallest_plan(profile, request.batch_size)
        least = max(int(plan.peak_bytes / _NEARLY), profile.measuring_bytes)
        if least > self.limit_bytes:
            return None
        untested = TestedPlan(plan, profile, request.shape, 0, steady=True)
        return self._try_within_limit(untested, request.batch)

    def _tried_smallest(
        self, profile: Profile, request: _Request, most_bytes: int | None
    ) -> TestedPlan:
        """The smallest plan from this profile, if it holds.

        Raises:
            _Hopeless: it would take more than `most_bytes`.
            BudgetInfeasible: it does not hold.
            _LeavesPlan: the forward leaves it.
        """
        plan = self._smallest_plan(profile, request.batch_size)
        untested = TestedPlan(plan, profile, request.shape, 0, steady=True)
        tried = self._try_out(untested, request.batch, most_bytes=most_bytes)
        if tried is None:
            raise _LeavesPlan
        if most_bytes is not None and tried.peak_bytes > most_bytes:
            raise _Hopeless(max(tried.peak_bytes, profile.measuring_bytes))
        if max(tried.peak_bytes, profile.measuring_bytes) <= self.limit_bytes:
            return tried
        # Not less than what is planned for: below that, what the clock says could not choose among
        # plans.
        least = max(tried.peak_bytes, plan.peak_bytes, profile.measuring_bytes)
        raise self._infeasible(tried.plan, least, cut=profile.splittable)

    def _smallest_plan(self, profile: Profile, batch_size: int) -> Plan:
        timed = with_computed_seconds(profile)
        try:
            return self._plan(timed, 1, batch_size)
        except BudgetInfeasible as smallest:
            return self._plan(timed, smallest.min_bytes, batch_size)

    def _fit_online(self, untested: TestedPlan, batch: Any) -> TestedPlan:
        """The operations depend on the data, so no plan can name them: evict online, in
        micro-batches that fit.
        """
        plan = dataclasses.replace(
            untested.plan, online=f"{self._trials.left}. The data decide what the forward does"
        )
        untested = dataclasses.replace(untested, plan=plan, steady=False)
        profile = untested.profile
        while True:
            tried = self._try_out_online(untested, batch, self.limit_bytes)
            if max(tried.peak_bytes, profile.measuring_bytes) <= self.limit_bytes:
                return tried
            if untested.plan.micro_batch <= profile.min_batch or not self._may_cut(profile):
                raise self._infeasible_online(untested, batch, tried.peak_bytes)
            plan = smaller(untested.plan, profile.min_batch)
            untested = dataclasses.replace(untested, plan=plan)

    def _infeasible_online(
        self, untested: TestedPlan, batch: Any, peak_bytes: int
    ) -> BudgetInfeasible:
        # With a little more: what is evicted depends on the clock, and what is routed where on the
        # weights.
        least = int(self._smallest_online(untested, batch, peak_bytes) * _ONLINE_MARGIN)
        least = max(least, untested.profile.measuring_bytes)
        return self._infeasible(untested.plan, least, cut=untested.profile.splittable)

    def _smallest_online(self, untested: TestedPlan, batch: Any, below: int) -> int:
        """The smallest limit that is held, to a hundredth; `below` is not."""
        below, above = self._bounds_online(untested, batch, below)
        while above > below * 1.01 + 64:
            middle = (below + above) // 2
            held = self._try_out_online(untested, batch, middle).peak_bytes <= middle
            below, above = (below, middle) if held else (middle, above)
        return above

    def _bounds_online(self, untested: TestedPlan, batch: Any, below: int) -> tuple[int, int]:
        """A limit that is not held, and one that is: in growing steps above the first."""
        growth = 1.01
        while True:
            above = int(below * growth)
            tried = self._try_out_online(untested, batch, above)
            if tried.peak_bytes <= above:
                return below, above
            below, growth = max(tried.peak_bytes, above), 2 * growth - 1

    def _try_out_online(self, untested: TestedPlan, batch: Any, limit_bytes: int) -> TestedPlan:
        """Eviction depends on timing; a limit counts as held if one of a few tries holds it.

        If none does, the peak is what one operation needed beside what cannot be dropped, at least.
        """
        tries = []
        for _ in range(_TRIES_ONLINE):
            tried = self._try_out(untested, batch, online_bytes=limit_bytes)
            if tried is None:  # memory ran out before the limit was reached
                tried = dataclasses.replace(untested, peak_bytes=limit_bytes * 11 // 10)
            if tried.peak_bytes <= limit_bytes:
                return tried
            tries.append(tried)
        return min(tries, key=lambda one: one.peak_bytes)

    def _infeasible(self, plan: Plan, least: int, *, cut: bool) -> BudgetInfeasible:
        parts = self._parts_of_least(plan, least)
        least += self._own_bytes + self.reserved_bytes
        listed = ", ".join(
            f"{name} {format_bytes(size)}"
            for name, size in sorted(parts.items(), key=_size)
            if size
        )
        return BudgetInfeasible(
            f"Smallest feasible peak is {format_bytes(least)} ({listed}) at micro-batch"
            f" {plan.micro_batch}, the budget is {format_bytes(self.budget_bytes)}. Raise `memory`"
            f" to at least {least} bytes, {self._hint(plan, cut=cut)}{fixed_text(plan)}",
            min_bytes=least,
            breakdown=parts,
        )

    def _parts_of_least(self, plan: Plan, least: int) -> dict[str, int]:
        """What takes the bytes of the smallest budget."""
        parts = {name: count for name, count in plan.breakdown.items() if count}
        if plan.reserved_bytes > plan.peak_bytes:
            parts["segments of the device's allocator, beyond their tensors"] = (
                plan.reserved_bytes - plan.peak_bytes
            )
        planned = max(plan.peak_bytes, plan.reserved_bytes)
        if least > planned:  # what only measuring shows
            parts["measuring a few rows, before the first step"] = least - planned
        return parts | {
            "copies of buffers": self._own_bytes,
            "communication buckets": self.reserved_bytes,
        }

    def _hint(self, plan: Plan, *, cut: bool) -> str:
        """What can be done beside raising the budget."""
        if not cut and plan.batch_size > 1:
            hint = (
                f"or lower the batch size. The batch of {plan.batch_size} is not cut:"
                f" {self._why_whole()}."
            )
            return hint if self._whole else f"{hint} exact=False cuts it all the same."
        if self._micro_batch is not None and plan.micro_batch > 1:
            return "or leave out micro_batch, so that it can be smaller."
        return "or make the model or an item of the batch smaller."

    def _weights_of(self, batch_size: int) -> BatchWeights:
        return BatchWeights(self.additivity, batch_size, exact=self.exact)

    def _try_within_limit(self, untested: TestedPlan, batch: Any) -> TestedPlan | None:
        """As `_try_out`; None if it does not hold the budget, too."""
        tried = self._try_out(untested, batch, most_bytes=self.limit_bytes)
        return None if tried is None or tried.peak_bytes > self.limit_bytes else tried

    def _try_out(
        self,
        untested: TestedPlan,
        batch: Any,
        *,
        online_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> TestedPlan | None:
        """As `Trials.try_out`."""
        self._progress.begin(f"trying out a plan, micro-batch {untested.plan.micro_batch}")
        return self._trials.try_out(
            untested, batch, online_bytes=online_bytes, most_bytes=most_bytes
        )

    def _fastest(self, ways: list[TestedPlan], batch: Any) -> TestedPlan:
        """By the clock, whose seconds it then has.

        Plans with and without recomputation are too unlike for a prediction: one pays for recording
        and replaying, the other for more passes.
        """
        ways = [one for one in ways if one.steady] or ways[:1]
        if not ways[0].steady or not self._ahead:
            return ways[0]
        self._progress.begin("timing a plan" if len(ways) == 1 else f"timing {len(ways)} plans")
        parts = [next(iter(self.runner.cut(batch, one.plan.micro_batch))) for one in ways]
        with untouched(self._model):
            try:
                return min(
                    self._timed(list(zip(ways, parts, strict=True))),
                    key=lambda one: one.plan.step_seconds,
                )
            except Exception as error:
                if not _is_left_to_the_step(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            drop_gradients(self._model)
        free_cached_memory()
        return ways[0]

    def _plain(self, tested: TestedPlan, batch: Any, target: int) -> list[TestedPlan]:
        """The largest micro-batch without recomputation, tried out, if there is one."""
        # With some room: the profile may be of another size, and not even a trial may pass the
        # budget.
        rows, room = tested.plan.batch_size, int(0.95 * target)
        profile = updates_within(tested.profile, room, rows)[0]
        plan = plain_plan(profile, memory=room, batch_size=rows)
        largest: list[TestedPlan] = []
        while plan is not None:
            tried = self._try_within_limit(dataclasses.replace(tested, plan=plan), batch)
            if tried is None:
                break
            largest = [tried]
            # Then without: the room is used up.
            plan = self._plain_in_what_is_left(tried)
        return largest

    def _plain_in_what_is_left(self, tried: TestedPlan) -> Plan | None:
        """A larger micro-batch in all of the budget: each row more takes no more than one of those
        that were measured took.
        """
        rows, size = tried.plan.batch_size, tried.plan.micro_batch
        profile = tried.profile.updating(tried.plan.update_groups)
        static = profile.at(size, rows=rows).static_bytes
        most = int((self.limit_bytes - static) * size / max(1, tried.peak_bytes - static))
        most = even(rows, min(most, rows))
        if size >= most:
            return None
        return plain_plan(profile, memory=self.limit_bytes, batch_size=rows, micro_batch=most)

    def _recomputing(self, tested: TestedPlan, batch: Any, target: int) -> list[TestedPlan]:
        """The best larger micro-batch, with recomputation, tried out, if it can be as fast."""
        rows, size = tested.plan.batch_size, tested.plan.micro_batch
        if size == rows:
            return []
        room = int(0.95 * target)
        plan = recomputing_plan(
            updates_within(tested.profile, room, rows)[0],
            memory=room,
            batch_size=rows,
            above=size,
            most_seconds=_DOUBT * tested.plan.step_seconds,
        )
        if plan is None:
            return []
        tried = self._try_within_limit(dataclasses.replace(tested, plan=plan), batch)
        return [] if tried is None else [tried]

    def _timed(self, ways: list[tuple[TestedPlan, Any]]) -> Iterator[TestedPlan]:
        """With the seconds that passes of these micro-batches take here and now, each in its turn:
        a machine that is slower for a while is so for all of them. What was measured before is only
        a hint."""
        race = self._run_race(ways)
        drop_gradients(self._model)
        for place, (tested, _) in enumerate(ways):
            updating = tested.profile.updating(tested.plan.update_groups)
            seconds = race.step_seconds(place) + updating.optimizer_seconds
            yield dataclasses.replace(tested, plan=tested.plan.with_step_seconds(seconds))

    def _run_race(self, ways: list[tuple[TestedPlan, Any]]) -> Race:
        passes = [tested.plan.batch_size / self.runner.rows(part) for tested, part in ways]
        race = Race(passes, together=distributed.is_running())
        while not race.is_over:
            for place in race.running:
                race.add(place, self._pass_seconds(*ways[place]))
            race.drop_slow()
        return race

    def _pass_seconds(self, tested: TestedPlan, part: Any) -> float:
        """Of a pass as most of its step are: if it has several, not the first one, into gradients
        that are there.
        """
        alone = tested.plan.steps == 1
        if alone:
            drop_gradients(self._model)
        started = seconds_now()
        loss = self.runner.forward(Part(0, 0, part), Planned(tested, first=alone)).loss
        torch.autograd.backward(loss)
        wait_for(self._devices)
        return seconds_now() - started


def _keeps_whole_batch(plan: Plan) -> bool:
    """Whether a step is one plain pass."""
    return plan.keeps_everything and plan.steps == 1


def _takes_the_place_of(new: TestedPlan, old: TestedPlan) -> bool:
    """Whether both are for the same shape, and the same operations, if those are always the
    same; or one was only found by arithmetic.
    """
    if old.by_size and not new.by_size and covers(old.shape, new.shape):
        return True  # it was for the time until then
    if new.shape != old.shape:
        return False
    return not old.steady or old.plan.operations == new.plan.operations


def _are_last_resort(tiles: Tiles | None) -> bool:
    """Whether modules are run in tiles, and so again in each backward pass: that is for where
    nothing else is enough.
    """
    return tiles is not None and bool(tiles.modules)


def _is_left_to_the_step(error: Exception) -> bool:
    """Whether a plan is not steady after all, as its step will notice; or memory ran out, for which
    a step is repeated.
    """
    return isinstance(error, Diverged) or is_out_of_memory(error)


def _may_be_beaten(tried: TestedPlan) -> bool:
    """Whether tiles may make a step much faster: nothing is faster than a batch that is run whole
    with everything kept.
    """
    plan, profile = tried.plan, tried.profile
    if distributed.is_running():  # all ranks must profile the same, and each has its own clock
        return plan.is_short
    least = profile.plain_seconds(plan.batch_size) + profile.optimizer_seconds
    return plan.is_short and plan.step_seconds > _NEARLY * least


def _size(part: tuple[str, int]) -> int:
    return -part[1]


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's parts of them."""
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _widened_by(dtype: torch.dtype, wide: torch.dtype) -> float:
    """How many times as large a number becomes."""
    return torch.promote_types(dtype, wide).itemsize / dtype.itemsize
