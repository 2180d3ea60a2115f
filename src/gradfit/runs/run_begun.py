"""What a run was begun with, written down before it measures or plans: a run killed before its
first state keeps it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gradfit.errors import StateError
from gradfit.runs.run_state import check_settings
from gradfit.runs.state_files import naming, open_regular
from gradfit.state_checks import fields, text

NAME = "run.json"
_MAX_BYTES = 64 * 1024


def write_begun(directory: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run that begins in this directory, whole or not at all."""
    temporary = directory / f".{NAME}.tmp"
    with naming(directory):
        temporary.unlink(missing_ok=True)  # a link would be followed
        temporary.write_text(
            json.dumps({"format": "gradfit-run", "settings": settings}), encoding="utf-8"
        )
        os.replace(temporary, directory / NAME)


def read_begun(directory: Path) -> dict[str, Any] | None:
    """The settings of the run that was begun in this directory; None if none was."""
    path = directory / NAME
    if path.is_symlink() or not path.is_file():
        return None
    try:
        with open_regular(path) as file:
            content = json.loads(file.read(_MAX_BYTES))
        fields({"format": text("gradfit-run"), "settings": check_settings})("It", content)
    except (ValueError, RecursionError) as error:  # a StateError is one
        raise StateError(
            f"{str(path)!r} does not say what the run was begun with ({error}). Remove it, and"
            " leave out --resume."
        ) from None
    settings: dict[str, Any] = content["settings"]
    return settings
