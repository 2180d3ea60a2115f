"""What a person sees: progress on stderr, results on stdout, warnings as one line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from gradfit.errors import ExactnessWarning, GradfitError

console = Console(stderr=True, highlight=False)


class ResultNotPrinted(GradfitError):
    """There is a result, and nowhere to write it."""


_held: list[str] | None = None  # results that wait for the end of the command


def print_result(text: str) -> None:
    """A result, on stdout, as it is: no markup, no wrapping."""
    if _held is not None:
        _held.append(text)
        return
    try:
        print(text.rstrip("\n"), flush=True)
    except (OSError, ValueError) as error:  # it is full, closed, or its reader is gone
        let_go_of_stdout()
        if isinstance(error, BrokenPipeError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise ResultNotPrinted(f"The result could not be written to stdout: {why}.") from error


def let_go_of_stdout() -> None:
    """Nothing more can be written there: Python shall not try again at its exit, either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or no file
        sys.stdout = os.fdopen(nowhere, "w")


@contextlib.contextmanager
def results_at_the_end(*, alone: bool) -> Iterator[None]:
    """Print results when the block has ended well, and not at all if it fails: then an error is the
    one document.

    Args:
        alone: what a job prints meanwhile goes to stderr, so that a document is all on stdout.
    """
    global _held
    held: list[str] = []
    _held = held
    try:
        with _prints_on_stderr() if alone else contextlib.nullcontext():
            yield
    finally:
        _held = None
    for text in held:
        print_result(text)


@contextlib.contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """Of this process's Python, of its libraries, and of the processes that it starts."""
    try:
        out, error = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # somebody has put an object in its place
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(error, out)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            os.dup2(kept, out)
            os.close(kept)


def note(text: str) -> None:
    """One line beside the result."""
    console.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def working(what: str, total: int | None = None) -> Iterator[Progress]:
    """A bar, or a spinner where the end is not known, while the block runs; only on a terminal, and
    gone afterwards.
    """
    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), MofNCompleteColumn()] if total is not None else []
    columns.append(TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task(what, total=total)
        yield progress


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Say what gradfit warns about in one line each, and nothing of where in the library it was
    raised.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", ExactnessWarning)
        shown: set[str] = set()
        original = warnings.showwarning

        def show(message: Any, category: Any, *place: Any, **more: Any) -> None:
            if not issubclass(category, ExactnessWarning):
                original(message, category, *place, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                note(f"note: {message}")

        warnings.showwarning = show
        yield
