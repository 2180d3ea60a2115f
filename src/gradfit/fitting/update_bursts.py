"""What an update takes for a moment, beside parameters, gradients and the optimizer's state."""

from __future__ import annotations

import dataclasses

import torch

from gradfit._torch_distributed import local_part
from gradfit.fitting.step_to_plan import StepToPlan, local_bytes, trained
from gradfit.profiling.profile import Profile
from gradfit.profiling.update_groups import with_bursts


def with_update_bursts(step: StepToPlan, profile: Profile) -> Profile:
    """The profile, with what an update of this step takes for a moment."""
    bursts = [_burst(step, profile, way.burst_bytes) for way in profile.update_ways]
    return dataclasses.replace(
        profile,
        optimizer_burst_bytes=_burst(step, profile, profile.optimizer_burst_bytes),
        # somebody else's step is not run in groups
        update_ways=with_bursts(profile.update_ways, bursts) if step.updates_in_groups else (),
    )


def _burst(step: StepToPlan, profile: Profile, burst_bytes: int) -> int:
    """Where the optimizer's temporaries are so large."""
    return max(burst_bytes + _widening_bytes(step, profile, burst_bytes), step.reduce_bytes)


def _widening_bytes(step: StepToPlan, profile: Profile, burst_bytes: int) -> int:
    """What a step takes more if parameters and state are widened for it, and its temporaries are
    as wide.
    """
    parameters = trained(step.model)
    if step.wide is None or not parameters:
        return 0
    sized = [(local_part(p).nbytes, _widened_by(p.dtype, step.wide)) for p in parameters]
    copies = sum(size * ratio for size, ratio in sized if ratio > 1)
    wider = sum(size * (ratio - 1) for size, ratio in sized)
    states = profile.optimizer_bytes * wider / local_bytes(parameters)
    most = max(ratio for _, ratio in sized)
    return round(copies + states + burst_bytes * (most - 1))


def _widened_by(dtype: torch.dtype, wide: torch.dtype) -> float:
    """How many times as large a number becomes."""
    return torch.promote_types(dtype, wide).itemsize / dtype.itemsize
