"""`gradfit train`: a run within a budget that survives Ctrl-C and SIGKILL."""

from __future__ import annotations

import dataclasses
import hashlib
import json as json_module
import math
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.progress import Progress as Bar

from gradfit.cli.command_options import (
    MOST_SEED,
    BatchSize,
    Debug,
    Json,
    MemoryToTrain,
    MicroBatch,
    Page,
    Target,
    read_micro_batch,
)
from gradfit.cli.console import console, note, print_result, warnings_as_notes, working
from gradfit.cli.stop import StopSignal
from gradfit.cli.work import Work
from gradfit.distributed.fsdp import is_fully_sharded
from gradfit.distributed.launch import Ranks
from gradfit.errors import MisuseError
from gradfit.fitting.audit import audit
from gradfit.fitting.train_step import TrainResult, TrainStep
from gradfit.report.exactness import exactness_json, exactness_line
from gradfit.report.report_record import Measured
from gradfit.runs.job_loader import target_name
from gradfit.runs.random_state import seed_everything
from gradfit.runs.rank_states import RankStates
from gradfit.runs.run_begun import read_begun, write_begun
from gradfit.runs.shards import whole
from gradfit.runs.state_files import SavedState, StateStore
from gradfit.runs.training_run import Listener, RunReport, RunSettings, TrainingRun
from gradfit.units import format_bytes, format_seconds

EXIT_INTERRUPTED = 130


def train(
    target: Target,
    memory: MemoryToTrain = None,
    batch_size: BatchSize = None,
    micro_batch: MicroBatch = None,
    tile: Annotated[
        bool | None,
        typer.Option(
            "--tile/--no-tile",
            help="May plans cut along tokens, too? Default: yes.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Updates to make in all.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Passes over the data. Default: 1.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Directory for the run's state. Default: runs/ and the job's name."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, max=MOST_SEED, help="Seeds model, data and randomness. Default: 0."
        ),
    ] = None,
    log_every: Annotated[
        int, typer.Option("--log-every", min=1, help="Steps between two lines.")
    ] = 10,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write scalars to OUT/tensorboard.")
    ] = False,
    json: Json = False,
    report: Page = None,
    debug: Debug = False,
) -> None:
    """Train within a budget. Ctrl-C finishes the micro-batch and saves; --resume goes on,
    bit-identically.
    """
    ranks = Ranks.join()
    console.quiet = ranks.rank > 0
    folder = _RunFolder.find(target, out, resume, ranks)
    before = folder.settings
    seed = _first(seed, before.get("seed"), 0)
    size = _first(batch_size, before.get("batch_size"))
    work = _load(target, size, seed, report, ranks)
    folder.store.prepare()
    if steps is None and epochs is None:
        steps, epochs = before.get("steps"), before.get("epochs", 1)
    settings = RunSettings(
        batch_size=work.batch_size,
        memory_bytes=_memory_bytes(memory, before, work, ranks),
        seed=seed,
        steps=steps,
        epochs=epochs,
        micro_batch=_first(read_micro_batch(micro_batch), before.get("micro_batch")),
        tile=_first(tile, before.get("tile"), True),
    )
    ranks.require_same(_same_on_all_ranks(settings))
    folder.begin(settings)
    writer = _writer(folder) if tensorboard and ranks.rank == 0 else None
    with warnings_as_notes(), StopSignal() as stop, working("planning") as bar:
        listener = _Listener(bar, stop, log_every, writer)
        run = TrainingRun(
            work.job, settings, store=folder.store, listener=listener, stop=stop.asked, ranks=ranks
        )
        folder.resume(run, listener)
        result = run.train()
        result.out = str(folder.shown)
        listener.close()
    digest = digest_of(work.job.model) if json else ""  # by all ranks together
    ranks.leave()
    folder.store.close()
    if ranks.rank == 0:
        if report is not None:
            _write_page_of_whole_run(work, run, result, listener.seconds, report)
        print_result(_as_json(work, run, result, digest) if json else _in_words(result))
    if result.interrupted:
        _end_interrupted(target, folder.shown)


def _memory_bytes(memory: str | None, before: Mapping[str, Any], work: Work, ranks: Ranks) -> int:
    """The budget that is asked for, or that of the run that is resumed, or what is free."""
    if memory is None and before:
        return int(before["memory_bytes"])
    return work.budget(memory, ranks)


def _same_on_all_ranks(settings: RunSettings) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if name != "memory_bytes"}


