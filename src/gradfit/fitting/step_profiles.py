"""What a step does, measured: a profile, with what only this step knows of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from gradfit import _torch_distributed as distributed
from gradfit._torch_fsdp import drop_gradients
from gradfit.batches.additivity_record import Additivity
from gradfit.batches.runner import LossFunction
from gradfit.fitting.batch_rows import RowCounter
from gradfit.fitting.measured_loss import MeasuredLoss
from gradfit.fitting.memory_lasts import where_memory_lasts
from gradfit.fitting.progress import ProgressReport
from gradfit.fitting.step_to_plan import PlanRequest, StepToPlan
from gradfit.fitting.trial import PastLimit, meter_below, refusing
from gradfit.fitting.update_bursts import with_update_bursts
from gradfit.planning.named_choices import fix_by_name, fix_known_names
from gradfit.profiling.measure import measure_sizes
from gradfit.profiling.profile import Profile
from gradfit.profiling.sampled_sizes import MeasuredStep, MeasuringLimits
from gradfit.recompute.offload import measure_bandwidth
from gradfit.tiling.tile import with_tiles
from gradfit.tiling.tiles import Tiles

_Found = TypeVar("_Found")
_LEAST = 1  # bytes, for which measuring takes as little as it can


class _Measured(NamedTuple):
    """What was measured last."""

    profile: Profile | None = None
    unlike: Sequence[Profile] = ()  # of sizes at which other operations were run
    by_the_way: bool = False  # in passes that were not quite those of a step

    def has(self, profile: Profile) -> bool:
        return any(profile is one for one in (self.profile, *self.unlike))


class StepProfiles:
    """Measures profiles of a step.

    Args:
        step: what is measured, and the budget.
        loss: is told how it adds up, which is measured with a profile.
        rows: counts them.
        progress: is told that measuring begins.
    """

    def __init__(
        self, step: StepToPlan, loss: MeasuredLoss, rows: RowCounter, progress: ProgressReport
    ) -> None:
        self._step, self._loss, self._rows, self._progress = step, loss, rows, progress
        self._last = _Measured()

    def measure(
        self,
        request: PlanRequest,
        *,
        rows: int | None = None,
        tiles: Tiles | None = None,
        memory_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> Profile:
        """What a step with this batch does, in these tiles. With less memory than the budget, fewer
        rows are measured; and so they are where what is measured, which nobody knows before, does
        not fit: then in as little as can be, which is what the smallest budget is named by.

        Raises:
            PastLimit: it would have taken more than `most_bytes`.
        """
        step, loss = self._step, self._loss
        tiled = " in tiles of tokens" if tiles is not None else ""
        self._progress.begin(f"measuring a step's operations{tiled}")
        loss_fn = with_tiles(step.runner.loss_fn, tiles)
        what = MeasuredStep(step.model, loss_fn, request.batch, step.optimizer, step.runner.split)
        is_open = by_the_way = False

        def measure(room_bytes: int, most_bytes: int | None) -> list[Profile]:
            nonlocal is_open, by_the_way
            bandwidth = self._host_bandwidth()
            is_open = loss.additivity is None and self._is_never_cut(request, loss_fn)
            limits = MeasuringLimits(
                room_bytes,
                rows,
                bandwidth,
                meter_below(most_bytes),
                self._least_rows(request.batch),
                shares_passes=(not step.compares_ahead and step.micro_batch is None and step.exact),
            )
            by_the_way = limits.shares_passes and loss.additivity is None
            return measure_sizes(what, limits, Additivity(None) if is_open else loss.additivity)

        def measure_within(limit_bytes: int) -> list[Profile]:
            return self._in_what_fits(limit_bytes, most_bytes, measure)

        # where there is less memory than the budget says, with as few rows as can be
        limits_bytes = (memory_bytes or step.limit_bytes, _LEAST)
        found = where_memory_lasts(step, measure_within, limits_bytes)
        if not is_open:
            loss.additivity = found[0].additivity
        measured, *others = [self._as_run_here(one, request, tiles) for one in found]
        self._last = _Measured(measured, others, by_the_way)
        return measured

    def measure_additivity(self, batch: Any) -> None:
        """How the parts of a batch make the whole, without a profile."""

        def measure(room_bytes: int, most_bytes: int | None) -> None:
            self._loss.measure_additivity(batch, room_bytes, meter_below(most_bytes))

        self._in_what_fits(self._step.limit_bytes, None, measure)

    def _in_what_fits(
        self,
        limit_bytes: int,
        most_bytes: int | None,
        measure: Callable[[int, int | None], _Found],
    ) -> _Found:
        """What `measure` finds on as many rows as there seems to be room for in a limit, without
        passing it; what does not fit is measured on fewer, and at last on as few as can be, in
        no more than `most_bytes`.
        """
        guard_bytes = min(limit_bytes, most_bytes or limit_bytes)
        # with rows for three quarters of it, gradients may still be compared
        for room_bytes in (limit_bytes, limit_bytes * 3 // 4):
            if room_bytes > _LEAST:
                with contextlib.suppress(PastLimit), refusing(0):
                    return measure(room_bytes, guard_bytes)
                drop_gradients(self._step.model)
        with refusing(0):
            return measure(_LEAST, most_bytes)

    def unlike(self, profile: Profile, size: int) -> Profile | None:
        """The profile of this very size, if other operations were seen to run at it."""
        if profile is not self._last.profile:
            return None
        return next((one for one in self._last.unlike if one.batch_size == size), None)

    def is_of_size(self, profile: Profile, size: int) -> bool:
        """Whether a profile is of this very size, in passes as those of a step."""
        by_the_way = self._last.by_the_way and self._last.has(profile)
        return size == profile.batch_size and not by_the_way

    def _as_run_here(self, measured: Profile, request: PlanRequest, tiles: Tiles | None) -> Profile:
        """What was measured, with what only this step knows."""
        measured = dataclasses.replace(
            with_update_bursts(self._step, measured),
            tiles=tiles,
            additivity=self._loss.additivity,
            splittable=self._is_splittable(measured),
        )
        fix = fix_by_name if tiles is None and request.is_first else fix_known_names
        return fix(measured, self._step.named)

    def _host_bandwidth(self) -> float:
        """Bytes a second to the host, where values may be moved there."""
        if not self._step.offload:
            return 0.0
        device = next(self._step.model.parameters()).device
        return measure_bandwidth(device, min(16 << 20, 1024 + self._step.limit_bytes // 8))

    def _is_splittable(self, profile: Profile) -> bool:
        """Whether a batch is cut: as it was asked for, or as it was measured."""
        if self._step.whole:
            return False
        return profile.splittable if self._step.exact else True

    def _least_rows(self, batch: Any) -> int | None:
        """How many rows are run at once in any case; None: as it is measured."""
        whole, asked = self._step.whole, self._step.micro_batch
        if whole or asked is not None:
            rows = self._rows.count(batch)
            return rows if whole else min(rows, asked or rows)
        return None if self._step.exact else 1

    def _is_never_cut(self, request: PlanRequest, loss_fn: LossFunction) -> bool:
        """Whether how parts add up need not be known, which takes many forwards to measure: the
        step is one row, it is ours alone, and the loss says no count, which might be a wrong one.
        """
        if not self._step.is_ours or distributed.is_running() or not self._is_one_row(request):
            return False
        return not self._loss.has_count(request.batch, loss_fn)

    def _is_one_row(self, request: PlanRequest) -> bool:
        return request.batch_size == 1 and self._rows.count(request.batch) <= 1
