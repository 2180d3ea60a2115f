"""The guide's examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).parents[2] / "docs/guides/integrations.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_examples_run(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    assert names
