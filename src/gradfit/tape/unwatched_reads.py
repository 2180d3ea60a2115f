"""Rule 7 of `recorder.py`: what was read from memory that torch does not watch is held by content.

The memory itself is told by `unwatched.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from gradfit._torch import detached_in_dispatch
from gradfit.tape.storage import place_of
from gradfit.tape.unwatched import LARGE_BYTES, copy_span, digest_of, same_content, span_bytes
from gradfit.tape.values import Geometry, Segment, TapeValue, geometry_of, new_value


class UnwatchedReads:
    """Values that hold what was read from such memory, by storage and by place in it."""

    def __init__(self) -> None:
        self.by_storage: dict[int, dict[Geometry, weakref.ref[TapeValue]]] = {}

    def refer(self, tensor: torch.Tensor, key: int, segment: Segment) -> TapeValue:
        """The value that holds what is in a tensor now: the one from an earlier read, if that is
        still the same.
        """
        geometry = place_of(tensor)
        digest = None if span_bytes(tensor) < LARGE_BYTES else digest_of(tensor)
        earlier = self.by_storage.setdefault(key, {})
        value = earlier[geometry]() if geometry in earlier else None
        if value is not None and _holds(value, tensor, digest):
            return value
        held = copy_span(tensor) if digest is None else detached_in_dispatch(tensor)
        value = new_value(key, geometry_of(held), segment)
        value.tensor, value.rare_facts().digest = held, digest
        earlier[geometry] = weakref.ref(value)
        return value

    def values_in(self, key: int) -> Iterator[TapeValue]:
        """Those that were read from one storage."""
        for reference in self.by_storage.get(key, {}).values():
            if (value := reference()) is not None:
                yield value


def _holds(value: TapeValue, tensor: torch.Tensor, digest: bytes | None) -> bool:
    if value.tensor is None:
        return False
    if value.digest is not None:
        return value.digest == digest
    return same_content(value.tensor, tensor)
