"""A training run that can be stopped, killed and resumed at any moment, and ends with the same
parameters.

What a run needs to go on as if nothing had happened: the job (model, optimizer, scheduler), every
random generator, the place in the data, the accumulator (with the gradients of a window that is not
full yet), and the plans, because another micro-batch would add the same numbers in another order.
All of it is in each state.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradfit.accumulate import accumulator_state as window_state
from gradfit.distributed.launch import Ranks
from gradfit.errors import MisuseError, StateError
from gradfit.fitting.fit import fit
from gradfit.fitting.plan_state import read_plan, write_plan
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.fitting.train_step import Progress, TrainResult, TrainStep
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.runs import job_state as snapshot
from gradfit.runs.batch_stream import Batches
from gradfit.runs.job import Job
from gradfit.runs.random_state import random_state, restore_random, seed_everything
from gradfit.runs.rank_states import ranks_of
from gradfit.runs.run_state import check_state
from gradfit.runs.shards import ReadAllRanks
from gradfit.runs.state_files import SavedState, StateStore, write_atomically
from gradfit.tree import split_batch
from gradfit.units import format_bytes

_SAVE_SHARE = 0.1  # of the time may go into saving


class Interrupted(Exception):
    """The run was asked to stop, and its state is saved."""


@dataclass(frozen=True)
class RunSettings:
    """What makes two runs the same run: resuming with other numbers would be another one.

    Args:
        batch_size: Rows in one update, of all ranks together.
        memory_bytes: The budget of this rank.
        seed: Of the model, the data's order and all randomness.
        steps: Updates to make in all, if `epochs` do not say when to end.
        epochs: Passes over the data.
        micro_batch: Rows that run at once, "whole" never to cut a batch, None to choose.
        tile: Whether plans may cut along tokens.
    """

    batch_size: int
    memory_bytes: int
    seed: int = 0
    steps: int | None = None
    epochs: int | None = None
    micro_batch: int | str | None = None
    tile: bool = True


@dataclass
class RunReport:
    """What a run has done, for a person or as JSON."""

    step: int
    epoch: int
    losses: list[float] = field(default_factory=list)
    grad_norm: float | None = None
    peak_bytes: int = 0
    budget_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    out: str = ""


class Listener:
    """What a run tells whoever watches it; override what you want to hear."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def planned(self, step: TrainStep, total: int | None) -> None:
        """The plan is made; training begins. `total` steps, where that is known."""

    def stepped(self, step: int, result: TrainResult, seconds: float) -> None:
        """One update is done."""

    def saved(self, path: Path) -> None:
        """A state was written."""


