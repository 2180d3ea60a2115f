"""Every kind of loss and batch in docs/exactness.md is exact in micro-batches, or refused with the
right next call.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "exactness.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("exactness", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exactness"] = module
    spec.loader.exec_module(module)
    return module


table = _load()


@pytest.mark.parametrize("kind", table.KINDS, ids=lambda kind: kind.name)
def test_exact_or_refused(kind: Any) -> None:
    outcome = table.run(kind)
    if kind.refused:
        assert outcome.error is None
        assert kind.refused in outcome.refused
        assert kind.misuse or outcome.whole_error <= table.EXACT
    else:
        assert outcome.is_exact, outcome


def test_the_page_lists_every_kind_with_its_outcome() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert len(table.KINDS) >= 30
    shown = dict(re.findall(r"^\| (.+?) \| (exact|not cut|refused)", page, re.MULTILINE))
    expected = {
        kind.name: ("refused" if kind.misuse else "not cut") if kind.refused else "exact"
        for kind in table.KINDS
    }
    assert shown == expected
