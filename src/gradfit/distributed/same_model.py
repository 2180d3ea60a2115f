"""Whether all ranks have the same model, asked before they communicate: torch's collectives abort where they differ."""

from __future__ import annotations

import hashlib

import torch

from gradfit.distributed.window_files import Exchange
from gradfit.errors import MisuseError


def require_same_model(model: torch.nn.Module, exchange: Exchange) -> None:
    """Raise a `MisuseError` that names what differs, on all ranks, unless all have the same parameters and buffers.

    Args:
        model: This rank's model.
        exchange: Tells all ranks a record, and gives everybody's.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        f"{' trained' if tensor.requires_grad else ''}"
        for name, tensor in named
    ]
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
    digests = [one["digest"] for one in exchange({"kind": "the model", "digest": digest})]
    if len(set(digests)) == 1:
        return
    everybody = [one["lines"] for one in exchange({"kind": "the model's tensors", "lines": lines})]
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    first, other = everybody[0], everybody[rank]
    at = next((n for n, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    here, there = (lines[at] if at < len(lines) else "no more" for lines in (first, other))
    raise MisuseError(
        f"The ranks have different models: as tensor {at} rank 0 has {here!r}, rank {rank} has {there!r} ({len(first)} "
        f"and {len(other)} tensors). Build the same model on every rank."
    )
