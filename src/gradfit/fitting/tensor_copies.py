"""Copies of many tensors' content, made in few calls.

An optimizer has some four tensors for each parameter, most of them small: cloning them one by one
takes several times as long as copying their bytes, and so does a line of Python for each. Which of
them go together into one piece of memory is worked out once: it is the same in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from gradfit._torch import copies_of, flat_copy, form_check, form_of

_kind_of = attrgetter("dtype", "layout", "is_cpu")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
PIECE_BYTES = 1 << 19
"""Of one piece at least. A step's activations have left holes of about that size, which the C
library hands out again; for one large piece it asks the system, which clears every page of it, and
gives it back right afterwards, so in each step: half of the copy's time.
"""
_MOST_PIECES = 8  # of much more than that, which no hole has room for, and several threads copy


class CopyLayout:
    """Which of some tensors go together into one piece of memory, and which are copied each by
    itself. The tensors themselves are not held: an optimizer may replace them.
    """

    def __init__(self) -> None:
        self.known: list[ref[Tensor]] = []
        self.forms: list[tuple[torch.dtype, torch.Size]] = []
        self.on_cpu = True
        self.together: list[Sequence[int]] = []  # positions among the tensors, piece by piece
        self.single: list[int] = []
        self._ids: list[int] = []
        self._died: list[ref[Tensor]] = []  # of those that are known: an id may be another's now
        self._have_same_form: Callable[..., bool] | None = None

    def renew(self, tensors: Sequence[Tensor]) -> None:
        """Work it out for these tensors, unless they are those of last time, as they were: type
        and shape can change by `tensor.data = ...`.
        """
        ids = [*map(id, tensors)]
        is_known = self._have_same_form is not None and ids == self._ids and not self._died
        if is_known and self._have_same_form(*tensors):  # type: ignore[misc]
            return
        self._ids, self._died = ids, []
        self.known = [ref(tensor, self._died.append) for tensor in tensors]
        self.forms, self._have_same_form = [*map(form_of, tensors)], form_check(tensors)
        self.together, self.single = [], []
        kinds = [*map(_kind_of, tensors)]
        self.on_cpu = all(is_cpu for _, _, is_cpu in set(kinds))
        are_plain = set(map(type, tensors)) <= _PLAIN
        for kind, places in _positions_by(kinds).items():
            if are_plain and _can_be_flat(kind):
                self.together += _in_pieces(places, [tensors[place].nbytes for place in places])
            else:
                self.single += places


class TensorCopies:
    """What is in some tensors now.

    Args:
        tensors: whose content is copied.
        layout: of the copies that were made of the same tensors before, if there were any.

    >>> tensors = [torch.ones(2), torch.arange(3), torch.zeros(())]
    >>> copies = TensorCopies(tensors)
    >>> tensors[0].zero_(), copies.contents()
    (tensor([0., 0.]), [tensor([1., 1.]), tensor([0, 1, 2]), tensor(0.)])
    """

    def __init__(self, tensors: Sequence[Tensor] = (), layout: CopyLayout | None = None) -> None:
        layout = CopyLayout() if layout is None else layout
        layout.renew(tensors)
        self._forms = layout.forms
        self.tensors = layout.known
        """Those whose content this is, as far as they are still there."""
        self._flat: list[tuple[Sequence[int], Tensor]] = []  # positions, and one piece of memory
        self._single: dict[int, Tensor] = {}
        if not layout.on_cpu:
            self._single = dict(enumerate(copies_of(tensors)))  # few kernels to launch
            return
        for places in layout.together:
            is_all = len(places) == len(tensors)
            held = [*tensors] if is_all else [*map(tensors.__getitem__, places)]
            self._flat.append((places, flat_copy(held)))
        self._single = {place: tensors[place].detach().clone() for place in layout.single}

    def contents(self) -> list[Tensor]:
        """The content of each, in the order in which they were given."""
        by_position = dict(self._single)
        for places, flat in self._flat:
            shapes = [self._forms[place][1] for place in places]
            by_position |= zip(places, _cut_into(shapes, flat), strict=True)
        return [by_position[position] for position in range(len(self._forms))]


def _cut_into(shapes: Sequence[torch.Size], flat: Tensor) -> list[Tensor]:
    """One piece of memory as tensors of these shapes."""
    pieces = torch.split(flat, [*map(math.prod, shapes)])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _in_pieces(places: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Those of so many bytes, in the order in which they are, cut into pieces."""
    most, begin, taken = max(PIECE_BYTES, sum(sizes) // _MOST_PIECES), 0, 0
    for at, size in enumerate(sizes):
        if at > begin and taken + size > most:
            yield places[begin:at]
            begin, taken = at, 0
        taken += size
    yield places[begin:]


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
