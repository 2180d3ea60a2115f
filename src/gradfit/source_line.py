"""Which line of the user's code is running."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, FrameType

import torch

_OURS = os.path.dirname(__file__) + os.sep
_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, _OURS, "<")
# read as a user's code
_MODELS = tuple(
    os.path.join(_OURS, "runs", name) for name in ("builtin_networks.py", "builtin_jobs.py")
)

_is_users: dict[str, bool] = {}  # by file name: asked for each frame, for each root of a scope
_ENTRY = re.compile(r'\s*File "(.+)", line (\d+)')


# A function and an instruction in it: the line is looked up in an error only.
Place = tuple[CodeType, int]


def source_line() -> str:
    """The line of the user's code, or of a library of theirs, that is running."""
    return line_at(source_place())


def source_place(ours: int = 1) -> Place | None:
    """The same, to be put in words later.

    Args:
        ours: so many callers are gradfit's own; passing over them makes no objects of their frames.
    """
    frame: FrameType | None = sys._getframe(ours)
    is_users = _is_users.get
    # Hot: a scope asks for each root that it reads or saves.
    while frame is not None and not is_users(frame.f_code.co_filename, True):
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_filename
    if name in _is_users:
        return (frame.f_code, frame.f_lasti)
    _is_users[name] = not name.startswith(_LIBRARY) or name in _MODELS
    return source_place()


def line_at(place: Place | None) -> str:
    """A place in words."""
    return "" if place is None else f"{_short(place[0].co_filename)}:{_line_number(place)}"


def _line_number(place: Place) -> int:
    code, instruction = place
    lines = (line for first, end, line in code.co_lines() if first <= instruction < end)
    return next(filter(None, lines), code.co_firstlineno)


def line_in(stack: Sequence[str]) -> str:
    """The same for a stack as `traceback.format_stack` writes it, innermost last."""
    for entry in reversed(stack):
        match = _ENTRY.match(entry)
        if match is not None and not match[1].startswith(_LIBRARY):
            return f"{_short(match[1])}:{match[2]}"
    return ""


def _short(path: str) -> str:
    """A library's file by its name in the library, the user's own from where they are."""
    return _shortened(path, os.getcwd() + os.sep)


@functools.lru_cache(maxsize=1024)
def _shortened(path: str, here: str) -> str:
    marker = f"site-packages{os.sep}"
    if path.startswith(_OURS):
        return f"gradfit{os.sep}{path[len(_OURS) :]}"
    if marker in path:
        return path.split(marker, 1)[1]
    return path[len(here) :] if path.startswith(here) else path
