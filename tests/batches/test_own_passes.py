"""Backward passes of trials are nobody's micro-batches; afterwards they are somebody's again."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import gradfit as gf
from gradfit.batches import snapshot
from gradfit.batches.snapshot import trials_end, untouched
from gradfit.own_passes import NobodysPasses, owner_of


def counted_passes(model: torch.nn.Module) -> int:
    """Of one plain backward pass, as an accumulator sees it."""
    accumulator = gf.GradientAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    model(torch.ones(1, 2)).sum().backward()
    try:
        return accumulator.current_step
    finally:
        accumulator.close()


def test_inside_of_trials_no_pass_counts_and_after_the_outermost_one_does() -> None:
    model = torch.nn.Linear(2, 1)
    with untouched(model):
        with untouched(model):
            assert counted_passes(model) == 0
        assert counted_passes(model) == 0
    assert owner_of(threading.get_ident()) is None
    assert counted_passes(model) == 1


def test_a_trial_that_ctrl_c_kept_from_ending_ends_with_its_context() -> None:
    """It can come as `__exit__` begins, before its first line."""

    class Interrupted(untouched):
        def __exit__(self, *error: object) -> None:
            raise KeyboardInterrupt

    model = torch.nn.Linear(2, 1)
    with pytest.raises(KeyboardInterrupt), trials_end(), Interrupted(model):
        pass
    assert owner_of(threading.get_ident()) is None

    def nobody_around() -> None:
        with Interrupted(model):
            pass

    with contextlib.suppress(KeyboardInterrupt):
        nobody_around()
    assert owner_of(threading.get_ident()) is None
    assert counted_passes(model) == 1
    with trials_end():
        snapshot._open.trials.clear()


def test_one_that_lives_longer_does_not_end_a_later_one() -> None:
    model = torch.nn.Linear(2, 1)
    old = NobodysPasses()
    with trials_end():
        trial = untouched(model)
        trial.__enter__()
        with trials_end():
            pass
        del old
        assert counted_passes(model) == 0
        trial.__exit__()
    assert owner_of(threading.get_ident()) is None
