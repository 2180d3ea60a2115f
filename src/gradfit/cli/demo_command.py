"""`gradfit demo`: a process whose memory is really capped, where plain PyTorch dies and gradfit
trains.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import typer
from rich.console import Console
from rich.table import Table

from gradfit.cli.audit_command import EXIT_DIFFERENT
from gradfit.cli.command_options import Debug, Json, Page
from gradfit.cli.console import note, print_result, working
from gradfit.cli.demo_worker import BUDGET_BYTES, STEPS
from gradfit.errors import GradfitError, MisuseError
from gradfit.fitting.audit import AuditReport
from gradfit.planning.api import frontier
from gradfit.planning.plan import Plan
from gradfit.profiling.profile import Profile
from gradfit.report.curves import plain_peak_bytes
from gradfit.report.page import write_page
from gradfit.report.report_record import Measured, Report
from gradfit.units import format_bytes, format_seconds

_PAGE = Path("out/demo.html")
_ENVIRONMENT = {
    # The limit counts what is mapped, not what is in use: the C library is told to give freed
    # memory back at once.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait do not take the core from those that work
}


def demo(json: Json = False, report: Page = None, debug: Debug = False) -> None:
    """Train a language model where plain PyTorch runs out of memory. Takes no argument, no
    download, no accelerator.
    """
    started = time.perf_counter()
    page = report if report is not None else _PAGE
    _make_folder(page)
    note(
        "A GPT on 44 kB of prose, twice the same batches, twice the same process with the same cap"
        " on its memory."
    )
    plain = _run_plain()
    trained = _run_gradfit()
    plan, profile = Plan.from_json(trained["plan"]), Profile.from_json(trained["profile"])
    result, machine = _audit(plan)
    needed = plain_peak_bytes(profile, plan.batch_size)
    content = _report(plain, trained, profile, plan)
    write_page(
        dataclasses.replace(
            content, audit=result, environment=machine, notes=(_said(plain, needed),)
        ),
        page,
    )
    if json:
        print_result(json_module.dumps(_summary(plain, trained, result, page)))
    else:
        print_result(str(result))
        _print_table(plain, trained, needed)
        print_result(f"page: {page}   ({format_seconds(time.perf_counter() - started)})")
    if not result:
        raise typer.Exit(EXIT_DIFFERENT)


def _report(plain: dict[str, Any], trained: dict[str, Any], profile: Profile, plan: Plan) -> Report:
    """What both processes measured, beside what plans for other budgets would take."""
    with working("planning for other budgets, for the page"):
        size = plan.batch_size
        plans = frontier(profile, batch_size=size, points=10)
        alike = frontier(profile, batch_size=size, points=6, micro_batch=plan.micro_batch)
    seconds, end = trained["seconds"], "ends where it died" if plain["died"] else "it survived"
    return Report(
        "gradfit demo",
        profile,
        plan,
        measured=Measured(trained["peak_bytes"], statistics.median(seconds), len(seconds)),
        frontier=tuple(plans),
        same_size=tuple(alike),
        plain_curve=[(s, b) for s, b in plain["curve"]],
        plain_label=f"plain PyTorch, measured ({end})",
        planned_curve=[(s, b) for s, b in trained["curve"]],
        planned_label="gradfit, its first step, measured",
        limit_bytes=BUDGET_BYTES,
        losses=tuple(trained["losses"]),
    )


def _make_folder(page: Path) -> None:
    try:
        page.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(
            f"Cannot make {str(page.parent)!r}: {error.strerror}. Pass --report with another path."
        ) from None


def _run_plain() -> dict[str, Any]:
    cap: int | None = None
    with working("plain PyTorch"):
        for event in _events("plain"):
            if event["event"] == "capped":
                cap = event["cap_bytes"]
            else:
                outcome = {**event, "died": event["event"] == "died", "cap_bytes": cap}
    _note_outcome(outcome)
    return outcome


def _note_outcome(outcome: dict[str, Any]) -> None:
    if outcome["cap_bytes"] is None:
        note("This system has no RLIMIT_DATA: nothing is capped here, the peaks are the meter's.")
    if outcome["died"]:
        note(
            f"plain PyTorch died at {format_bytes(outcome['peak_bytes'])} of tensors, with its own"
            " words:"
        )
        note(f"  {outcome['error']}")
    else:
        note(f"plain PyTorch survived, with a peak of {format_bytes(outcome['peak_bytes'])}.")


def _run_gradfit() -> dict[str, Any]:
    outcome: dict[str, Any] = {"losses": [], "seconds": [], "peak_bytes": 0}
    with working("gradfit: measuring and planning", total=STEPS) as bar:
        task = bar.task_ids[0]
        for event in _events("fitted"):
            kind = event.pop("event")
            if kind == "stepped":
                _add_step(outcome, event)
                doing = f"gradfit: training, loss {event['loss']:.3f}"
                bar.update(task, completed=event["step"], description=doing)
                continue
            outcome.update(event)
            if kind == "planned":
                note(f"gradfit: {str(Plan.from_json(event['plan'])).splitlines()[0]}")
    note(
        f"gradfit: loss {outcome['losses'][0]:.3f} → {outcome['losses'][-1]:.3f} in"
        f" {len(outcome['losses'])} steps"
    )
    return outcome


def _add_step(outcome: dict[str, Any], event: dict[str, Any]) -> None:
    outcome["losses"].append(event["loss"])
    outcome["seconds"].append(event["seconds"])
    outcome["peak_bytes"] = max(outcome["peak_bytes"], event["peak_bytes"])


def _audit(plan: Plan) -> tuple[AuditReport, dict[str, str]]:
    with working("audit: one batch plainly and as planned, bit by bit"):
        (event,) = _events("audit", plan.to_json())
    return AuditReport.from_json(event["audit"]), event["environment"]


def _events(kind: str, told: str = "") -> Iterator[dict[str, Any]]:
    """What a child process says, as it says it; `told` is what it is told first."""
    command = [sys.executable, "-m", "gradfit.cli.demo_worker", kind]
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as given:
        given.write(told)
        given.seek(0)
        child = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        try:
            for line in child.stdout or ():
                yield json_module.loads(line)
        except BaseException:
            child.kill()
            raise
        finally:
            if child.stdout is not None:
                child.stdout.close()
            code = child.wait()
        if code != 0:
            raise GradfitError(
                f"The demo's process for {kind!r} ended with code {code}: {_last_line(errors)}"
            )


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or ["no message"])[-1]


def _said(plain: dict[str, Any], needed: int) -> str:
    cap = plain["cap_bytes"]
    limit = (
        f"RLIMIT_DATA capped both processes at {format_bytes(cap)}"
        if cap
        else "Nothing was capped on this system"
    )
    death = f"Plain PyTorch died: {plain['error']}" if plain["died"] else "Plain PyTorch survived."
    need = f"plain is predicted to need {format_bytes(needed)}"
    return f"{limit}, {format_bytes(BUDGET_BYTES)} of it for tensors; {need}. {death}"


def _summary(
    plain: dict[str, Any], trained: dict[str, Any], result: AuditReport, page: Path
) -> dict[str, Any]:
    return {
        "cap_bytes": plain["cap_bytes"],
        "budget_bytes": BUDGET_BYTES,
        "plain": {name: plain.get(name) for name in ("died", "error", "peak_bytes")},
        "gradfit": {name: trained[name] for name in ("losses", "seconds", "peak_bytes")},
        "audit": json_module.loads(result.to_json()),
        "page": str(page),
    }


def _print_table(plain: dict[str, Any], trained: dict[str, Any], needed: int) -> None:
    cap = plain["cap_bytes"]
    table = Table(title=f"the same cap for both: {format_bytes(cap)}" if cap else "without a cap")
    for name in ("", "plain PyTorch", "gradfit"):
        table.add_column(name)
    peak = format_bytes(trained["peak_bytes"])
    table.add_row(
        "peak of tensors", f"needs {format_bytes(needed)} (predicted)", f"{peak} (measured)"
    )
    table.add_row("budget for tensors", format_bytes(BUDGET_BYTES), format_bytes(BUDGET_BYTES))
    table.add_row(
        "outcome",
        "out of memory" if plain["died"] else "survived",
        f"{len(trained['losses'])} steps",
    )
    table.add_row("loss", "–", f"{trained['losses'][0]:.3f} → {trained['losses'][-1]:.3f}")
    table.add_row(
        "time per step",
        "–",
        f"{format_seconds(statistics.median(trained['seconds']))} (measured, median)",
    )
    Console(highlight=False).print(table)
