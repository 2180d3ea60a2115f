"""How a micro-batch is run under a budget: as its plan says, or below a limit, evicting as memory
fills up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradfit.batches.runner import LossFunction, Mode
from gradfit.fitting.tested_plan import TestedPlan
from gradfit.recompute.evict import Online


class Planned(Mode):
    """By a tested plan.

    Args:
        tested: the plan.
        inside: what else the forward runs in, of a trial.
    """

    def __init__(
        self,
        tested: TestedPlan,
        *,
        inside: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._tested, self._inside = tested, inside
        self.followed: Any = None
        """What the forward ran in, once it has."""

    def wrap(self, loss_fn: LossFunction) -> LossFunction:
        return self._tested.tiled(loss_fn)

    def around_forward(self) -> contextlib.AbstractContextManager[object]:
        self.followed = self._tested.following()
        if self._inside is None:
            return self.followed  # type: ignore[no-any-return]
        return self._both(self._inside)

    @contextlib.contextmanager
    def _both(self, inside: contextlib.AbstractContextManager[object]) -> Iterator[None]:
        with self.followed, inside:
            yield


class WithinLimit(Mode):
    """Below a limit, where the operations are not those of a plan.

    Args:
        tested: its tiles are used.
        limit_bytes: for all tensors.
        watched: what is there already, and counts.
        device: whose memory the limit is about; None for the CPU's.
    """

    def __init__(
        self,
        tested: TestedPlan,
        limit_bytes: int,
        *watched: Any,
        device: torch.device | None = None,
    ) -> None:
        self._tested, self._limit_bytes, self._watched, self._device = (
            tested,
            limit_bytes,
            watched,
            device,
        )

    def wrap(self, loss_fn: LossFunction) -> LossFunction:
        return self._tested.tiled(loss_fn)

    @contextlib.contextmanager
    def around_both(self) -> Iterator[None]:
        with Online(self._limit_bytes, device=self._device) as online:
            online.evictor.watch(*self._watched)
            yield
