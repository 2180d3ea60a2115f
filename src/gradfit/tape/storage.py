"""Tensors as the tape knows them: by the address of their storage, if they have one of their
own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradfit._torch import FakeTensor, storage_key
from gradfit._torch_listen import unseen
from gradfit.tape.operators import OpInfo
from gradfit.tape.values import Geometry, shaped

# a fake one has a storage too
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})
_PART = 1 << 20
_BY_ROWS = (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values)
_BY_COLUMNS = (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values)
_PARTS_BY_LAYOUT: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
}
_default_dispatch = torch.Tensor.__torch_dispatch__


class Untrackable(Exception):
    """A tensor without a storage of its own: sparse, nested, a wrapper subclass, a functorch
    level.
    """


def key_of(tensor: torch.Tensor) -> int:
    """A tensor's storage address, or `Untrackable`."""
    kind = type(tensor)
    if kind not in PLAIN and kind.__torch_dispatch__ is not _default_dispatch:
        raise Untrackable
    try:
        return storage_key(tensor)
    except (RuntimeError, NotImplementedError):
        raise Untrackable from None


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor without a storage of its own is made of."""
    if tensor.layout in _PARTS_BY_LAYOUT:
        return sparse_parts(tensor)
    attributes = getattr(tensor, "__dict__", {}).values()
    return [part for part in attributes if isinstance(part, torch.Tensor) and part is not tensor]


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of; none of another."""
    return [part(tensor) for part in _PARTS_BY_LAYOUT.get(tensor.layout, ())]


def place_of(tensor: torch.Tensor) -> Geometry:
    """Where in its storage a tensor lies; `Untrackable` if it is not what lies there (conjugated,
    negated, nested).
    """
    try:
        dtype = tensor.dtype
        if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
            raise Untrackable
        return (tensor.shape, tensor.stride(), tensor.storage_offset(), dtype)
    except (RuntimeError, NotImplementedError):
        raise Untrackable from None


class _Copying(threading.local):
    now = False


# whether what this thread runs is no operation of the forward, but a copy that the tape makes
copying = _Copying()


def copy_storage(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The same tensor on a private copy of its whole storage."""
    copying.now = True
    try:
        return shaped(_bytes(tensor).clone(), geometry)
    finally:
        copying.now = False


def holds_only(tensor: torch.Tensor, number: Any) -> bool:
    """Whether all of a tensor's storage is one number."""
    if isinstance(tensor, FakeTensor):  # it holds nothing; nobody can have written to it
        return True
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    with unseen():  # looking is not an operation of the forward, and must not count as its memory
        flat = tensor.detach().as_strided((count,), (1,), 0)
        return all(bool((flat[at : at + _PART] == number).all()) for at in range(0, count, _PART))


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that its storage holds, each element once, in whatever order of the
    dimensions.
    """
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flatten(nest: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples, in order."""
    for item in nest:
        if isinstance(item, list | tuple):
            yield from flatten(item)
        else:
            yield item


def flat_results(out: Any) -> Sequence[Any]:
    """What an operator returned, as one sequence; it mostly is one already."""
    if isinstance(out, tuple):  # also of torch.return_types
        kinds = [*map(type, out)]
        if list not in kinds and tuple not in kinds:
            return out
    return tuple(flatten((out,)))


def fresh_results(out: Any, args: Any) -> list[tuple[int, torch.Tensor, int]]:
    """(position, tensor, storage) of results that do not lie in an argument's storage."""
    try:
        results = [
            (position, tensor, key_of(tensor))
            for position, tensor in enumerate(flatten((out,)))
            if isinstance(tensor, torch.Tensor)
        ]
        given = _storages_of(args) if results else set()
    except Untrackable:
        return []
    return [result for result in results if result[2] not in given]


def _storages_of(args: Any) -> set[int]:
    return {key_of(each) for each in args if isinstance(each, torch.Tensor)}


def written_tensors(info: OpInfo, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation is about to change."""
    targets: list[torch.Tensor] = []
    for where in info.writes:
        argument = _argument_at(where, args, kwargs)
        if isinstance(argument, torch.Tensor):
            targets.append(argument)
        elif isinstance(argument, list | tuple):
            targets.extend(item for item in argument if isinstance(item, torch.Tensor))
    return targets


def _argument_at(where: int | str, args: Any, kwargs: Any) -> Any:
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
