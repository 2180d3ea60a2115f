"""Ctrl-C while the `gradfit` command is still loading torch, which takes seconds: one line, not a
traceback.

Imported before all else. In any other program this does nothing.
"""

from __future__ import annotations

import json
import os
import sys
from types import TracebackType

_INTERRUPTED = 130


def is_command() -> bool:
    """Whether this process is `gradfit …` or `python -m gradfit …`."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":  # while the package that was named is imported
        return "gradfit" in sys.orig_argv[:4]
    return os.path.basename(started) in ("gradfit", "gradfit.exe", "gradfit-script.py")


def _say_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if "--json" in sys.orig_argv:
        print(json.dumps({"error": "Interrupted.", "exit_code": _INTERRUPTED}), flush=True)
    print("gradfit: Interrupted.", file=sys.stderr, flush=True)
    os._exit(_INTERRUPTED)


if is_command():
    sys.excepthook = _say_interrupted
