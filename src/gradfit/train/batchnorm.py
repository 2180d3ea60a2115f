"""What micro-batches cannot be exact about, named: modules that look across the batch."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from gradfit.errors import ExactnessWarning

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(model: torch.nn.Module) -> list[str]:
    """The names of modules that normalise with the statistics of the batch they are given."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats)
    ]


def batch_norm_note(names: list[str], micro_batch: int) -> str:
    """What it means that these modules are trained in micro-batches."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"BatchNorm ({shown}) takes its statistics over each micro-batch of {micro_batch}, not over the whole batch, "
        "so these gradients are those of the micro-batches. Use GroupNorm or LayerNorm, freeze the statistics with "
        "module.eval(), or raise `memory` until the batch fits in one piece."
    )


def warn_about_batch_norm(model: torch.nn.Module, micro_batch: int, batch_size: int) -> None:
    """Say so, once, where a batch is about to be split."""
    if micro_batch < batch_size and (names := batch_norms(model)):
        warnings.warn(batch_norm_note(names, micro_batch), ExactnessWarning, stacklevel=4)