class TrainingRun:
    """One training run of a job.

    >>> import tempfile
    >>> model = torch.nn.Linear(4, 1)
    >>> job = Job(
    ...     model,
    ...     lambda model, x: model(x).square().mean(),
    ...     torch.ones(32, 4),
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     batch_size=8,
    ... )
    >>> settings = RunSettings(batch_size=8, memory_bytes=2**20, steps=6)
    >>> TrainingRun(job, settings, store=StateStore(tempfile.mkdtemp())).train().step
    6
    """

    def __init__(
        self,
        job: Job,
        settings: RunSettings,
        *,
        store: StateStore | None = None,
        listener: Listener | None = None,
        stop: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
    ) -> None:
        _check_end(settings)
        self.job, self.settings, self.store = job, settings, store
        self.listener = listener or Listener()
        self._stop = stop
        self.ranks = Ranks() if ranks is None else ranks
        self.batches = Batches(
            job.data,
            batch_size=settings.batch_size,
            seed=settings.seed,
            as_they_come=job.split is not None,
        )
        _check_divisible(self.batches, self.ranks)
        self.step_number = 0
        self.step: TrainStep | None = None
        self._state: dict[str, Any] | None = None  # what to go on from
        # with the record, so that its id stays its own
        self._texts: dict[int, tuple[Any, str]] = {}
        self._leaving = False  # was asked to stop, and has saved what it had by then
        self._saved_at = -1.0
        self._save_seconds = 0.0

    def resume(self, saved: SavedState, read_all_ranks: ReadAllRanks = list) -> None:
        """Go on from a state; everything is checked before the job is touched.

        `read_all_ranks` gives every rank's part of the job, for a model that was sharded over
        another number of ranks.
        """
        state = saved.content
        plans = self._check(saved)
        if ranks_of(saved) != self.ranks.size:
            self.listener.note(
                f"The run had {ranks_of(saved)} ranks and has {self.ranks.size}: it goes on at the"
                " step."
            )
            state = self._at_its_step(state, ranks_of(saved))
            plans = []
        if state["settings"]["memory_bytes"] != self.settings.memory_bytes:
            _check_between_steps(state)
            self.listener.note("The budget is another than before, so the plan is made anew.")
            plans = []
        self._state = {**state, "plans": plans}
        snapshot.restore(self.job, state["job"], read_all_ranks)
        self.step_number = state["step"]

    def _check(self, saved: SavedState) -> list[TestedPlan]:
        """Refuse a state that is not of this run; its plans, as they are read."""
        state = saved.content
        try:
            check_state(state)
            _check_settings(state["settings"], self.settings)
            self.batches.check(state["place"]["data"])
            snapshot.check(self.job, state["job"])
            return [read_plan(saved_plan) for saved_plan in state["plans"]]
        except StateError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateError(
                f"{saved.path.name} is not a state of gradfit train ({error!r})."
            ) from None

    def _at_its_step(self, state: dict[str, Any], ranks: int) -> dict[str, Any]:
        """The state as it was when its step began: other ranks have other rows, and nobody's half
        can be used.
        """
        job, place = state["job"], state["place"]
        if state["progress"] is not None:
            job = {**job, "model": {**job["model"], **state["progress"].get("buffers", {})}}
        # what it was given is another rank's, and so are its random numbers
        if self.ranks.rank >= ranks:
            seed_everything(self.settings.seed + self.ranks.rank + 1_000_003 * state["step"])
            place = {**place, "random": random_state()}
        return {**state, "job": job, "place": place, "progress": None, "accumulator": None}

    def train(self) -> RunReport:
        """Train until the steps or epochs are done, or `stop()` says so."""
        started = time.perf_counter()
        step, progress = self._begin()
        report = RunReport(
            step=self.step_number, epoch=self.batches.epoch, budget_bytes=step.budget_bytes
        )
        place = self._place()
        try:
            while (batch := self._next_batch()) is not None:
                if progress is not None:
                    restore_random(progress.pop("random"))
                self._train_on(batch, step, progress, place, report)
                progress, place = None, self._place()
                self._save_if_due(place)
            self._save(place)
            self._save_model()
        except Interrupted:
            report.interrupted = True
        report.step, report.epoch = self.step_number, place["data"]["epoch"]
        report.seconds = time.perf_counter() - started
        return report

    def _next_batch(self) -> Any:
        """None if the steps or epochs are done."""
        if _is_reached(self.settings.steps, self.step_number):
            return None
        batch = self.batches.next()
        return None if _is_reached(self.settings.epochs, self.batches.epoch) else batch

    def _train_on(
        self,
        batch: Any,
        step: TrainStep,
        progress: dict[str, Any] | None,
        place: dict[str, Any],
        report: RunReport,
    ) -> None:
        """One step, or what is left of one that was interrupted."""
        before = time.perf_counter()
        part = self.ranks.part(batch)
        if part is None:
            result = step.idle()
        else:
            result = step(
                part,
                progress=None if progress is None else Progress(**progress),
                after_micro_batch=functools.partial(self._between, place),
            )
        self._schedule(result)
        self.step_number += 1
        report.losses.append(result.loss)
        report.grad_norm = result.grad_norm
        report.peak_bytes = max(report.peak_bytes, result.peak_bytes)
        self.listener.stepped(self.step_number, result, time.perf_counter() - before)

    def _save_if_due(self, place: dict[str, Any]) -> None:
        stop, due = self.ranks.any_of(self._stop(), self._is_due())
        if stop or due:
            self._save(place)
        if stop:
            raise Interrupted

    def _begin(self) -> tuple[TrainStep, dict[str, Any] | None]:
        """The step, with the plans of the run so far, and the place in the data; the trial runs
        leave no trace.
        """
        state, self._state = self._state, None
        if state is None:
            step = self._begin_at(self._place(), ())
            self.listener.planned(step, self._total())
            # what cannot be saved is found out now, not after the first hour
            self._save(self._place())
            return step, None
        self.batches.restore(state["place"]["data"])
        step = self._begin_at(state["place"], state["plans"])
        progress, window = state["progress"], state["accumulator"]
        if progress is None and window is not None:
            window_state.load(step.accumulator, window)
        self.listener.planned(step, self._total())
        return step, None if progress is None else {**progress, "window": window}

    def _begin_at(self, place: dict[str, Any], plans: Sequence[Any]) -> TrainStep:
        self.step = step = self._fit(plans)
        self.batches.restore(place["data"])
        restore_random(place["random"])
        return step

    def _fit(self, plans: Sequence[Any]) -> TrainStep:
        """A step for the next batch of the data, beginning with the plans of the run so far."""
        batch = self.batches.next()
        sample = self.ranks.part(batch)
        if sample is None:
            sample = next(iter(split_batch(batch, 1)))
        rows = -(-self.settings.batch_size // self.ranks.size) if self.job.split is None else None
        return fit(
            self.job.model,
            self.job.optimizer,
            self.job.loss_fn,
            sample,
            self.settings.memory_bytes,
            rows,
            split=self.job.split,
            known=plans,
            reproducible=True,
            micro_batch=self.settings.micro_batch,
            tile=self.settings.tile,
            **self.job.fit_options,
        )

    def _total(self) -> int | None:
        """The step number at which the run will be done, where the data tell their length."""
        ends = [] if self.settings.steps is None else [self.settings.steps]
        if self.settings.epochs is not None and self.batches.per_epoch is not None:
            ends.append(self.settings.epochs * self.batches.per_epoch)
        return min(ends) if ends else None

    def _place(self) -> dict[str, Any]:
        return {"data": self.batches.state(), "random": random_state()}

    def _schedule(self, result: TrainResult) -> None:
        scheduler = self.job.scheduler
        if scheduler is None or not result.stepped:
            return
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(result.loss)
        else:
            scheduler.step()

    # --------------------------------------------------------------------------------------- saving

    def _between(self, place: dict[str, Any], done: Progress) -> None:
        """After a micro-batch that is not the last of its window.

        While a window fills no rank needs another, so each saves what it holds by itself: states of
        one step fit together wherever in it they were taken. But all must end the step before any
        may leave.
        """
        asked = self._stop()
        is_new = asked and not self._leaving
        if self._is_due() or is_new:
            self._save(place, progress={**done._asdict(), "window": None, "random": random_state()})
            self._leaving = asked
        if asked and self.ranks.size == 1:
            raise Interrupted

    def _is_due(self) -> bool:
        """Whether so much time has gone by that a save costs no more than its share."""
        return time.perf_counter() - self._saved_at >= self._save_seconds / _SAVE_SHARE

    def _save(self, place: dict[str, Any], *, progress: dict[str, Any] | None = None) -> None:
        if self.store is None or self.step is None:
            return
        started = time.perf_counter()
        content = {
            "step": self.step_number,
            "settings": dataclasses.asdict(self.settings),
            "place": place,
            "progress": progress,
            "accumulator": window_state.save(self.step.accumulator),
            "ranks": self.ranks.size,
            "job": snapshot.capture(self.job),
            "plans": [write_plan(tested, self._text) for tested in self.step.known],
        }
        path = self.store.save(
            content, step=self.step_number, micro=progress["done"] if progress else 0
        )
        self._saved_at = time.perf_counter()
        self._save_seconds = self._saved_at - started
        self.listener.saved(path)

    def _text(self, record: Plan | Profile) -> str:
        """A record as JSON, made once: it is saved with every state."""
        if id(record) not in self._texts:
            self._texts[id(record)] = (record, record.to_json())
        return self._texts[id(record)][1]

    def _save_model(self) -> None:
        if self.store is None:
            return
        # by all ranks together
        tensors = snapshot.whole_model(self.job.model, keep=self.ranks.rank == 0)
        if self.ranks.rank == 0:
            write_atomically(self.store.directory / "model.safetensors", tensors)


def _check_end(settings: RunSettings) -> None:
    if settings.steps is None and settings.epochs is None:
        raise MisuseError("Neither steps nor epochs is given. Pass steps=100 or epochs=1.")


def _check_divisible(batches: Batches, ranks: Ranks) -> None:
    if ranks.size > 1 and batches.rows is None:
        raise MisuseError(
            f"data come as batches, which cannot be divided among {ranks.size} ranks. Pass"
            " tensors or a map-style Dataset as the job's data."
        )


def _check_between_steps(state: dict[str, Any]) -> None:
    if state["progress"] is not None:
        raise StateError(
            "The run was left in the middle of a step, which must be finished with the"
            f" budget it had, {format_bytes(state['settings']['memory_bytes'])}. Leave out"
            " --memory, or pass that."
        )


def _is_reached(end: int | None, now: int) -> bool:
    return end is not None and now >= end


def _check_settings(saved: dict[str, Any], now: RunSettings) -> None:
    options = {
        "batch_size": "--batch-size",
        "seed": "--seed",
        "micro_batch": "--micro-batch",
        "tile": "--tile",
    }
    for name, option in options.items():
        # which states of older versions do not have
        before = saved.get(name, True if name == "tile" else None)
        if before != getattr(now, name):
            raise StateError(
                f"The run was begun with {name} {before}, not {getattr(now, name)}: that would be"
                f" another run. Leave out {option}, or pass another --out."
            )
