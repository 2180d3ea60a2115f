"""The command line: `gradfit profile|plan|train|run|audit|demo`."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 done, 2 bad usage, 3 infeasible budget, 4 difference, 130
    interrupted.
    """
    from gradfit.cli.app import run

    return run(arguments)
