"""From what stands on the command line as TARGET to the job it names; every mistake becomes one
line.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradfit.errors import MisuseError
from gradfit.runs.builtin_jobs import JOBS
from gradfit.runs.job import Job


class TargetError(MisuseError):
    """A TARGET that does not give a job; the message is one line."""


def load_target(target: str) -> Job:
    """The job behind `file.py:function`, `package.module:function`, or a built-in name.

    >>> load_target("gtp")
    Traceback (most recent call last):
    ...
    gradfit.runs.job_loader.TargetError: There is no built-in job 'gtp'. Pass one of bert, gpt,
    resnet, vit, or file.py:function.
    """
    if ":" not in target:
        return _builtin_job(target)
    named = _named_in_module(target)
    return named if isinstance(named, Job) else _job_made_by(named, target)


def _job_made_by(function: Any, target: str) -> Job:
    if not callable(function):
        raise TargetError(
            f"{target} is of type {type(function).__name__}. Make it a function that returns a"
            " gradfit.Job."
        )
    job = _guarded(target, "raised", function)
    if not isinstance(job, Job):
        raise TargetError(f"{target} returned {type(job).__name__}. Return a gradfit.Job.")
    return job


def _builtin_job(target: str) -> Job:
    if target in JOBS:
        return JOBS[target]()
    if target.endswith(".py"):
        raise TargetError(f"{target!r} does not say which function. Pass {target}:function.")
    names = ", ".join(sorted(JOBS))
    raise TargetError(
        f"There is no built-in job {target!r}. Pass one of {names}, or file.py:function."
    )


def _named_in_module(target: str) -> Any:
    """What a target names in its file or module."""
    place, _, name = target.rpartition(":")
    import_module = _module_from_file if place.endswith(".py") else _module_by_name
    module = import_module(place, target)
    function = getattr(module, name, None)
    if function is None:
        names = sorted(_functions_of(module))[:8]
        listed = f"It has {', '.join(names)}." if names else "It defines no function."
        raise TargetError(f"{place} has no {name!r}. {listed}")
    return function


def _functions_of(module: Any) -> list[str]:
    own = module.__name__
    return [
        name
        for name, item in vars(module).items()
        if callable(item) and getattr(item, "__module__", "") == own
    ]


def target_name(target: str) -> str:
    """A short name for a target that is safe as a file name.

    >>> target_name("examples/my_job.py:make"), target_name("gpt")
    ('my_job-make', 'gpt')
    """
    place, _, name = target.rpartition(":")
    stem = Path(place.removesuffix(".py")).name if place else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{stem}-{name}" if stem else name).strip("-.") or "job"


def _module_from_file(place: str, target: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise TargetError(
            f"There is no file {place!r}. Pass file.py:function with a path from"
            f" {Path.cwd().name}/."
        )
    # whoever imports that module must get it, not the job
    is_taken = path.stem in sys.stdlib_module_names or path.stem in sys.modules
    name = f"gradfit_job_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{place!r} is not a Python file. Pass file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses and data-loading workers find it
    _let_neighbours_be_imported(path)
    _guarded(target, "cannot be imported:", spec.loader.exec_module, module)
    return module


def _let_neighbours_be_imported(path: Path) -> None:
    """As `python file.py` does; last, where the file has the name of a module of Python's own."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        shadows = path.stem in sys.stdlib_module_names
        sys.path.insert(len(sys.path) if shadows else 0, folder)


def _module_by_name(place: str, target: str) -> Any:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", place):
        raise TargetError(
            f"{target!r} is not a target. Pass file.py:function or package.module:function."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return _guarded(target, "cannot be imported:", importlib.import_module, place)
    except TargetError as error:
        missing = _missing_module(error)
        if missing and place.startswith(missing):
            raise TargetError(
                f"There is no module {missing!r}. Pass file.py:function for a file."
            ) from error.__cause__
        raise


def _missing_module(error: TargetError) -> str | None:
    cause = error.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None


def _guarded(target: str, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the user's code; whatever it raises becomes one line that says where."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some exceptions of libraries are no `Exception`
        place = _place_of(error, target)
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, SystemExit):
            raise TargetError(
                f"{target} called sys.exit({error.code!r}){place}. Let it return a gradfit.Job, or"
                " raise an exception."
            ) from error
        raise TargetError(f"{target} {what} {type(error).__name__}: {text}{place}") from error


def _place_of(error: BaseException, target: str) -> str:
    """The line of the user's code that raised, in brackets."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename or target).name}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_users(filename: str) -> bool:
    return filename != __file__ and "<frozen" not in filename
