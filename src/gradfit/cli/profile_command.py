"""`gradfit profile`: what one step does."""

from __future__ import annotations

from gradfit.cli.command_options import BatchSize, Debug, Json, Page, Seed, Target
from gradfit.cli.console import note, print_result, warnings_as_notes
from gradfit.cli.work import Work


def profile(
    target: Target,
    batch_size: BatchSize = None,
    seed: Seed = 0,
    json: Json = False,
    report: Page = None,
    debug: Debug = False,
) -> None:
    """Measure one step: seconds and bytes by module and by source line, and what autograd saves."""
    work = Work.load(target, batch_size=batch_size, seed=seed, page=report)
    with warnings_as_notes():
        batch = work.batch()
        measured = work.profile(batch)
        print_result(measured.to_json() if json else str(measured))
        if report is not None:
            work.write(work.report(measured, batch), report)
            note(f"page: {report}")
