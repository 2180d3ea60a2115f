"""Both passes of a forward about which nothing is known yet, in little memory: all is rebuilt in
the backward pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradfit._torch_listen import untraced
from gradfit.batches.passes import BetweenPasses
from gradfit.tape.rebuild_all import RebuildAll
from gradfit.tape.recorder import Recorder
from gradfit.tape.saved_tensors import unpack
from gradfit.tape.values import Handle, Segment, Tape


@contextlib.contextmanager
def rebuilding(quota_bytes: float) -> Iterator[BetweenPasses]:
    """Inside, run a forward and its backward.

    Args:
        quota_bytes: what is rebuilt at once, about.
    """
    around, tape = Segment(None), Tape()
    policy = RebuildAll(quota_bytes, tape, around)
    recorder = Recorder(Segment(around), policy, tape=tape)
    handles: list[weakref.ref[Handle]] = []

    @untraced
    def pack(tensor: torch.Tensor) -> Any:
        packed = recorder.pack(tensor)
        if type(packed) is Handle:
            handles.append(weakref.ref(packed))
        return packed

    def end_forward() -> None:
        there = [handle for reference in handles if (handle := reference()) is not None]
        policy.end_forward(handle.value for handle in there)

    with recorder, saved_tensors_hooks(pack, unpack):
        yield BetweenPasses(end_forward)
