"""What each operation of a forward pass returned, in a few bytes: to find the first that returns
something else.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from gradfit._torch_distributed import local_part
from gradfit._torch_listen import unseen
from gradfit.tape.listener import OperationListener
from gradfit.tape.operators import info_of
from gradfit.tape.storage import flatten


class Digests(OperationListener):
    """Notes name, shape and digest of every result while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[str, bytes]] = []

    def _observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and note what it returns."""
        out = func(*args, **kwargs)
        if not info_of(func).uninitialised:
            with unseen():
                self._noted += [
                    (f"{func}, result of shape {tuple(tensor.shape)}", _digest(tensor))
                    for tensor in flatten([out])
                    if _is_dense(tensor)
                ]
        return out

    def first_difference(self, other: Digests) -> str | None:
        """The first operation whose result is not the other's; None if all are, or if there are
        none.
        """
        for mine, its in zip(self._noted, other._noted, strict=False):
            if mine != its:
                return mine[0] if mine[0] == its[0] else f"{mine[0]}, where there was {its[0]}"
        return None


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a dense tensor's elements, in order, as one row; of a sharded one's on this
    rank.
    """
    content = local_part(tensor).detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): with one element any stride counts as contiguous, but only 1 can be seen as
    # bytes.
    return content.as_strided((content.numel(),), (1,)).view(torch.uint8)


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(memoryview(as_bytes(tensor).cpu().numpy()), digest_size=16).digest()  # type: ignore[arg-type]
