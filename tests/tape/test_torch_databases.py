"""Every operator and module that torch has samples for, in a scope, is what it is without one: see
torch_databases.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_databases import VARIANTS, Callee, Case, compare

from gradfit.recompute.scope import inside_scope

PROGRAM = Path(__file__).with_name("torch_databases.py")


def sweep(*arguments: str) -> int:
    """How many cases were compared, in a process of its own; none may differ, and none may end
    it.
    """
    command = [sys.executable, str(PROGRAM), *arguments]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    last = "\n".join(done.stderr.splitlines()[-20:])
    assert done.returncode == 0, f"died with {done.returncode} at {last}"
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert not wrong, "\n".join(wrong)
    counted = re.search(r"(\d+) compared", done.stdout)
    assert counted is not None, done.stdout
    return int(counted[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_differs_inside_a_scope_is_reported(variant: str) -> None:
    def differs(given: list[torch.Tensor]) -> torch.Tensor:
        return given[0].sin() * (1.5 if inside_scope() else 1.0)

    def refuses(given: list[torch.Tensor]) -> torch.Tensor:
        if inside_scope():
            raise ValueError("not here")
        return given[0].sin()

    x = [torch.randn(3, requires_grad=True)]
    assert (
        compare(Case("wrong", x[0].dtype, 0, x, lambda _: Callee(differs), []), variant) is not None
    )
    assert (
        compare(Case("refused", x[0].dtype, 0, x, lambda _: Callee(refuses), []), variant)
        == "forward: ValueError: not here"
    )
    assert (
        compare(
            Case("right", x[0].dtype, 0, x, lambda _: Callee(lambda given: given[0].sin()), []),
            variant,
        )
        is None
    )


def test_one_case_of_every_name_and_dtype() -> None:
    assert sweep("--sample", "1") > 1800


@pytest.mark.exact
@pytest.mark.slow  # they are among those above: for `make test-cpu`
def test_a_tenth_of_these() -> None:
    assert sweep("--sample", "0.1") > 180


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_cases(part: int) -> None:
    assert sweep("--part", str(part), "--parts", "4") > 15_000