def _load(target: str, batch_size: int | None, seed: int, page: Path | None, ranks: Ranks) -> Work:
    """The job, the same on all ranks but for its random numbers."""
    work = Work.load(target, batch_size=batch_size, seed=seed, page=page)
    ranks.share(work.job.model)
    if page is not None and is_fully_sharded(work.job.model):
        raise MisuseError(
            "--report runs the model on one rank, and a fully_shard model needs all. Leave out"
            " --report."
        )
    if ranks.rank > 0:
        seed_everything(seed + ranks.rank)  # other rows, other dropout
    return work


def _end_interrupted(target: str, path: Path) -> NoReturn:
    command = f"gradfit train {shlex.quote(target)} --out {shlex.quote(str(path))} --resume"
    note(f"Interrupted; the state is saved. Resume with: {command}")
    raise typer.Exit(EXIT_INTERRUPTED)


@dataclasses.dataclass
class _RunFolder:
    """The directory of a run, and what is in it to go on from."""

    shown: Path  # as it was given
    path: Path  # whole: the job's code may go to another directory
    states: RankStates
    ranks: Ranks
    resuming: bool
    saved: SavedState | None  # the newest state, to resume from
    settings: dict[str, Any]  # of the run that is resumed; empty for a new one

    @classmethod
    def find(cls, target: str, out: Path | None, resume: bool, ranks: Ranks) -> _RunFolder:
        """Where the first rank says; a run that is there must be resumed, and one to resume be
        there.
        """
        resume = resume or ranks.restarted
        shown = ranks.first_says(str(out if out is not None else _default_out(target, resume)))
        path = Path(shown).absolute()
        states = RankStates(path, ranks)
        if _holds_run(states.store, path):
            states.store.prepare()  # before anything in it is read: another run may be writing
        saved = _saved(states, resume)
        settings = _settings_to_resume(path, saved, ranks) if resume else {}
        return cls(Path(shown), path, states, ranks, resume, saved, settings)

    @property
    def store(self) -> StateStore:
        """Where this rank saves."""
        return self.states.store

    def begin(self, settings: RunSettings) -> None:
        """Write down what a new run is begun with."""
        if self.saved is None and self.ranks.rank == 0:
            write_begun(self.path, dataclasses.asdict(settings))

    def resume(self, run: TrainingRun, listener: Listener) -> None:
        """Let the run go on from the state there is, if it is to."""
        if (saved := self.saved) is not None:
            run.resume(saved, lambda: self.states.read_all_ranks(saved))
            listener.note(f"Resuming at step {run.step_number} from {saved.path}.")
        elif self.resuming:
            listener.note(
                f"{self.shown} has no state yet: starting from the beginning, with the settings it"
                " was begun with."
            )


