"""What plans are made for: one step, the budget that it is to hold, and what was asked for. None of
it changes while there are plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gradfit import _torch_distributed as distributed
from gradfit._torch_distributed import local_part
from gradfit.batches.runner import MicroBatchRunner
from gradfit.devices import counted_device, devices_of
from gradfit.fitting.batch_shapes import Shape
from gradfit.planning.named_choices import Named

_NUMBERS_BYTES = 2048  # weights and norms of the accumulator, as scalars


@dataclass(frozen=True, eq=False)
class StepToPlan:
    """A step, its budget, and what was asked for.

    Args:
        runner: cuts its batches and runs the parts; it has the model and the loss.
        optimizer: there all the time, as the model is.
        budget_bytes: what the step may take.
        offload: values may be moved out of the device's memory.
        named: what becomes of values by their names.
        reproducible: the micro-batch is chosen by arithmetic, not by the clock.
        reserved_bytes: of communication buckets, which no meter sees.
        reduce_bytes: what adding up over the ranks takes for a moment.
        wide: in which type the optimizer works, if the parameters are narrower.
        scaler: scales the losses and steps the optimizer; None if nobody scales.
        is_ours: its update is ours, too: while the optimizer steps there is a copy of what it
            changes, if the budget has room, and it may be stepped in groups.
        micro_batch: the size that was asked for, if one was.
        whole: the batch is never to be cut.
        exact: what does not add up is not cut.
        tile: plans may cut along tokens.
        plan_ahead: all plans are compared before the first step.
    """

    runner: MicroBatchRunner
    optimizer: Any
    budget_bytes: int
    offload: bool = False
    named: Named = field(default_factory=dict)
    reproducible: bool = False
    reserved_bytes: int = 0
    reduce_bytes: int = 0
    wide: torch.dtype | None = None
    scaler: Any = None
    is_ours: bool = False
    micro_batch: int | None = None
    whole: bool = False
    exact: bool = True
    tile: bool = True
    plan_ahead: bool = True

    @property
    def model(self) -> torch.nn.Module:
        return self.runner.model

    @cached_property
    def own_bytes(self) -> int:
        """Of what a step holds beside its passes: copies of the buffers, to go back to, and a few
        numbers for the accumulator.
        """
        return sum(buffer.nbytes for buffer in self.model.buffers()) + _NUMBERS_BYTES

    @property
    def beside_bytes(self) -> int:
        """Of the budget, what the passes and the update cannot have."""
        return self.own_bytes + self.reserved_bytes

    @cached_property
    def limit_bytes(self) -> int:
        """Of the budget, what the passes and the update may take."""
        return max(1, self.budget_bytes - self.beside_bytes)

    @cached_property
    def device(self) -> torch.device | None:
        """Whose memory the budget is about."""
        return counted_device(self.model)

    @cached_property
    def devices(self) -> set[torch.device]:
        """That the parameters are on."""
        return devices_of(self.model.parameters())

    @property
    def compares_ahead(self) -> bool:
        """Whether all plans are compared before the first step, as it is where clocks must not
        decide, or each rank has its own.
        """
        return self.plan_ahead or self.reproducible or distributed.is_running()

    @property
    def updates_in_groups(self) -> bool:
        """Whether the update may be run over groups of parameters: it is ours, and no gradient is
        sparse.
        """
        return self.is_ours and not has_sparse_gradients(self.model)


class PlanRequest(NamedTuple):
    """What a plan is wanted for."""

    batch: Any
    batch_size: int
    """Rows of a step; 0 if that is open."""
    shape: Shape
    is_first: bool
    """There is no plan yet: names that were asked for must be found."""


def has_sparse_gradients(model: torch.nn.Module) -> bool:
    """Whether an embedding's are: torch adds them up by putting one behind the other, so that they
    grow with each micro-batch.
    """
    return any(getattr(module, "sparse", False) for module in model.modules())


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of this rank's parts of them."""
    return sum(local_part(tensor).nbytes for tensor in tensors)
