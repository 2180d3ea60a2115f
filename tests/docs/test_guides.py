"""The examples of the guides run, each guide from its first to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize("name", ["convert", "fit", "planning", "recompute"])
def test_examples_run(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 2
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), names)
