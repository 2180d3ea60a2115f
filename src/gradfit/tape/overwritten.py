"""What is said when somebody has written to what a backward pass needs: which operation needs it,
and from where.
"""

from __future__ import annotations

import torch

from gradfit._torch import current_node, forward_stack
from gradfit.errors import ActivationOverwritten
from gradfit.source_line import Place, line_at, line_in


def overwritten(
    tensor: torch.Tensor,
    version: int,
    expected: int,
    *,
    rebuilt_from: bool = False,
    used_at: Place | None = None,
) -> ActivationOverwritten:
    """The error for a tensor that is at another version than it was in the forward pass.

    Args:
        tensor: What was written to.
        version: How often it has been, by now.
        expected: How often it had been when the forward pass used it.
        rebuilt_from: Whether it is what activations are rebuilt from, and not one that autograd
            saved.
        used_at: Where the forward pass used it, if that was noted.
    """
    operation, traced_line = _running_operation()
    use = "from which activations are rebuilt" if rebuilt_from else "that backward needs"
    needed = f" (for {operation})" if operation else ""
    where = _where_it_was_used(traced_line or line_at(used_at))
    return ActivationOverwritten(
        f"A tensor of {shape_of(tensor)} {use}{needed} has been modified by an inplace operation"
        f" since the forward pass: it is at version {version}, version {expected} was"
        f" expected. {where} Call backward() before changing it in place, or write `x = x + y`"
        " instead of `x += y`."
    )


def _where_it_was_used(line: str) -> str:
    if line:
        return f"It was used at {line}."
    return "torch.autograd.set_detect_anomaly(True) shows where it was used."


def shape_of(tensor: torch.Tensor) -> str:
    """A tensor's shape in words; a nested one has no single shape."""
    try:
        return f"shape {tuple(tensor.shape)}"
    except RuntimeError:
        return f"{tensor.size(0)} nested parts"


def _running_operation() -> tuple[str, str]:
    """The operation whose backward runs now, and the line that called it where torch's anomaly mode
    has noted it.
    """
    node = current_node()
    if node is None:
        return "", ""
    return node.name(), line_in(forward_stack(node))
