"""What a run was begun with, written down before it measures or plans: a run killed before its first state keeps it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gradfit.errors import StateError

NAME = "run.json"
_KINDS = {"batch_size": int, "memory_bytes": int, "seed": int, "steps": int | None, "epochs": int | None}
_MAX_BYTES = 64 * 1024


def write_begun(directory: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run that begins in this directory, whole or not at all."""
    temporary = directory / f".{NAME}.tmp"
    temporary.write_text(json.dumps({"format": "gradfit-run", "settings": settings}), encoding="utf-8")
    os.replace(temporary, directory / NAME)


def read_begun(directory: Path) -> dict[str, Any] | None:
    """The settings of the run that was begun in this directory; None if none was."""
    path = directory / NAME
    if path.is_symlink() or not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes()[:_MAX_BYTES])
        settings = content["settings"] if content["format"] == "gradfit-run" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        settings = None
    if not are_settings(settings):
        raise StateError(f"{str(path)!r} does not say what the run was begun with. Remove it, and leave out --resume.")
    checked: dict[str, Any] = settings or {}
    return checked


def are_settings(settings: Any) -> bool:
    """Whether these are the numbers of a run, each of its kind."""
    return isinstance(settings, dict) and all(isinstance(settings.get(name), kind) for name, kind in _KINDS.items())
