"""The policy that keeps nothing, for runs about which nothing is known yet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from gradfit.choices import REBUILD
from gradfit.tape.decisions import TapeDecision
from gradfit.tape.segments import assign_segments
from gradfit.tape.stream import new_bytes
from gradfit.tape.values import Segment, Tape, TapeValue

_SEGMENTS = 4  # quotas, which rebuilding may take beside the gradients in flight
_FEW = 300  # operations that can be rebuilt one by one: their replays grow with the square


class RebuildAll:
    """Rebuilds everything, in segments of at most `quota_bytes`: the burst of a replay stays below
    that.

    What leads from one segment to another is retained once it is rebuilt. Where most bytes are of
    results that fill a segment alone, that would be nearly everything: then nothing is retained,
    and each value is rebuilt from the beginning whenever it is needed. Once the forward is known
    whole, `end_forward` cuts it again, where the least leads over.
    """

    def __init__(self, quota_bytes: float, tape: Tape, segment: Segment) -> None:
        self._quota = quota_bytes
        self._tape, self._around = tape, segment
        self._filled = 0.0
        self._operations = 0
        self._bytes = self._large_bytes = 0

    def decide(self, func: Any, results: list[torch.Tensor], *call: Any) -> TapeDecision | None:
        nbytes = sum(new_bytes(result) for result in results)
        self._filled += nbytes
        self._operations += 1
        self._bytes += nbytes
        self._large_bytes += nbytes if nbytes > self._quota / 2 else 0
        self._tape.retains = self._operations > _FEW or self._large_bytes < self._bytes / 2
        if self._filled <= self._quota:
            return None
        self._filled = 0.0
        return TapeDecision((REBUILD,) * len(results), Segment(self._around))

    def end_forward(self, saved: Iterable[TapeValue]) -> None:
        """Nothing more will be decided.

        Args:
            saved: the values that backward will ask for.
        """
        saved = list(saved)
        if math.isinf(self._quota) or _are_in_scopes(saved):
            return
        needed = assign_segments(saved, self._around)
        self._tape.retains = self._operations > _FEW or needed < _SEGMENTS * self._quota


def _are_in_scopes(values: Iterable[TapeValue]) -> bool:
    """Whether some belong to scopes of the user's own, which are segments already."""
    return any(value.segment.scope is not None for value in values)
