"""Forwards that are run to count the items of parts."""

from __future__ import annotations

import gc
import weakref

import torch

from gradfit.batches.shares import without_activations


def test_a_forward_without_activations_leaves_nothing_behind() -> None:
    """A number that its own node saves, as a learned temperature's `exp` is, would hold the node
    that holds it.
    """
    temperature = torch.ones((), requires_grad=True)
    gone = weakref.ref(temperature)
    with without_activations():
        (torch.ones(3) * temperature.exp()).sum()
    del temperature
    gc.collect()
    assert gone() is None
