"""`gradfit plan`: what to keep and what to rebuild within a budget, or the whole trade-off."""

from __future__ import annotations

import json as json_module

from gradfit.cli.command_options import (
    BatchSize,
    Debug,
    Json,
    MemoryToPlan,
    MicroBatch,
    Page,
    Seed,
    Target,
    Tile,
    read_micro_batch,
)
from gradfit.cli.console import note, print_result, warnings_as_notes, working
from gradfit.cli.work import Work
from gradfit.errors import MisuseError
from gradfit.planning.api import frontier
from gradfit.planning.plan import Plan, percent
from gradfit.profiling.profile_table import columns
from gradfit.report.exactness import exactness_line
from gradfit.units import format_bytes, format_seconds


def plan(
    target: Target,
    memory: MemoryToPlan = None,
    batch_size: BatchSize = None,
    micro_batch: MicroBatch = None,
    tile: Tile = True,
    seed: Seed = 0,
    json: Json = False,
    report: Page = None,
    debug: Debug = False,
) -> None:
    """Plan for a budget: the micro-batch, what to keep, what to rebuild. Without --memory: the
    whole trade-off.
    """
    fixed = read_micro_batch(micro_batch)
    if fixed is not None and memory is None:
        raise MisuseError(
            "--micro-batch is for a plan, and the trade-off has many. Pass --memory too."
        )
    work = Work.load(target, batch_size=batch_size, seed=seed, page=report)
    budget = None if memory is None else work.budget(memory)
    with warnings_as_notes():
        batch = work.batch()
        found = work.profile(batch, tile=tile)
        made: Plan | None = None
        plans: list[Plan] = []
        if budget is not None:
            made = work.plan(found, budget, fixed)
            print_result(made.to_json() if json else f"{made}\n{exactness_line(found)}")
        else:
            with working("planning for every budget"):
                plans = frontier(found, batch_size=work.batch_size if found.splittable else None)
            print_result(
                _as_json(plans) if json else f"{_as_table(plans)}\n{exactness_line(found)}"
            )
        # without --memory nothing is chosen, and the page says so of no plan
        if report is not None:
            work.write(work.report(found, batch, made, frontier=tuple(plans)), report)
            note(f"page: {report}")


def _as_json(plans: list[Plan]) -> str:
    return json_module.dumps({"frontier": [json_module.loads(made.to_json()) for made in plans]})


def _as_table(plans: list[Plan]) -> str:
    rows = [("peak", "step", "recomputation", "micro-batch × count", "values kept")]
    rows += [
        (
            format_bytes(made.peak_bytes),
            format_seconds(made.step_seconds),
            percent(made.extra_fraction),
            made.split_text,
            f"{made.kept_values} of {made.saved_values}",
        )
        for made in plans
    ]
    return "\n".join(
        [
            *columns(rows),
            "All of this is predicted from a measured profile. Pass --memory to choose one.",
        ]
    )
