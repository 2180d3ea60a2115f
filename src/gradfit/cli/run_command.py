"""`gradfit run`: somebody's script, as it is, below a budget."""

from __future__ import annotations

import json as json_module
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Annotated, Any

import typer

from gradfit.cli.command_options import Debug
from gradfit.cli.console import note, print_result
from gradfit.errors import BudgetInfeasible, MisuseError
from gradfit.fitting.any_loop import budget
from gradfit.units import format_seconds

_FAILED, _INFEASIBLE, _INTERRUPTED = 1, 3, 130


def run_script(
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            help="Budget for all tensors, such as '8 GiB', '80%' of what there is, or 'auto'.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str],
        typer.Argument(
            help="A Python file, or with -m a module, and what it is to find in sys.argv.",
            metavar="SCRIPT [ARGUMENTS]...",
            show_default=False,
        ),
    ],
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="What it took and cost, as JSON, in stdout's last line."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Run a script, unchanged, below a budget: what its models leave behind is dropped where room
    is needed, and rebuilt. Its exit code is the script's own, or 3 if the budget cannot be held.
    """
    script, arguments = target[0], target[1:]
    start = _module(script, arguments) if module else _file(script, arguments)
    began, process = time.perf_counter(), os.getpid()
    with budget(memory) as held:
        code = _exit_code(start)
    seconds = time.perf_counter() - began
    _flush()
    if os.getpid() != process:  # the script has forked, and this is not what was started
        return code
    if json:
        found = {**held.use._asdict(), "seconds": seconds, "exit_code": code}
        print_result(json_module.dumps(found))
    else:
        note(f"gradfit: {held.use}, of {format_seconds(seconds)} in all.")
    return code


def own_arguments(given: list[str]) -> list[str]:
    """Of a command line, what is gradfit's: behind the script of `run` it is the script's.

    >>> own_arguments(["run", "--memory", "8GiB", "-m", "train", "--json"])
    ['run', '--memory', '8GiB', '-m', 'train']
    """
    if given[:1] != ["run"]:
        return given
    place = 1
    while place < len(given) and given[place].startswith("-"):
        place += 2 if given[place] == "--memory" else 1
    return given[: place + 1]


def _file(script: str, arguments: list[str]) -> Callable[[], None]:
    """A script as `python script.py` runs it: it is `__main__`, and its folder is looked in
    first.
    """
    path = os.path.abspath(script)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise MisuseError(
            f"SCRIPT: {script!r} cannot be read: {error.strerror}. Pass a Python file, or -m and a"
            " module."
        ) from None

    def start() -> None:
        main: Any = types.ModuleType("__main__")
        main.__file__, main.__cached__ = path, None
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__builtins__ = sys.modules["builtins"]
        sys.modules["__main__"] = main
        _set_process(script, arguments, os.path.dirname(os.path.realpath(path)))
        exec(compile(source, path, "exec"), main.__dict__)

    return start


def _module(name: str, arguments: list[str]) -> Callable[[], None]:
    """A module as `python -m name` runs it."""

    def start() -> None:
        _set_process(name, arguments, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return start


def _set_process(script: str, arguments: list[str], folder: str) -> None:
    sys.argv = [script, *arguments]
    sys.excepthook = sys.__excepthook__  # the command's own is for while it starts
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 has it
        sys.path[:1] = [folder]  # where ours was


def _exit_code(start: Callable[[], None]) -> int:
    """Run it; an error is shown, and becomes an exit code, as Python does it."""
    try:
        start()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return _FAILED
    except BaseException as error:
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            return _INTERRUPTED
        return _INFEASIBLE if isinstance(error, BudgetInfeasible) else _FAILED
    return 0


def _show(error: BaseException) -> None:
    """The traceback from the script on, by whatever the script has set for that."""
    trace, own = error.__traceback__, {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _flush() -> None:
    """What the script has printed comes before what is said of it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
