"""`gradfit audit`: is it really the same?"""

from __future__ import annotations

import typer

from gradfit.cli.console import note, print_result, warnings_as_notes, working
from gradfit.cli.options import BatchSize, Debug, Json, Memory, Page, Seed, Target
from gradfit.cli.work import Work
from gradfit.planning.api import frontier
from gradfit.planning.api import plan as make_plan
from gradfit.train.audit import audit as run_audit

EXIT_DIFFERENT = 4


def audit(
    target: Target,
    memory: Memory = None,
    batch_size: BatchSize = None,
    seed: Seed = 0,
    json: Json = False,
    report: Page = None,
    debug: Debug = False,
) -> None:
    """Run a batch plainly and as planned: is the replay bit-identical, and is the gradient the full batch's?

    Without --memory: the smallest plan. Ends with exit code 4 if the replay differs, or the parts do not add up.
    """
    work = Work.load(target, batch_size=batch_size, seed=seed, page=report)
    budget = None if memory is None else work.budget(memory)
    with warnings_as_notes():
        batch = work.batch()
        found = work.profile(batch)
        size = work.batch_size if found.splittable else None
        with working("planning"):
            if budget is not None:
                plan = make_plan(found, memory=budget, batch_size=size)
            else:
                plan = min(frontier(found, batch_size=size, points=2), key=lambda made: made.peak_bytes)
        with working("running the batch plainly and as planned"):
            result = run_audit(work.job.model, work.job.loss_fn, batch, plan=plan, split=work.job.split)
        print_result(result.to_json() if json else f"{str(plan).splitlines()[0]}\n{result}")
        if report is not None:
            work.write(work.report(found, batch, plan, audit=result), report)
            note(f"page: {report}")
    if not result:
        raise typer.Exit(EXIT_DIFFERENT)
