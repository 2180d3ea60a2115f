"""Ctrl-C at any moment: nothing is half done, and the next step is right. Each kind of work in a child of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import AtLine, interrupted

from gradfit.interrupts import uninterrupted
from gradfit.tape import rng

KINDS = ("step", "fit", "profile", "audit", "scopes", "saves")


def interrupt(kind: str, count: int, seed: int) -> dict[str, Any]:
    script = Path(__file__).with_name("interrupts.py")
    done = subprocess.run(
        [sys.executable, str(script), kind, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_some_interrupts(kind: str) -> None:
    found = interrupt(kind, 4, 0)
    assert found["wrong"] == []
    assert found["interrupts"] == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_interrupts(kind: str) -> None:
    found = interrupt(kind, 340, 1)
    assert found["wrong"] == []
    assert found["interrupts"] == 340


def test_an_interrupt_waits_for_the_end_and_then_comes() -> None:
    done = []

    def two_blocks() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("beyond")

    with pytest.raises(KeyboardInterrupt):
        two_blocks()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_generator_is_rewound_waits_and_leaves_no_lock() -> None:
    """It may come as soon as the lock is taken, before any `try` begins: then nobody would give it back."""
    before = torch.get_rng_state()
    lines = 0

    def rewind() -> None:
        with rng.Rewound() as rewound:
            rewound.start((torch.default_generator, torch.Generator().manual_seed(3).get_state()), False)
            torch.rand(3)

    while True:
        lines += 1
        tracer = AtLine(lines)
        interrupted(rewind, tracer)
        assert not rng._global._is_owned(), lines  # type: ignore[attr-defined]
        assert torch.equal(torch.get_rng_state(), before), lines
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if tracer.lines < lines:
            break
    assert lines > 20
