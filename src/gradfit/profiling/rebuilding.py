"""Both passes of a forward about which nothing is known yet, in little memory: all is rebuilt in
the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.autograd.graph import saved_tensors_hooks

from gradfit.tape.rebuild_all import RebuildAll
from gradfit.tape.recorder import Recorder
from gradfit.tape.saved_tensors import unpack
from gradfit.tape.values import Segment, Tape


@contextlib.contextmanager
def rebuilding(quota_bytes: float) -> Iterator[None]:
    """Inside, run a forward and its backward.

    Args:
        quota_bytes: what is rebuilt at once, about.
    """
    around, tape = Segment(None), Tape()
    recorder = Recorder(Segment(around), RebuildAll(quota_bytes, tape, around), tape=tape)
    with recorder, saved_tensors_hooks(recorder.pack, unpack):
        yield
