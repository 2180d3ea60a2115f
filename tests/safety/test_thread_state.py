"""A context that is interrupted as it begins leaves its setting behind, torch's own too: a snapshot
takes it away.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import gradfit as gf
from gradfit._torch_listen import ThreadState
from gradfit.batches.snapshot import untouched
from gradfit.recompute.scope import inside_scope
from gradfit.tape import process_settings

LEAVE: dict[str, Callable[[], object]] = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__(),
    "modes": lambda: gf.meter().__enter__(),
    "recorder": lambda: gf.CheckpointScope("left").__enter__(),
    "eager functions": lambda: process_settings.recording_begins(LEAVE),
}


@pytest.mark.parametrize("what", LEAVE)
def test_what_is_left_behind_is_taken_away(what: str) -> None:
    model = nn.Linear(2, 2)
    before = ThreadState()
    with untouched(model):
        LEAVE[what]()
    after = ThreadState()
    names = ("_gradients", "_hooks", "_modes", "_listener", "_excluded")
    assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]
    assert not inside_scope()
    assert not process_settings._recordings
    assert torch._dynamo.eval_frame._stance.stance == "default"
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_a_context_that_is_closed_late_takes_nobody_elses_mode() -> None:
    """Ctrl-C can leave a generator's context open; it is closed when the generator is collected."""

    def metered() -> Generator[None, None, None]:
        with gf.meter():
            yield

    left = metered()
    with untouched(nn.Linear(2, 2)):
        next(left)
    assert not is_in_torch_dispatch_mode()
    with gf.meter() as live:
        left.close()
        held = torch.zeros(1000)
    assert live.peak_bytes == held.nbytes
