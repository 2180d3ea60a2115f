"""The examples run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    "accumulate_basics",
    "bad_micro_batches",
    "bfloat16_sums",
    "loss_terms",
    "resume_mid_window",
    "unequal_lengths",
    "variable_batches",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()
