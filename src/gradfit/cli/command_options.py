"""The options that several commands share, described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradfit.errors import MisuseError

Target = Annotated[
    str,
    typer.Argument(
        help=(
            "file.py:function or package.module:function, returning a gradfit.Job; or bert, gpt,"
            " resnet, vit."
        ),
        metavar="TARGET",
        show_default=False,
    ),
]


def _memory(default: str) -> Any:
    """--memory, and what a command does without it."""
    text = f"Budget for all tensors of a step, such as '200 MiB'. Default: {default}."
    return typer.Option("--memory", help=text, show_default=False)


MemoryToTrain = Annotated[
    str | None,
    _memory(
        "four fifths of what is free, divided among a CPU's ranks; with --resume the run's own"
    ),
]
MemoryToPlan = Annotated[str | None, _memory("none, the whole trade-off is shown")]
MemoryToAudit = Annotated[str | None, _memory("the smallest that can be held")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size", min=1, help="Rows in one update. Default: the job's.", show_default=False
    ),
]
MicroBatch = Annotated[
    str | None,
    typer.Option(
        "--micro-batch",
        metavar="SIZE",
        help="Rows that run at once, or 'whole' never to cut a batch. Default: chosen.",
        show_default=False,
    ),
]
Tile = Annotated[
    bool,
    typer.Option("--tile/--no-tile", help="Whether plans may cut along tokens (lazy logits), too."),
]
MOST_SEED = 2**63 - 1
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, max=MOST_SEED, help="Seeds the model, the data's order and all randomness."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Page = Annotated[
    Path | None,
    typer.Option("--report", help="Write a self-contained HTML page here.", show_default=False),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def read_micro_batch(text: str | None) -> int | str | None:
    """What --micro-batch says: a number of rows, "whole", or nothing.

    >>> read_micro_batch("8"), read_micro_batch("whole"), read_micro_batch(None)
    (8, 'whole', None)
    """
    if text is None or text == "whole":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise MisuseError(
            f"--micro-batch={text!r} is no number of rows. Pass an int of at least 1, or 'whole'."
        )
    return int(text)
