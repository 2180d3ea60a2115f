"""`gradfit audit`: is it really the same?"""

from __future__ import annotations

import typer

from gradfit.cli.command_options import (
    BatchSize,
    Debug,
    Json,
    MemoryToAudit,
    MicroBatch,
    Page,
    Seed,
    Target,
    read_micro_batch,
)
from gradfit.cli.console import note, print_result, warnings_as_notes, working
from gradfit.cli.work import Work
from gradfit.fitting.audit import audit as run_audit

EXIT_DIFFERENT = 4


def audit(
    target: Target,
    memory: MemoryToAudit = None,
    batch_size: BatchSize = None,
    micro_batch: MicroBatch = None,
    seed: Seed = 0,
    json: Json = False,
    report: Page = None,
    debug: Debug = False,
) -> None:
    """Run a batch plainly and as planned: is the replay bit-identical, and is the gradient the full
    batch's?

    Without --memory: the smallest plan. Exit code 4: the replay differs, or parts do not add up.
    """
    fixed = read_micro_batch(micro_batch)
    work = Work.load(target, batch_size=batch_size, seed=seed, page=report)
    budget = None if memory is None else work.budget(memory)
    with warnings_as_notes():
        batch = work.batch()
        profile = work.profile(batch)
        plan = work.plan(profile, budget, fixed)
        with working("running the batch plainly and as planned"):
            result = run_audit(
                work.job.model, work.job.loss_fn, batch, plan=plan, split=work.job.split
            )
        print_result(result.to_json() if json else f"{str(plan).splitlines()[0]}\n{result}")
        if report is not None:
            work.write(work.report(profile, batch, plan, audit=result), report)
            note(f"page: {report}")
    if not result:
        raise typer.Exit(EXIT_DIFFERENT)
