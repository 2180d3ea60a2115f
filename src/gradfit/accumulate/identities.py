"""Tensors by identity: comparing them with `==`, as `in` does, would compare their numbers."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor


def identities(tensors: Iterable[Tensor]) -> set[int]:
    """The identity of each tensor."""
    return {id(tensor) for tensor in tensors}


def without(tensors: Iterable[Tensor], those: Container[int]) -> list[Tensor]:
    """The tensors whose identities are not among those."""
    return [tensor for tensor in tensors if id(tensor) not in those]


def only(tensors: Iterable[Tensor], those: Container[int]) -> list[Tensor]:
    """The tensors whose identities are among those."""
    return [tensor for tensor in tensors if id(tensor) in those]