class _Listener(Listener):
    """Shows a run as a bar, as lines, and as TensorBoard scalars."""

    def __init__(self, bar: Bar, stop: StopSignal, log_every: int, writer: Any) -> None:
        self._bar, self._stop, self._log_every, self._writer = bar, stop, log_every, writer
        self._total: int | None = None
        self.seconds: list[float] = []

    def note(self, text: str) -> None:
        note(text)

    def planned(self, step: TrainStep, total: int | None) -> None:
        note(str(step.plan).splitlines()[0])
        note(exactness_line(step.profile))
        self._total = total
        self._bar.update(self._bar.task_ids[0], description="training", total=total)
        self._stop.arm()  # until here there was nothing to save

    def stepped(self, step: int, result: TrainResult, seconds: float) -> None:
        self.seconds.append(seconds)
        self._bar.update(
            self._bar.task_ids[0], completed=step, description=f"training, loss {result.loss:.4g}"
        )
        if step % self._log_every == 0 or step == self._total:
            self._print_line(step, result, seconds)
        if self._writer is not None:
            self._write_scalars(step, result, seconds)

    def _print_line(self, step: int, result: TrainResult, seconds: float) -> None:
        norm = "" if result.grad_norm is None else f"  gradient norm {result.grad_norm:.3g}"
        of = "" if self._total is None else f"/{self._total}"
        took = f"measured: peak {format_bytes(result.peak_bytes)}, {format_seconds(seconds)}"
        note(f"step {step}{of}  loss {result.loss:.4f}{norm}  {took}")

    def _write_scalars(self, step: int, result: TrainResult, seconds: float) -> None:
        self._writer.add_scalar("loss", result.loss, step)
        if result.grad_norm is not None:
            self._writer.add_scalar("gradient_norm", result.grad_norm, step)
        self._writer.add_scalar("peak_bytes", result.peak_bytes, step)
        self._writer.add_scalar("step_seconds", seconds, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _default_out(target: str, resume: bool) -> Path:
    """runs/NAME, or the next of runs/NAME-2, … that is free; to resume, the last that is not."""
    last = path = Path("runs") / target_name(target)
    first, number = path.name, 1
    while _holds_run(StateStore(path), path):
        number += 1
        last, path = path, path.with_name(f"{first}-{number}")
    return last if resume else path


def _holds_run(store: StateStore, base: Path) -> bool:
    """Whether this rank has a state, or the run's directory says that one was begun."""
    return bool(store.names()) or read_begun(base) is not None


def _settings_to_resume(path: Path, saved: SavedState | None, ranks: Ranks) -> dict[str, Any]:
    """Of the run that is there; one that was restarted may have been ended before it was begun."""
    settings = _begun(path, ranks) if saved is None else saved.content["settings"]
    if not settings and not ranks.restarted:
        raise MisuseError(
            f"There is no run in {str(path)!r} to resume. Check --out, or leave out --resume to"
            " begin one."
        )
    return dict(settings)


def _begun(base: Path, ranks: Ranks) -> dict[str, Any]:
    """What the run was begun with, as the first rank reads it."""
    said = ranks.first_says(json_module.dumps(read_begun(base) if ranks.rank == 0 else None))
    begun: dict[str, Any] | None = json_module.loads(said)
    return begun or {}


def _saved(states: RankStates, resume: bool) -> SavedState | None:
    names = states.store.names()
    if names and not resume:
        raise MisuseError(
            f"{str(states.store.directory)!r} holds a run at {names[0]}. Pass --resume to go on"
            " with it, or another --out."
        )
    saved = states.load() if resume else None
    if saved is not None and saved.passed_over:
        _note_passed_over(saved)
    return saved


def _note_passed_over(saved: SavedState) -> None:
    for problem in saved.passed_over:
        note(f"Passed over {problem}")
    note(f"Using {saved.path.name}, the one before.")


def _writer(folder: _RunFolder) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MisuseError(
            "TensorBoard is not installed. Run: pip install 'gradfit[tensorboard]'."
        ) from None
    saved = folder.saved
    # steps after the state are made again
    purge = None if saved is None else int(saved.content["step"]) + 1
    return SummaryWriter(str(folder.store.directory / "tensorboard"), purge_step=purge)


def _write_page_of_whole_run(
    work: Work, run: TrainingRun, result: RunReport, seconds: list[float], page: Path
) -> None:
    """None of a run that was interrupted."""
    if run.step is not None and not result.interrupted:
        _write_page(work, run.step, result, seconds, page)


def _write_page(
    work: Work, step: TrainStep, result: RunReport, seconds: list[float], page: Path
) -> None:
    batch = work.batch()
    with working("running a batch plainly and as planned"):
        checked = audit(
            work.job.model, work.job.loss_fn, batch, plan=step.plan, split=work.job.split
        )
    measured = (
        Measured(result.peak_bytes, statistics.median(seconds), len(seconds)) if seconds else None
    )
    report = work.report(
        step.profile,
        batch,
        step.plan,
        measured=measured,
        limit_bytes=step.budget_bytes,
        audit=checked,
        losses=tuple(result.losses),
    )
    work.write(report, page)
    note(str(checked))
    note(f"page: {page}")


def _in_words(result: RunReport) -> str:
    if not result.losses:
        return f"Nothing to do: the run is at step {result.step} already. State: {result.out}"
    return (
        f"step {result.step}, loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}; measured: peak"
        f" {format_bytes(result.peak_bytes)} of {format_bytes(result.budget_bytes)},"
        f" {format_seconds(result.seconds)}. State: {result.out}"
    )


def digest_of(model: torch.nn.Module) -> str:
    """A checksum of all parameters, each one whole; on all ranks together."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole(parameter).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _as_json(work: Work, run: TrainingRun, result: RunReport, digest: str) -> str:
    losses = [loss if math.isfinite(loss) else None for loss in result.losses]
    return json_module.dumps(
        {
            "step": result.step,
            "epoch": result.epoch,
            "loss": losses[-1] if losses else None,
            "losses": losses,
            "grad_norm": result.grad_norm,
            "peak_bytes": result.peak_bytes,
            "budget_bytes": result.budget_bytes,
            "batch_size": work.batch_size,
            "exactness": exactness_json(run.step.profile) if run.step is not None else None,
            "seconds": result.seconds,
            "interrupted": result.interrupted,
            "out": result.out,
            "parameters_sha256": digest,
        }
    )


def _first(*choices: Any) -> Any:
    return next((choice for choice in choices if choice is not None), None)
