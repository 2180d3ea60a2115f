"""How torch counts writes to a storage, and what a counter says about a value.

A storage's tensors and their views share one counter, with three exceptions: a tensor that was made
under inference mode has none, `.data` counts for itself, and so does each result of `unsafe_split`.
And a view that is made below autograd, as in a dispatch mode, counts for itself where nothing is
done about it: https://github.com/pytorch/pytorch/issues/96319.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from gradfit._torch import base_of, storage_key
from gradfit.tape.values import TapeValue

# In the place of a version: nobody has looked yet; and made under inference mode, where torch does
# not count. No counter is ever negative.
UNKNOWN, UNCOUNTED = -1, -2

_Tensor = torch.Tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's storage was written to."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


class SplitResult:
    """A tensor in a storage of the table that counts its writes by itself: a result of
    `unsafe_split`.
    """

    __slots__ = ("tensor", "version", "write_pending")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.version = tensor._version
        self.write_pending = False


def only_recorded_writes(counter: TapeValue | SplitResult, version: int) -> bool:
    """Whether a version counter says that only recorded operations have written to a storage.

    A write is recorded below autograd, which counts it after that, or, where the counter belongs to
    another tensor, not at all: while it is pending, both are right.
    """
    before = counter.version
    return before in (version, UNKNOWN) or (counter.write_pending and version == before + 1)


class SplitResults:
    """The living results of `unsafe_split` in each storage of the table.

    torch leaves it to the caller not to write to both them and the tensor that they are chunks of
    (`unsafe_split` in aten/src/ATen/native/TensorShape.cpp). RNN cells write their gates side by
    side that way.
    """

    def __init__(self) -> None:
        # By storage, then by the identity of the tensor.
        self.by_storage: dict[int, dict[int, SplitResult]] = {}

    def find(self, key: int, tensor: torch.Tensor) -> SplitResult | None:
        """The one that a tensor is, or is a view of."""
        results = self.by_storage.get(key)
        if results is None:
            return None
        owner = base_of(tensor)
        owner = tensor if owner is None else owner
        result = results.get(id(owner))
        return result if result is not None and result.tensor() is owner else None

    def add(self, tensors: Iterable[Any], values: dict[int, TapeValue]) -> None:
        """Those of these tensors that lie in a storage of the table count for themselves from now
        on.
        """
        for tensor in tensors:
            if (
                type(tensor) is _Tensor
                and not tensor.is_inference()
                and (key := storage_key(tensor)) in values
            ):
                alive = _alive(self.by_storage.get(key, {}))
                self.by_storage[key] = alive | {id(tensor): SplitResult(tensor)}


def _alive(results: dict[int, SplitResult]) -> dict[int, SplitResult]:
    return {identity: one for identity, one in results.items() if one.tensor() is not None}
