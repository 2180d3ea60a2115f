"""Every test begins as a new process would, as far as accelerate is concerned."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def new_accelerate() -> None:
    """All accelerators of a process share one state: a Trainer's of one test would decide whether
    another's steps.
    """
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
