"""The policy that keeps nothing, for runs about which nothing is known yet."""

from __future__ import annotations

from typing import Any

import torch

from gradfit.tape.graph import Segment
from gradfit.tape.record import Recorder


class DropAll:
    """Drops everything, in segments of at most `quota_bytes`, so that the burst of a replay stays below that."""

    def __init__(self, quota_bytes: float) -> None:
        self.recorder: Recorder | None = None
        self._quota = quota_bytes
        self._filled = 0.0

    def choose(self, func: Any, results: list[torch.Tensor]) -> list[int] | None:
        self._filled += sum(result.untyped_storage().nbytes() for result in results)
        if self._filled > self._quota and self.recorder is not None:
            self._filled = 0.0
            segment = self.recorder.segment
            self.recorder.segment = Segment(segment.parent or segment, segment.scope)
        return None

    def offload(self, tensor: torch.Tensor) -> Any:
        raise RuntimeError("gradfit: what is dropped is not offloaded")
