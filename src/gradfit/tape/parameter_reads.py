"""Parameters that recorded operations have read: there anyway, and copied if they are written to.

A parameter lives as long as its model, so the tape does not hold it: it refers to it, and checks
at replay that nobody has written to it. A write that the recorder sees coming is not an error: who
has read the parameter gets a copy just before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from gradfit._torch import detached
from gradfit._torch_listen import dispatch_modes
from gradfit.tape.storage import copy_storage
from gradfit.tape.unwatched import share_memory
from gradfit.tape.values import ParameterRef, geometry_of, shaped

_MANY = 16  # references to one parameter, before dead ones are looked for
_reference_to = weakref.ref
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class ParameterReads:
    """Who has read each parameter, by the address of its storage."""

    def __init__(self) -> None:
        self.by_storage: dict[int, list[weakref.ref[ParameterRef]]] = {}
        # Storages that hold the same whenever they hold anything: see `fsdp_boundaries.py`.
        self.refilled: set[int] = set()

    def refer(self, tensor: torch.Tensor, key: int) -> ParameterRef:
        """An operation reads a parameter, or a view of one."""
        reference = ParameterRef()
        kind = type(tensor)
        # `.data` takes a third of the time. Of a subclass it would be one, too, and dispatch modes
        # would see it as an operation of the forward.
        is_plain = (kind is _Tensor or kind is _Parameter) and not dispatch_modes()
        reference.content = tensor.data if is_plain else detached(tensor)
        reference.source = tensor
        reference.version = tensor._version
        others = self.by_storage.get(key)
        if others is None:
            self.by_storage[key] = [_reference_to(reference)]
            return reference
        others.append(_reference_to(reference))
        # Looked through only when their number has doubled, so that adding one stays cheap.
        if len(others) >= _MANY and len(others) & (len(others) - 1) == 0:
            _remove_dead(others)
        return reference

    def copy_before_write(self, key: int, counted_before: int = 0) -> None:
        """A parameter is about to be written to: who has read it gets a copy."""
        if key not in self.refilled:
            copy_for(_alive(self.by_storage.pop(key, ())), counted_before)

    def copy_sharing(self, target: torch.Tensor) -> None:
        """The same for all that lie in the memory of a tensor that is about to be written to."""
        for key, references in list(self.by_storage.items()):
            read = _first_alive(references)
            if read is not None and share_memory(read.content, target):
                self.copy_before_write(key)

    def overwritten(self) -> torch.Tensor | None:
        """One that somebody has written to since it was read, if there is one."""
        for references in self.by_storage.values():
            for reference in references:
                read = reference()
                if read is not None and read.overwritten:
                    return read.content
        return None


def _first_alive(references: Iterable[weakref.ref[ParameterRef]]) -> ParameterRef | None:
    return next(iter(_alive(references)), None)


def copy_for(references: Iterable[ParameterRef], counted_before: int) -> torch.Tensor | None:
    """Give all who have read one storage a copy of it, if nobody has written to it yet; returns
    it.

    Args:
        references: that lie in the same storage.
        counted_before: by how much the operation that is about to write has counted up the version
            before it runs.
    """
    copy: torch.Tensor | None = None
    for reference in references:
        if not _can_be_copied(reference, counted_before):
            continue
        geometry = geometry_of(reference.content)
        if copy is None:
            copy = copy_storage(reference.content, geometry)
        reference.content, reference.source = shaped(copy, geometry), None
    return copy


def _remove_dead(references: list[weakref.ref[ParameterRef]]) -> None:
    references[:] = [reference for reference in references if reference() is not None]


def _can_be_copied(reference: ParameterRef, counted_before: int) -> bool:
    source = reference.source
    if source is None or source._version - counted_before != reference.version:
        return False  # it has a copy already, or it is too late: then replay refuses
    return not source.is_conj()  # its bits are not its content; replay compares versions


def _alive(references: Iterable[weakref.ref[ParameterRef]]) -> list[ParameterRef]:
    return [alive for reference in references if (alive := reference()) is not None]
