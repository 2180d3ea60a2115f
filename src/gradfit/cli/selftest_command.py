"""`gradfit selftest`: what gradfit promises, checked on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from gradfit.cli.command_options import Debug, Json
from gradfit.cli.console import note, print_result, warnings_as_notes, working
from gradfit.errors import MisuseError

_Out = Annotated[
    Path,
    typer.Option(
        "--out", help="Directory for selftest.json and selftest.html.", show_default="here"
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Such as cuda:1 or cpu. Default: the accelerator, if any.",
        show_default=False,
    ),
]


def selftest(
    out: _Out = Path(), device: _Device = None, json: Json = False, debug: Debug = False
) -> None:
    """Compare gradfit with plain PyTorch and with the device's own counters, here, and write what
    was found.
    """
    from gradfit.runs.selftest import run_selftest  # which needs all of gradfit

    if not out.is_dir():
        raise MisuseError(
            f"There is no directory {str(out)!r} for --out. Make it, or pass another."
        )
    where = None if device is None else _read_device(device)
    with warnings_as_notes(), working("checking"):
        results = run_selftest(where)
    (out / "selftest.json").write_text(results.to_json())
    (out / "selftest.html").write_text(results.page())
    print_result(results.to_json() if json else str(results))
    note(f"written: {out / 'selftest.json'}, {out / 'selftest.html'}")
    if not results.passed:
        raise typer.Exit(1)


def _read_device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise MisuseError(
            f"--device {device!r} is no device of torch: {error}. Pass cpu, or cuda:0."
        ) from None
