"""The only file that touches private or version-dependent torch API."""

from __future__ import annotations

from torch.autograd.graph import Node


def has_freed_tensors(node: Node) -> bool:
    """Whether a backward pass has already taken what this operation saved."""
    for attribute in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        try:
            getattr(node, attribute, None)
        except RuntimeError as error:  # torch has one type for "freed" and "changed in place", only the text differs
            if "freed" in str(error):
                return True
    return False
