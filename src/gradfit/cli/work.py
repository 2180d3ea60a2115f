"""What the commands have in common: the job, a batch of it, its profile, and the page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradfit.cli.console import working
from gradfit.distributed.launch import Ranks
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.machine import available_bytes, environment
from gradfit.planning.api import frontier
from gradfit.planning.api import plan as make_plan
from gradfit.planning.plan import Plan
from gradfit.profiling.make_profile import profile
from gradfit.profiling.profile import Profile
from gradfit.report.curves import measure_curve, plain_peak_bytes, predict_plain
from gradfit.report.page import write_page
from gradfit.report.report_record import Report
from gradfit.runs.batch_stream import Batches
from gradfit.runs.job import Job
from gradfit.runs.job_loader import load_target
from gradfit.runs.random_state import random_state, restore_random, seed_everything
from gradfit.units import format_bytes, parse_bytes

_SHARE = 0.8  # of what is free is taken when nothing is said


@dataclass
class Work:
    """A job with the numbers of this command."""

    target: str
    job: Job
    batch_size: int
    seed: int
    called_in: Path = Path()  # for a page: the job's code may go to another directory

    @classmethod
    def load(
        cls, target: str, *, batch_size: int | None, seed: int, page: Path | None = None
    ) -> Work:
        """Seed, then build the job: the same seed gives the same model."""
        if page is not None:
            _check_page(page)
        called_in = Path() if page is None else Path.cwd()
        seed_everything(seed)
        job = load_target(target)
        return cls(
            target, job, job.batch_size if batch_size is None else batch_size, seed, called_in
        )

    @property
    def device(self) -> torch.device:
        return next(self.job.model.parameters()).device

    def batch(self) -> Any:
        """The first batch of the run, without moving any generator."""
        before = random_state()
        batches = Batches(
            self.job.data,
            batch_size=self.batch_size,
            seed=self.seed,
            as_they_come=self.job.split is not None,
        )
        place = batches.state()
        batch = batches.next()
        batches.restore(place)
        restore_random(before)
        return batch

    def budget(self, memory: str | None, ranks: Ranks | None = None) -> int:
        """The budget in bytes; without one, most of what is free here, or this rank's share of
        it.
        """
        if memory is not None:
            return parse_bytes(memory, name="--memory")
        free = available_bytes(self.device)
        if free is None:
            raise MisuseError(
                f"How much memory {self.device} has free is not known. Pass --memory."
            )
        # an accelerator is a rank's own, the host's memory is not
        sharing = ranks.size_here if ranks is not None and self.device.type == "cpu" else 1
        return int(free * _SHARE / sharing)

    def profile(self, batch: Any, *, tile: bool = True) -> Profile:
        """Measure, in no more memory than there is."""
        free = available_bytes(self.device)
        limit = None if free is None else int(free * _SHARE)
        with working(f"measuring one step of {self.target}"):
            return profile(
                self.job.model,
                self.job.loss_fn,
                batch,
                self.job.optimizer,
                memory_bytes=limit,
                split=self.job.split,
                tile=tile,
            )

    def plan(
        self,
        profile: Profile,
        budget: int | None,
        micro_batch: int | str | None = None,
        *,
        tile: bool = True,
    ) -> Plan:
        """The plan for a budget, or the one of the smallest peak; at this micro-batch, if one was
        asked for.
        """
        fixed = self.batch_size if isinstance(micro_batch, str) else micro_batch
        if fixed is not None and fixed < self.batch_size:
            self._check_splittable(profile, fixed)
        size = self.batch_size if profile.splittable else None
        with working("planning"):
            if budget is None and fixed is None:
                plans = frontier(profile, batch_size=size, points=2)
                return min(plans, key=lambda plan: plan.peak_bytes)
            return _plan_at(profile, budget, size, fixed if size else None, tile=tile)

    def _check_splittable(self, profile: Profile, micro_batch: int) -> None:
        if not profile.splittable:
            additivity = profile.additivity
            reason = additivity.reason if additivity is not None else "it has one row"
            raise MisuseError(
                f"--micro-batch {micro_batch} cuts the batch of {self.batch_size}, which does not"
                f" add up: {reason}. Leave out --micro-batch."
            )

    def report(self, profile: Profile, batch: Any, plan: Plan | None = None, **more: Any) -> Report:
        """The page's content: curves are measured here, without a trace; plain is predicted where
        it would not fit.
        """
        size = plan.batch_size if plan is not None else self.batch_size
        here = environment(self.job.model)
        title = f"gradfit: {self.target}"
        report = Report(title, profile, plan, size, environment=here, **more)
        if not report.plain_curve:
            report = self._with_plain_curve(report, batch, size)
        if plan is None:
            return report
        return _with_other_plans(self._with_planned_curve(report, batch, plan), plan)

    def _with_planned_curve(self, report: Report, batch: Any, plan: Plan) -> Report:
        job = self.job
        with working("measuring memory as planned"):
            live = measure_curve(
                job.model, job.optimizer, job.loss_fn, batch, plan=plan, split=job.split
            )
        report = dataclasses.replace(report, planned_curve=live.timeline or [])
        if report.limit_bytes is None:
            report = dataclasses.replace(report, limit_bytes=plan.budget_bytes)
        return report

    def _with_plain_curve(self, report: Report, batch: Any, size: int) -> Report:
        """With the memory of plain PyTorch, measured where it fits, or else predicted."""
        job, profile = self.job, report.profile
        needed, free = plain_peak_bytes(profile, size), available_bytes(self.device)
        if free is None or needed < free * _SHARE:
            with working("measuring memory with plain PyTorch"):
                live = measure_curve(job.model, job.optimizer, job.loss_fn, batch)
            return dataclasses.replace(report, plain_curve=live.timeline or [])
        label = (
            f"plain PyTorch (predicted: it needs {format_bytes(needed)},"
            f" {format_bytes(free)} are free)"
        )
        curve = predict_plain(profile, size)
        return dataclasses.replace(report, plain_curve=curve, plain_label=label)

    def write(self, report: Report, page: Path) -> None:
        write_page(report, self.called_in / page)


def _with_other_plans(report: Report, plan: Plan) -> Report:
    """What the chosen plan is compared with: plans for other budgets, and those of its size."""
    profile, size = report.profile, plan.batch_size
    with working("planning for other budgets"):
        cut = size if profile.splittable else None
        plans = report.frontier or tuple(frontier(profile, batch_size=cut, points=10))
        alike = frontier(profile, batch_size=size, points=6, micro_batch=plan.micro_batch)
    return dataclasses.replace(report, frontier=plans, same_size=tuple(alike))


def _plan_at(
    profile: Profile,
    budget: int | None,
    batch_size: int | None,
    micro_batch: int | None,
    *,
    tile: bool,
) -> Plan:
    """At this micro-batch; without a budget, for the smallest there is."""
    if budget is None:
        budget = _least_bytes(profile, batch_size, micro_batch)
    return make_plan(
        profile, memory=budget, batch_size=batch_size, micro_batch=micro_batch, tile=tile
    )


def _least_bytes(profile: Profile, batch_size: int | None, micro_batch: int | None) -> int:
    """The smallest budget that there is a plan for at this micro-batch."""
    try:
        plan = make_plan(profile, memory=1, batch_size=batch_size, micro_batch=micro_batch)
    except BudgetInfeasible as smallest:
        return smallest.min_bytes
    return plan.budget_bytes


def _check_page(page: Path) -> None:
    """Refuse a path that no page can be written to, before anything is measured for it."""
    try:
        there, is_folder = page.absolute().parent.is_dir(), page.is_dir()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MisuseError(f"--report {str(page)[:80]!r} is no path: {why}. Pass another.") from None
    if not there:
        raise MisuseError(
            f"There is no directory {str(page.parent)!r} for --report. Make it, or pass another"
            " path."
        )
    if is_folder:
        raise MisuseError(
            f"--report {str(page)!r} is a directory. Pass the path of a file, as page.html."
        )
