"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

import gradfit

_OURS = os.path.dirname(gradfit.__file__) + os.sep
_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, _OURS, "<")
_MODELS = tuple(os.path.join(_OURS, "train", name) for name in ("networks.py", "builtin.py"))  # read as a user's code


def source_line() -> str:
    """The line of the user's code, or of a library of theirs, that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY) or name in _MODELS:
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(path: str) -> str:
    """A library's file by its name in the library, the user's own from where they are."""
    marker = f"site-packages{os.sep}"
    if path.startswith(_OURS):
        return f"gradfit{os.sep}{path[len(_OURS) :]}"
    if marker in path:
        return path.split(marker, 1)[1]
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path
