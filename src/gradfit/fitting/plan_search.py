"""Plans for the batches that come: one per input shape, each tried out and corrected until it
holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch import is_out_of_memory
from gradfit._torch_distributed import local_part
from gradfit._torch_fsdp import drop_gradients, units_of
from gradfit.batches.additivity import has_count
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction, MicroBatchRunner, Part
from gradfit.batches.snapshot import untouched
from gradfit.devices import counted_device, devices_of, free_cached_memory, wait_for
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.fitting.batch_rows import BatchRows
from gradfit.fitting.families import (
    PlanningTime,
    covering,
    grown,
    may_be_slow,
    with_slack,
    within_memory,
)
from gradfit.fitting.fixed_cost import nominal
from gradfit.fitting.modes import Planned, WithinLimit
from gradfit.fitting.progress import OnProgress, ProgressReport
from gradfit.fitting.race import Race
from gradfit.fitting.reserved import ReservedMemory, TrialRecord, UpdateSizes
from gradfit.fitting.tested_plan import Fitted, Shape, covered, covers, shape_of, smaller
from gradfit.fitting.update_rollback import UpdateSnapshot
from gradfit.planning.api import beginning_like, plain_plan, recomputing_plan
from gradfit.planning.api import plan as make_plan
from gradfit.planning.microbatch import even
from gradfit.planning.plan import Plan
from gradfit.profiling.clock import seconds_now
from gradfit.profiling.measure import additivity_within, choose_tiles, profile
from gradfit.profiling.meter import Meter, meter
from gradfit.profiling.profile import Profile
from gradfit.profiling.tile_choices import TileChoices
from gradfit.recompute.follow_plan import Diverged, LooksAtData
from gradfit.recompute.offload import measure_bandwidth
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles
from gradfit.tree import repeat_rows
from gradfit.units import format_bytes

_TRIES = 5
_TRIES_ONLINE = 3
_ONLINE_MARGIN = 1.03  # above the smallest limit that was held online
# By how much a prediction may be above the budget, and a trial still tell; or above the least
# seconds there can be, and nobody looks further.
_NEARLY = 1.05
_DOUBT = 1.3  # by how much a prediction may be slower, and the clock is still asked
_NUMBERS_BYTES = 2048  # weights and norms of the accumulator, as scalars


class _NeedsMore(Exception):
    def __init__(self, needed_bytes: int) -> None:
        super().__init__(needed_bytes)
        self.needed_bytes = needed_bytes


class _PastLimit(_NeedsMore):
    """A trial online could not stay below its limit; at some operation it needed so many bytes."""


class _Hopeless(_NeedsMore):
    """No plan can hold the budget, by arithmetic; nothing was tried out."""


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
        wide: torch.dtype | None = None,
        copies: bool = False,
        micro_batch: int | None = None,
        whole: bool = False,
        exact: bool = True,
        tile: bool = True,
        planning_share: float = 0.05,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
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
        self._offload = offload
        self._reproducible = reproducible
        self._copy_pace = 0.0  # seconds for a byte of the copy, once it was made
        self.time = PlanningTime(planning_share)
        self._left = ""  # where the last trial left its plan
        self._sharded_choices: TileChoices | None = None
        self._has_count: bool | None = None  # the loss of one row; None before it was asked
        self._counted: BatchRows | None = None  # of a step's batch
        self._fitted: list[Fitted] = []
        self._used: dict[int, int] = {}  # by a plan's address: when it was last used
        self._clock = 0
        self.take_up(known)

    @property
    def known(self) -> tuple[Fitted, ...]:
        """Every plan made so far, in the order in which they are tried for a batch."""
        return tuple(self._fitted)

    def take_up(self, plans: Iterable[Fitted]) -> None:
        """Go by these plans from now on, and by what was measured of the loss when they were
        made.
        """
        self._fitted = [with_slack(plan, self.limit_bytes) for plan in plans]
        if self._fitted:
            self.additivity = self._fitted[0].profile.additivity

    def parts(self, batch: Any, micro_batch: int) -> Iterable[Any]:
        """The batch in micro-batches."""
        return self.runner.cut(batch, micro_batch)

    def rows(self, batch: Any) -> int:
        """How many rows the batch has."""
        if self._counted is not None and self._counted.batch is batch:
            return self._counted.exact
        return self.runner.rows(batch)

    @contextlib.contextmanager
    def counting(self, batch: Any) -> Iterator[BatchRows]:
        """The rows of the batch, which inside are counted once, or not at all where that need not
        be.
        """
        self._counted = BatchRows(self.runner, batch)
        try:
            yield self._counted
        finally:
            self._counted = None

    def rows_at_most(self, rows: BatchRows) -> int:
        """The rows of a batch; or, where they would have to be counted and a plan that keeps
        everything serves it whole, no more than that one is for.
        """
        if rows.is_counted:
            return rows.exact
        shape = self.shape(rows.batch)
        sizes = [
            known.plan.batch_size
            for known in self._fitted
            if known.plan.keeps_everything and known.plan.steps == 1 and covers(known.shape, shape)
        ]
        return rows.at_most(max(sizes, default=None))

    def shape(self, batch: Any) -> Shape:
        """By which a batch's plans are found."""
        return shape_of(batch, rows=self.runner.split is not None)

    def fitted(self, batch: Any, batch_size: int) -> Fitted:
        """A plan for batches of this shape: one made before for this shape or a larger one, or a
        new one.
        """
        shape = self.shape(batch)
        # plans of single rows, or from a version that did not measure it
        if self._fitted and self.additivity is None and (batch_size > 1 or self.rows(batch) > 1):
            with untouched(self._model) as before:
                self.additivity = additivity_within(
                    self._model,
                    self._loss_fn,
                    batch,
                    self.runner.split,
                    self.limit_bytes,
                    before.rewind,
                )
        serving = [known for known in self._fitted if self._holds(known)]
        larger = covering(serving, shape, batch_size)
        found = None
        if larger:
            found = None if self._wants_own(larger[0], shape, batch_size) else larger[0]
        elif not distributed.is_running():  # where ranks run forwards, and so plan, together
            by_size = grown(serving, shape, batch_size, self.limit_bytes)
            found = None if by_size is None else self._remember(by_size)
        if found is None:
            with self.time.planning() if self._fitted else contextlib.nullcontext():
                found = self._add(self._fit(batch, batch_size, shape, self.limit_bytes))
        self._used[id(found)] = self._clock = self._clock + 1
        return found

    def serving(self, batch: Any, batch_size: int) -> Fitted | None:
        """The plan that `fitted` would give, if it was made before and nothing need be measured."""
        shape = self.shape(batch)
        known = covering([one for one in self._fitted if self._holds(one)], shape, batch_size)
        if self.additivity is None or not known or self._wants_own(known[0], shape, batch_size):
            return None
        self._used[id(known[0])] = self._clock = self._clock + 1
        return known[0]

    def _wants_own(self, larger: Fitted, shape: Shape, batch_size: int) -> bool:
        """Whether batches of this shape should have a plan of their own, and there is time to make
        it.
        """
        return (
            not self._reproducible
            and not distributed.is_running()
            and may_be_slow(larger, shape, batch_size)
            and self.time.is_left
        )

    def outgrown(self, fitted: Fitted, batch: Any) -> Fitted:
        """A plan of its own for a batch that is too large for one that arithmetic had found for
        it.
        """
        self._fitted = [known for known in self._fitted if known is not fitted]
        with self.time.planning():
            return self._add(
                self._fit(batch, self.rows(batch), self.shape(batch), self.limit_bytes)
            )

    def _holds(self, known: Fitted) -> bool:
        """Whether a plan is one for this budget: it may come from a step with a larger one, or from
        another loss.
        """
        may_cut = not self.exact or self.additivity is None or self.additivity.adds_up
        return self._within_budget(known) and (may_cut or known.plan.steps == 1)

    def _add(self, found: Fitted) -> Fitted:
        """Take in a plan that was tried out, in the place of one for the same shape and the same
        operations.
        """
        found = with_slack(
            dataclasses.replace(found, tested_bytes=found.peak_bytes), self.limit_bytes
        )
        found = self._covered(found, self.limit_bytes)
        found = dataclasses.replace(
            found, plan=dataclasses.replace(found.plan, budget_bytes=self.budget_bytes)
        )
        return self._remember(found)

    def _remember(self, found: Fitted) -> Fitted:
        kept = [
            known
            for known in self._fitted
            if known.shape != found.shape
            or (known.steady and known.plan.operations != found.plan.operations)
        ]
        kept = within_memory(kept, self._used)
        self._fitted = sorted([*kept, found], key=lambda known: known.plan.peak_bytes)
        self._used = {id(known): self._used.get(id(known), 0) for known in self._fitted}
        return found

    def plan_of_part(self, part: Any, fitted: Fitted) -> Fitted | None:
        """A plan for what this micro-batch does, where another one of its size was planned for;
        None if there is none.

        Raises:
            BudgetInfeasible: only a smaller micro-batch could do that.
        """
        with self._progress.running():
            return self._plan_of_part(part, fitted)

    def _plan_of_part(self, part: Any, fitted: Fitted) -> Fitted | None:
        plan = fitted.plan
        found = self._profile(part, rows=self.rows(part), tiles=plan.tiles)
        made = self._plan(found, self.limit_bytes, plan.batch_size, plan.micro_batch)
        # Best one that begins as the other does, so that a forward can go over from one to the
        # other.
        for candidate in (beginning_like(found, made, plan), made):
            if candidate is not None:
                tried = self._try_out(Fitted(candidate, found, fitted.shape, 0, steady=True), part)
                if tried is not None and tried.peak_bytes <= self.limit_bytes:
                    return self._add(tried)
        return None

    def _within_budget(self, known: Fitted) -> bool:
        """Whether its measured peak is within the budget. A real step's has in it what a trial does
        not hold.
        """
        has_stepped = known.seen_bytes > 0
        return known.peak_bytes <= (
            self.budget_bytes - self.reserved_bytes if has_stepped else self.limit_bytes
        )

    def tighter(self, fitted: Fitted, share: float = 0.9) -> Fitted:
        """A plan that needs less than this one did, at the same micro-batch while there is one.

        Where this one is the smallest there is, it is that one again: memory may have run out for
        another's sake.

        Args:
            fitted: the plan that memory ran out with.
            share: of what it needed.
        """
        plan = fitted.plan
        if not fitted.steady:
            if self._may_cut(fitted.profile):
                plan = smaller(plan, fitted.profile.min_batch)
            return self.replace(fitted, plan=plan, seen=False)
        limit = int(min(fitted.peak_bytes, self.limit_bytes) * share)
        try:
            plan = self._plan_at(fitted.profile, limit, plan.batch_size, plan.micro_batch)
        except BudgetInfeasible as smallest:
            if smallest.min_bytes < plan.peak_bytes:
                plan = self._plan(fitted.profile, smallest.min_bytes, plan.batch_size)
        made = dataclasses.replace(
            fitted, plan=plan, peak_bytes=plan.peak_bytes, saved_bytes=None, seen=False,
            copied=False, slack=1.0, tested_bytes=0, reserved_bytes=0, copied_reserved_bytes=0,
        )  # fmt: skip
        return self.replace(fitted, **vars(self._covered(made, limit)))

    def _covered(self, fitted: Fitted, limit_bytes: int) -> Fitted:
        if not self._copies:
            return fitted
        changed = sum(local_part(p).nbytes for p in self._model.parameters() if p.requires_grad)
        copied = changed + fitted.profile.optimizer_bytes
        made = covered(fitted, copied, limit_bytes)
        if not made.copied or not changed:
            return made
        if not self._copy_pace:
            seconds = min(self._copy_seconds() for _ in range(2))
            self._copy_pace = seconds / (changed + _state_bytes(self._optimizer))
        return dataclasses.replace(
            made, plan=made.plan.with_extra_seconds(copied * self._copy_pace)
        )

    def _copy_seconds(self) -> float:
        wait_for(self._devices)
        started = seconds_now()
        with UpdateSnapshot(self._model.parameters(), self._optimizer, taken=True):
            wait_for(self._devices)
            return seconds_now() - started

    def has_optimizer_state(self, fitted: Fitted) -> bool:
        """Whether the optimizer holds by now all that it will hold."""
        return _state_bytes(self._optimizer) >= fitted.profile.optimizer_bytes

    def replace(self, old: Fitted, **changes: Any) -> Fitted:
        """Remember what a step has taught about a plan."""
        new = dataclasses.replace(old, **changes)
        self._used[id(new)] = self._used.pop(id(old), 0)
        self._fitted = [new if known is old else known for known in self._fitted]
        return new

    def _fit(self, batch: Any, batch_size: int, shape: Shape, limit_bytes: int) -> Fitted:
        with self._progress.running():
            return self._best(batch, batch_size, shape, limit_bytes)

    def _best(self, batch: Any, batch_size: int, shape: Shape, limit_bytes: int) -> Fitted:
        """The best tested plan of those without tiles and those with."""
        choices = self._tile_choices(batch) if self._tile else TileChoices()
        tried: list[Fitted] = []  # all that hold the budget, timed together
        failed: list[tuple[int, Profile, BudgetInfeasible | None]] = []
        for tiles in self._worth_trying(choices):
            if tried and tiles is not None and tiles.modules:
                break  # these run again in each backward pass: where nothing else is enough
            found = self._profile(batch, tiles=tiles, batch_size=batch_size)
            try:
                tried += self._fit_as(found, batch, batch_size, shape, limit_bytes)
            except _Hopeless as least:
                failed.append((least.needed_bytes, found, None))
            except BudgetInfeasible as error:
                failed.append((error.min_bytes, found, error))
            if tried and (self._reproducible or not _may_be_beaten(tried[0])):
                break
        if tried:
            return self._fastest(tried, batch)
        _, found, measured = min(failed, key=lambda one: one[0])
        if measured is None:
            # Only the smallest of all is tried out: what it takes is the smallest budget.
            try:
                ways = self._fit_smallest(found, batch, batch_size, shape, limit_bytes)
                return self._fastest(ways, batch)
            except BudgetInfeasible as error:
                measured = error
        raise measured if self._tile else self._with_tiles_named(measured, batch, batch_size)

    def _worth_trying(self, choices: TileChoices) -> list[Tiles | None]:
        """Without tiles first, unless one row's logits alone, of which three are there at once,
        pass the budget.
        """
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        least = 2 * sum(local_part(p).nbytes for p in parameters) + 3 * choices.whole_bytes
        return (
            [*choices.tiles]
            if choices.tiles and least > self.limit_bytes
            else [None, *choices.tiles]
        )

    def _tile_choices(self, batch: Any) -> TileChoices:
        if not units_of(self._model):
            return choose_tiles(self._model, self._loss_fn, batch, self.runner.split)
        # FSDP2 gathers in every forward, from all ranks: looked for once, when all of them fit.
        if self._sharded_choices is None:
            self._sharded_choices = choose_tiles(
                self._model, self._loss_fn, batch, self.runner.split
            )
        return self._sharded_choices

    def _with_tiles_named(
        self, error: BudgetInfeasible, batch: Any, batch_size: int
    ) -> BudgetInfeasible:
        """What the smallest budget would be with tiles, if that is less."""
        least = error.min_bytes
        for tiles in self._tile_choices(batch).tiles:
            try:
                self._plan(self._profile(batch, tiles=tiles), 1, batch_size)
            except BudgetInfeasible as smallest:
                least = min(least, smallest.min_bytes + self._own_bytes + self.reserved_bytes)
        if least >= error.min_bytes:
            return error
        text = f"{error} With tile=True, about {format_bytes(least)} would be enough."
        return BudgetInfeasible(text, min_bytes=error.min_bytes, breakdown=error.breakdown)

    def _fit_as(
        self, found: Profile, batch: Any, batch_size: int, shape: Shape, limit_bytes: int
    ) -> list[Fitted]:
        """Tested plans from this profile, the one that is predicted to be the fastest first.

        Raises:
            _Hopeless: there is none, by arithmetic.
            BudgetInfeasible: there is none, as measured.
        """
        timed = nominal(found) if self._reproducible else found
        target, size = limit_bytes, None
        least = found.measuring_bytes
        for _ in range(_TRIES if found.measuring_bytes <= limit_bytes else 0):
            try:
                plan = self._plan(timed, target, batch_size, size)
            except BudgetInfeasible as error:
                least = max(least, error.min_bytes)
                break
            made = Fitted(plan, found, shape, 0, steady=True)
            tried = self._try_out(made, batch)
            if tried is None:
                if plan.micro_batch == found.batch_size or plan.micro_batch > self.rows(batch):
                    return [self._fit_online(made, batch, limit_bytes)]
                # a batch of one row need not do what larger ones do: look at this very size
                size = plan.micro_batch
                found = self._profile(batch, rows=size, tiles=found.tiles, batch_size=batch_size)
                timed = nominal(found) if self._reproducible else found
                continue
            if tried.peak_bytes <= limit_bytes:
                return [*self._rivals(tried, batch, target, limit_bytes)]
            target = min(target, plan.peak_bytes) - (tried.peak_bytes - limit_bytes)
            if target <= 0:
                break
        if least > _NEARLY * limit_bytes:
            raise _Hopeless(least)
        return self._fit_smallest(found, batch, batch_size, shape, limit_bytes)

    def _rivals(self, tried: Fitted, batch: Any, target: int, limit_bytes: int) -> Iterator[Fitted]:
        """A plan that holds, and others that hold and may be faster by the clock."""
        plan = tried.plan
        if self._reproducible:
            # The micro-batch is chosen; what to keep in it changes no bit, so that may be chosen by
            # what was measured.
            size = plan.micro_batch
            other = self._plan_at(tried.profile, target, plan.batch_size, size)
            again = (
                self._try_out(dataclasses.replace(tried, plan=other), batch)
                if other.micro_batch == size
                else None
            )
            holds = again is not None and again.peak_bytes <= limit_bytes
            yield again if again is not None and holds else tried
            return
        yield tried
        if self._micro_batch is None:
            others = self._recomputing if plan.keeps_everything else self._plain
            yield from others(tried, batch, target, limit_bytes)

    def _profile(
        self,
        batch: Any,
        *,
        rows: int | None = None,
        tiles: Tiles | None = None,
        batch_size: int = 0,
    ) -> Profile:
        """What a step does, in these tiles; `batch_size` is how many rows a step has, 0 if that is
        open.
        """
        tiled = " in tiles of tokens" if tiles is not None else ""
        self._progress.begin(f"measuring a step's operations{tiled}")
        bandwidth = 0.0
        if self._offload:
            device = next(self._model.parameters()).device
            bandwidth = measure_bandwidth(device, min(16 << 20, 1024 + self.limit_bytes // 8))
        loss_fn = with_tiles(self._loss_fn, tiles)
        is_open = self.additivity is None and self._is_never_cut(batch, batch_size, loss_fn)
        found = profile(
            self._model,
            loss_fn,
            batch,
            self._optimizer,
            memory_bytes=self.limit_bytes,
            rows=rows,
            split=self.runner.split,
            host_bandwidth=bandwidth,
            additivity=Additivity(None) if is_open else self.additivity,
            tile=False,
        )
        if not is_open:
            self.additivity = found.additivity
        found = dataclasses.replace(found, tiles=tiles, additivity=self.additivity)
        if self._whole:
            found = dataclasses.replace(found, splittable=False)
        elif not self.exact:
            found = dataclasses.replace(found, splittable=True)
        burst = max(found.optimizer_burst_bytes + self._widening_bytes(found), self.reduce_bytes)
        return dataclasses.replace(found, optimizer_burst_bytes=burst)

    def _is_never_cut(self, batch: Any, batch_size: int, loss_fn: LossFunction) -> bool:
        """Whether how parts add up need not be known, which takes many forwards to measure: the
        step is one row, it is ours alone, and the loss says no count, which might be a wrong one.
        """
        if not self._copies or batch_size != 1 or distributed.is_running() or self.rows(batch) > 1:
            return False
        if self._has_count is None:
            with untouched(self._model):
                self._has_count = has_count(self._model, loss_fn, batch)
        return not self._has_count

    def _plan(
        self, found: Profile, limit_bytes: int, batch_size: int, micro_batch: int | None = None
    ) -> Plan:
        """The best plan; at this very micro-batch, or at the one that was asked for, if any."""
        size = micro_batch
        if self._micro_batch is not None:
            size = min(self._micro_batch, batch_size)
            if size < batch_size and not found.splittable:
                raise MisuseError(
                    f"micro_batch={self._micro_batch} cuts the batch of {batch_size}, and its loss"
                    f" does not add up: {self._why_whole()}. Leave micro_batch out, or pass"
                    " exact=False to cut all the same."
                )
        self._progress.begin(f"planning for {format_bytes(limit_bytes)}")
        return make_plan(found, memory=limit_bytes, batch_size=batch_size, micro_batch=size)

    def _plan_at(self, found: Profile, limit_bytes: int, batch_size: int, micro_batch: int) -> Plan:
        """The plan for this very micro-batch if it can be, else for any."""
        try:
            return self._plan(found, limit_bytes, batch_size, min(micro_batch, batch_size))
        except BudgetInfeasible:
            return self._plan(found, limit_bytes, batch_size)

    def _may_cut(self, found: Profile) -> bool:
        return found.splittable and self._micro_batch is None

    def _why_whole(self) -> str:
        additivity = self.additivity
        if additivity is None or additivity.adds_up:
            return "micro_batch='whole'"
        return f"relative error {additivity.error:.2g} on a few rows; {additivity.reason}"

    def _widening_bytes(self, found: Profile) -> int:
        """What a step takes more if parameters and state are widened for it, and its temporaries
        are as wide.
        """
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if self._wide is None or not trained:
            return 0
        sizes = [local_part(p).nbytes for p in trained]
        ratios = [
            torch.promote_types(p.dtype, self._wide).itemsize / p.dtype.itemsize for p in trained
        ]
        copies = sum(size * ratio for size, ratio in zip(sizes, ratios, strict=True) if ratio > 1)
        states = (
            found.optimizer_bytes
            * sum(s * (r - 1) for s, r in zip(sizes, ratios, strict=True))
            / sum(sizes)
        )
        return round(copies + states + found.optimizer_burst_bytes * (max(ratios) - 1))

    def _fit_smallest(
        self, found: Profile, batch: Any, batch_size: int, shape: Shape, limit_bytes: int
    ) -> list[Fitted]:
        """The plan of the smallest peak, by seconds that are the same in every run: so `min_bytes`
        is always enough.
        """
        alike = nominal(found)
        try:
            plan = self._plan(alike, 1, batch_size)
        except BudgetInfeasible as smallest:
            plan = self._plan(alike, smallest.min_bytes, batch_size)
        made = Fitted(plan, found, shape, 0, steady=True)
        tried = self._try_out(made, batch)
        if tried is None:
            return [self._fit_online(made, batch, limit_bytes)]
        # Not less than what is planned for: below that, what the clock says could not choose among
        # plans.
        least = max(tried.peak_bytes, plan.peak_bytes, found.measuring_bytes)
        if max(tried.peak_bytes, found.measuring_bytes) <= limit_bytes:
            return [tried]
        raise self._infeasible(tried.plan, least, cut=found.splittable)

    def _fit_online(self, made: Fitted, batch: Any, limit_bytes: int) -> Fitted:
        """The operations depend on the data, so no plan can name them: evict online, in
        micro-batches that fit.
        """
        plan = dataclasses.replace(
            made.plan, online=f"{self._left}. The data decide what the forward does"
        )
        made = dataclasses.replace(made, plan=plan, steady=False)
        while (
            tried := self._try_out_online(made, batch, limit_bytes)
        ).peak_bytes > limit_bytes or made.profile.measuring_bytes > limit_bytes:
            if made.plan.micro_batch <= made.profile.min_batch or not self._may_cut(made.profile):
                # With a little more: what is evicted depends on the clock, and what is routed where
                # on the weights.
                least = int(self._smallest_online(made, batch, tried.peak_bytes) * _ONLINE_MARGIN)
                least = max(least, made.profile.measuring_bytes)
                raise self._infeasible(made.plan, least, cut=made.profile.splittable)
            made = dataclasses.replace(made, plan=smaller(made.plan, made.profile.min_batch))
        return tried

    def _smallest_online(self, made: Fitted, batch: Any, below: int) -> int:
        """The smallest limit that is held, to a hundredth; `below` is not."""
        growth = 1.01
        while (tried := self._try_out_online(made, batch, int(below * growth))).peak_bytes > int(
            below * growth
        ):
            below, growth = max(tried.peak_bytes, int(below * growth)), 2 * growth - 1
        above = int(below * growth)
        while above > below * 1.01 + 64:
            middle = (below + above) // 2
            held = self._try_out_online(made, batch, middle).peak_bytes <= middle
            below, above = (below, middle) if held else (middle, above)
        return above

    def _try_out_online(self, made: Fitted, batch: Any, limit_bytes: int) -> Fitted:
        """Eviction depends on timing; a limit counts as held if one of a few tries holds it.

        If none does, the peak is what one operation needed beside what cannot be dropped, at least.
        """
        tries = []
        for _ in range(_TRIES_ONLINE):
            tried = self._try_out(made, batch, online_bytes=limit_bytes)
            if tried is None:  # memory ran out before the limit was reached
                tried = dataclasses.replace(made, peak_bytes=limit_bytes * 11 // 10)
            if tried.peak_bytes <= limit_bytes:
                return tried
            tries.append(tried)
        return min(tries, key=lambda one: one.peak_bytes)

    def _infeasible(self, plan: Plan, least: int, *, cut: bool) -> BudgetInfeasible:
        parts = {name: count for name, count in plan.breakdown.items() if count}
        if plan.reserved_bytes > plan.peak_bytes:
            parts["segments of the device's allocator, beyond their tensors"] = (
                plan.reserved_bytes - plan.peak_bytes
            )
        if least > max(plan.peak_bytes, plan.reserved_bytes):  # what only measuring shows
            parts["measuring a few rows, before the first step"] = least - max(
                plan.peak_bytes, plan.reserved_bytes
            )
        parts |= {
            "copies of buffers": self._own_bytes,
            "communication buckets": self.reserved_bytes,
        }
        least += self._own_bytes + self.reserved_bytes
        listed = ", ".join(
            f"{name} {format_bytes(size)}"
            for name, size in sorted(parts.items(), key=_size)
            if size
        )
        hint = "or make the model or an item of the batch smaller."
        if not cut and plan.batch_size > 1:
            hint = (
                f"or lower the batch size. The batch of {plan.batch_size} is not cut:"
                f" {self._why_whole()}."
            )
            if not self._whole:
                hint += " exact=False cuts it all the same."
        elif self._micro_batch is not None and plan.micro_batch > 1:
            hint = "or leave out micro_batch, so that it can be smaller."
        return BudgetInfeasible(
            f"Smallest feasible peak is {format_bytes(least)} ({listed}) at micro-batch"
            f" {plan.micro_batch}, the budget is {format_bytes(self.budget_bytes)}. Raise `memory`"
            f" to at least {least} bytes, {hint}",
            min_bytes=least,
            breakdown=parts,
        )

    def _try_out(
        self, made: Fitted, batch: Any, *, online_bytes: int | None = None
    ) -> Fitted | None:
        """Run two micro-batches as planned, or each of them online: with the peak of the whole
        step, or None if it left the plan or memory ran out. A peak above `online_bytes` is what was
        needed where these did not suffice."""
        past = 0
        self._progress.begin(f"trying out a plan, micro-batch {made.plan.micro_batch}")
        with untouched(self._model):
            try:
                return self._rehearse(made, batch, online_bytes)
            except Exception as error:
                short = is_out_of_memory(error)
                if not short and not isinstance(error, Diverged | BudgetInfeasible | _PastLimit):
                    raise
                if isinstance(error, _PastLimit):
                    past = error.needed_bytes
                if isinstance(error, Diverged):
                    self._left = str(error)
                traceback.clear_frames(error.__traceback__)  # they hold every tensor of the trial
            finally:
                drop_gradients(self._model)
            free_cached_memory()
            # Where memory ran out before the budget did: as if the trial had taken a tenth more
            # than there is.
            if short and online_bytes is None:
                return dataclasses.replace(made, peak_bytes=self.limit_bytes * 11 // 10)
            return dataclasses.replace(made, peak_bytes=past) if past else None

    def _rehearse(self, made: Fitted, batch: Any, online_bytes: int | None) -> Fitted:
        made = dataclasses.replace(made, saved_bytes=None)  # of another plan, perhaps
        plan, found = made.plan, made.profile
        # what its first step will allocate
        waiting = max(0, found.optimizer_bytes - _state_bytes(self._optimizer))
        passes = update = saved = asked = 0
        looks = LooksAtData()
        record = TrialRecord(self.reserved)
        for cut in islice(
            self.runner.cut(batch, plan.micro_batch), None if online_bytes is not None else 2
        ):
            content = repeat_rows(cut, plan.micro_batch) if self.runner.split is None else cut
            part = Part(0, plan.micro_batch, content)
            # A part is a view: it holds the whole batch it was cut from, which may still be less
            # than a step's.
            held = meter(content, device=self.device).current_bytes
            rest = max(0, int(plan.batch_size * found.batch_bytes.per_item) - held)
            record.begin(*self.resident, content, beside=rest)
            live = Meter(device=self.device)
            live.events = record.events
            live.watch(*self.resident, content)
            with live:
                if online_bytes is not None:
                    self._run_online(made, part, online_bytes, beside=waiting + rest)
                else:
                    mode = Planned(made, inside=looks)
                    loss = self.runner.forward(part, mode).loss
                    unrecorded = mode.followed.rest
                    saved = max(saved, unrecorded.saved_bytes)
                    asked = max(asked, unrecorded.last_rebuilt)
                    torch.autograd.backward(loss)
                    del loss, mode
            passes = max(passes, live.peak_bytes + rest)
            update = live.current_bytes + rest + found.optimizer_burst_bytes
        sizes = UpdateSizes.of(self._model, self._optimizer, waiting, found.optimizer_burst_bytes)
        reserved = record.reserved_bytes(sizes, copied=False)
        return dataclasses.replace(
            made,
            plan=dataclasses.replace(plan, reserved_bytes=reserved),
            peak_bytes=max(max(passes, update) + waiting, reserved),
            reserved_bytes=reserved,
            copied_reserved_bytes=record.reserved_bytes(sizes, copied=True),
            saved_bytes=saved,
            asked=asked,
            looks=looks.reads_data,
        )

    def _run_online(self, made: Fitted, part: Part, limit_bytes: int, *, beside: int) -> None:
        """Both passes of one micro-batch, evicting, where so many bytes are taken by what is not
        there yet.
        """
        mode = WithinLimit(
            made, limit_bytes - beside, *self.resident, part.content, device=self.device
        )
        try:
            self.runner.run(part, mode, lambda found: torch.autograd.backward(found.loss))
        except BudgetInfeasible as refusal:
            raise _PastLimit(max(limit_bytes + 1, refusal.min_bytes + beside)) from refusal

    def _fastest(self, ways: list[Fitted], batch: Any) -> Fitted:
        """By the clock, whose seconds it then has.

        Plans with and without recomputation are too unlike for a prediction: one pays for recording
        and replaying, the other for more passes.
        """
        ways = [one for one in ways if one.steady] or ways[:1]
        if not ways[0].steady:
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
                # It is not steady after all, as its step will notice; or memory ran out, for which
                # a step is repeated.
                if not isinstance(error, Diverged) and not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            drop_gradients(self._model)
        free_cached_memory()
        return ways[0]

    def _plain(self, made: Fitted, batch: Any, target: int, limit_bytes: int) -> list[Fitted]:
        """The largest micro-batch without recomputation, tried out, if there is one."""
        # With some room: the profile may be of another size, and not even a trial may pass the
        # budget.
        found, rows = made.profile, made.plan.batch_size
        plan = plain_plan(found, memory=int(0.95 * target), batch_size=rows)
        tried: list[Fitted] = []
        while plan is not None:
            larger = self._try_out(dataclasses.replace(made, plan=plan), batch)
            if larger is None or larger.peak_bytes > limit_bytes:
                break
            tried = [larger]
            # Then without: each row more takes no more than one of those that were measured took.
            static = found.at(plan.micro_batch, rows=rows).static_bytes
            most = int(
                (limit_bytes - static) * plan.micro_batch / max(1, larger.peak_bytes - static)
            )
            most = even(rows, min(most, rows))
            if plan.micro_batch >= most:
                break
            plan = plain_plan(found, memory=limit_bytes, batch_size=rows, micro_batch=most)
        return tried

    def _recomputing(self, made: Fitted, batch: Any, target: int, limit_bytes: int) -> list[Fitted]:
        """The best larger micro-batch, with recomputation, tried out, if it can be as fast."""
        rows, size = made.plan.batch_size, made.plan.micro_batch
        if size == rows:
            return []
        most = _DOUBT * made.plan.step_seconds
        plan = recomputing_plan(
            made.profile, memory=int(0.95 * target), batch_size=rows, above=size, most_seconds=most
        )
        if plan is None:
            return []
        tried = self._try_out(dataclasses.replace(made, plan=plan), batch)
        return [] if tried is None or tried.peak_bytes > limit_bytes else [tried]

    def _timed(self, ways: list[tuple[Fitted, Any]]) -> Iterator[Fitted]:
        """With the seconds that passes of these micro-batches take here and now, each in its turn:
        a machine that is slower for a while is so for all of them. What was measured before is only
        a hint."""
        rows = [self.runner.rows(part) for _, part in ways]
        passes = [one.plan.batch_size / n for (one, _), n in zip(ways, rows, strict=True)]
        race = Race(passes, together=distributed.is_running())
        while not race.is_over:
            for place in race.running:
                race.add(place, self._pass_seconds(*ways[place]))
            race.drop_slow()
        drop_gradients(self._model)
        for place, (made, _) in enumerate(ways):
            seconds = race.step_seconds(place) + made.profile.optimizer_seconds
            yield dataclasses.replace(made, plan=made.plan.with_step_seconds(seconds))

    def _pass_seconds(self, made: Fitted, part: Any) -> float:
        """Of a pass as most of its step are: if it has several, not the first one, into gradients
        that are there.
        """
        alone = made.plan.steps == 1
        if alone:
            drop_gradients(self._model)
        started = seconds_now()
        loss = self.runner.forward(Part(0, 0, part), Planned(made, first=alone)).loss
        torch.autograd.backward(loss)
        wait_for(self._devices)
        return seconds_now() - started


def _may_be_beaten(tried: Fitted) -> bool:
    """Whether tiles may make a step much faster: nothing is faster than a batch that is run whole
    with everything kept.
    """
    plan, found = tried.plan, tried.profile
    if distributed.is_running():  # all ranks must profile the same, and each has its own clock
        return plan.is_short
    least = found.plain_seconds(plan.batch_size) + found.optimizer_seconds
    return plan.is_short and plan.step_seconds > _NEARLY * least


def _size(part: tuple[str, int]) -> int:
    return -part[1]


def _state_bytes(optimizer: Any) -> int:
    states = getattr(optimizer, "state", {})
    return sum(
        local_part(tensor).untyped_storage().nbytes()
        for state in states.values()
        if isinstance(state, dict)
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )
