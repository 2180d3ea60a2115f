"""Copies of many tensors' content, made in few calls.

An optimizer has some four tensors for each parameter, most of them small: cloning them one by one
takes several times as long as copying their bytes, and so does a line of Python for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradfit._torch import copies_of, flat_copy

_kind_of = attrgetter("dtype", "layout", "is_cpu")
_shape_of = attrgetter("shape")
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class TensorCopies:
    """What is in some tensors now.

    >>> tensors = [torch.ones(2), torch.arange(3), torch.zeros(())]
    >>> copies = TensorCopies(tensors)
    >>> tensors[0].zero_(), copies.contents()
    (tensor([0., 0.]), [tensor([1., 1.]), tensor([0, 1, 2]), tensor(0.)])
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._shapes: list[torch.Size] = [*map(_shape_of, tensors)]
        self._flat: list[tuple[Sequence[int], Tensor]] = []  # positions, and one piece of memory
        self._single: dict[int, Tensor] = {}
        kinds = [*map(_kind_of, tensors)]
        if not all(is_cpu for _, _, is_cpu in set(kinds)):
            self._single = dict(enumerate(copies_of(tensors)))  # few kernels to launch
            return
        are_plain = set(map(type, tensors)) <= _PLAIN
        with torch.no_grad():
            for kind, places in _positions_by(kinds).items():
                held = [*map(tensors.__getitem__, places)]
                if are_plain and _can_be_flat(kind):
                    self._flat.append((places, flat_copy(held)))
                else:
                    self._single |= zip(places, [one.clone() for one in held], strict=True)

    def contents(self) -> list[Tensor]:
        """The content of each, in the order in which they were given."""
        by_position = dict(self._single)
        for places, flat in self._flat:
            shapes = [self._shapes[place] for place in places]
            by_position |= zip(places, _cut_into(shapes, flat), strict=True)
        return [by_position[position] for position in range(len(self._shapes))]


def _cut_into(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    """One piece of memory as tensors of these shapes."""
    pieces = torch.split(flat, [*map(math.prod, shapes)])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _positions_by(kinds: list[Any]) -> dict[Any, Sequence[int]]:
    """Where each kind stands; usually there is one."""
    distinct = set(kinds)
    if len(distinct) == 1:
        return {kinds[0]: range(len(kinds))}
    return {
        kind: [place for place, one in enumerate(kinds) if one == kind]
        for kind in sorted(distinct, key=kinds.index)
    }


def _can_be_flat(kind: tuple[torch.dtype, torch.layout, bool]) -> bool:
    """Whether tensors of this kind are real numbers in a row, and nothing else."""
    dtype, layout, _ = kind
    is_number = dtype.is_floating_point or dtype in (torch.int64, torch.int32)
    return is_number and layout is torch.strided
