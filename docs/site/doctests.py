"""Shows the examples of docstrings as code: `>>>` begins one, an empty line ends it."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^([ \t]*)>>> .*(?:\n(?!\s*\n|\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around every example of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring before it is taken apart."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(match: re.Match[str]) -> str:
    indent = match.group(1)
    return f"{indent}```pycon\n{match.group()}\n{indent}```"
