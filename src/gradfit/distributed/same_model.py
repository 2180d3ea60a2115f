"""Whether all ranks train the same thing, asked before they communicate: torch's collectives abort
where they differ.

Their budgets may differ. Each is the limit of one rank's own device, "auto" and "80%" give other
numbers on each, and no rank needs to cut its batch as another does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from gradfit.distributed.window_files import Exchange
from gradfit.errors import MisuseError


def require_same_model(model: torch.nn.Module, exchange: Exchange) -> None:
    """Raise a `MisuseError` that names what differs, on all ranks, unless all have the same
    parameters and buffers.

    Args:
        model: This rank's model.
        exchange: Tells all ranks a record, and gives every rank's.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [_describe(name, tensor) for name, tensor in named]
    _require_same("models", lines, exchange, "Build the same model on every rank.")


def _describe(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {tuple(tensor.shape)} {dtype}{' trained' if tensor.requires_grad else ''}"


def require_same_update(optimizer: Any, options: Mapping[str, Any], exchange: Exchange) -> None:
    """The same of what makes the update: one rank's parameters would silently leave the others'.

    Args:
        optimizer: This rank's optimizer.
        options: What else the update depends on, by name.
        exchange: Tells all ranks a record, and gives every rank's.
    """
    lines = [f"optimizer {type(optimizer).__name__}"]
    for index, group in enumerate(optimizer.param_groups):
        lines += [
            f"{name}={_shown(value)} in group {index}"
            for name, value in group.items()
            if name != "params"
        ]
    lines += [f"{name}={_shown(value)}" for name, value in options.items()]
    _require_same(
        "updates", lines, exchange, "Pass the same on every rank; only memory= may differ."
    )


def require_same_settings(settings: Mapping[str, Any], exchange: Exchange) -> None:
    """The same of a run's settings: a rank that stops earlier, or cuts the data otherwise, leaves
    the others waiting.

    Args:
        settings: By name.
        exchange: Tells all ranks a record, and gives every rank's.
    """
    lines = [f"{name}={_shown(value)}" for name, value in settings.items()]
    _require_same(
        "settings",
        lines,
        exchange,
        "Start every rank with the same command; only --memory may differ.",
    )


def _require_same(what: str, lines: list[str], exchange: Exchange, instead: str) -> None:
    # Digests first: the lines of a large model are long, and almost always the same.
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()
    digests = [one.get("digest") for one in exchange({"kind": what, "digest": digest})]
    if len(set(digests)) == 1:
        return
    in_full = exchange({"kind": f"{what}, in full", "lines": lines})
    rank = _first_difference(digests, [digests[0]] * len(digests))
    first, other = (in_full[one].get("lines", []) for one in (0, rank))
    at = _first_difference(first, other)
    here, there = (_entry(lines, at) for lines in (first, other))
    raise MisuseError(
        f"The ranks have different {what}: rank 0 has {here!r}, rank {rank} has {there!r} (entry"
        f" {at} of {len(first)} and {len(other)}). {instead}"
    )


def _entry(lines: list[str], at: int) -> str:
    return lines[at] if at < len(lines) else "no more"


def _first_difference(first: list[Any], other: list[Any]) -> int:
    pairs = enumerate(zip(first, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(other)))


def _shown(value: Any) -> str:
    """A value as text that is alike on all ranks: of an object its kind, and the plain values that
    it holds.
    """
    if isinstance(value, torch.Tensor):
        return f"tensor {value.tolist()}" if value.numel() == 1 else f"tensor {tuple(value.shape)}"
    if isinstance(value, _Plain):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{type(value).__name__}({', '.join(_plain_attributes(value))})"


def _plain_attributes(value: Any) -> list[str]:
    attributes = getattr(value, "__dict__", {})
    return [f"{name}={one!r}" for name, one in attributes.items() if isinstance(one, _Plain)]


_Plain = bool | int | float | str | torch.dtype | None
