"""`gradfit estimate`: will it fit on a machine that is not here?"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from gradfit.cli.command_options import BatchSize, Debug, Json, Seed, Target
from gradfit.cli.console import print_result, warnings_as_notes, working
from gradfit.cli.work import Work
from gradfit.errors import InvalidParameter, MisuseError
from gradfit.fitting.estimate import estimate as make_estimate
from gradfit.machines import MACHINES, find_machine
from gradfit.profiling.profile import Hardware
from gradfit.units import parse_bytes

_Machine = Annotated[
    str,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help=f"The machine: a size of memory such as '24 GiB', or one of {', '.join(MACHINES)}.",
    ),
]


def estimate(
    target: Target,
    hardware: _Machine = "a100-80gb",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a step would fit on a named machine, on shapes alone: the peak by part, and what
    each lever gives.
    """
    machine = _machine(hardware)
    work = Work.load(target, batch_size=batch_size, seed=seed)
    with warnings_as_notes():
        batch, job = work.batch(), work.job
        with working("following one step on shapes"):
            estimate_of_job = make_estimate(
                job.model, job.loss_fn, batch, job.optimizer, machine, split=job.split
            )
        print_result(estimate_of_job.to_json() if json else str(estimate_of_job))


def _machine(hardware: str) -> Hardware | str:
    """A size, or the name of a machine that there is."""
    if hardware[:1].isdigit():
        return Hardware(parse_bytes(hardware, name="--hardware"))
    try:
        find_machine(hardware, torch.float32)
    except InvalidParameter as error:
        raise MisuseError(
            f"--hardware={hardware!r} {error.reason}. Pass a size of memory such as '24 GiB', or"
            f" one of {', '.join(MACHINES)}."
        ) from None
    return hardware
