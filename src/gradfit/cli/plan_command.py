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
from gradfit.profiling.profile import Profile
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
        # With a budget also where they are not wanted: an error then says what they would give.
        profile = work.profile(batch, tile=tile or budget is not None)
        chosen = None if budget is None else work.plan(profile, budget, fixed, tile=tile)
        plans = _trade_off(work, profile) if chosen is None else []
        show = _as_json if json else _in_words
        print_result(show(profile, chosen, plans))
        # without --memory nothing is chosen, and the page says so of no plan
        if report is not None:
            work.write(work.report(profile, batch, chosen, frontier=tuple(plans)), report)
            note(f"page: {report}")


def _trade_off(work: Work, profile: Profile) -> list[Plan]:
    with working("planning for every budget"):
        return frontier(profile, batch_size=work.batch_size if profile.splittable else None)


def _as_json(profile: Profile, chosen: Plan | None, plans: list[Plan]) -> str:
    if chosen is not None:
        return chosen.to_json()
    return json_module.dumps({"frontier": [json_module.loads(one.to_json()) for one in plans]})


def _in_words(profile: Profile, chosen: Plan | None, plans: list[Plan]) -> str:
    answer = _as_table(plans) if chosen is None else str(chosen)
    return f"{answer}\n{exactness_line(profile)}"


def _as_table(plans: list[Plan]) -> str:
    rows = [("peak", "step", "recomputation", "micro-batch × count", "values kept")]
    rows += [
        (
            format_bytes(one.peak_bytes),
            format_seconds(one.step_seconds),
            percent(one.extra_fraction),
            one.split_text,
            f"{one.kept_values} of {one.saved_values}",
        )
        for one in plans
    ]
    return "\n".join(
        [
            *columns(rows),
            "All of this is predicted from a measured profile. Pass --memory to choose one.",
        ]
    )
