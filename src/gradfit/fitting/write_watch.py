"""Which tensors an optimizer's step has written to.

Torch counts what is written to a tensor, so that it need only be asked. But an optimizer that is
not torch's own may write past the counters (`p.data.add_()`), torch's fused kernels are never
counted (`_fused_adamw_`), and under a dispatch mode no operators on lists of tensors are
(`_foreach_add_`; torch 2.13, https://github.com/pytorch/pytorch/pull/191154). There the operators
are heard that the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradfit._torch import is_operator, is_out_of_memory, storage_key, version_of
from gradfit._torch_distributed import local_part
from gradfit._torch_listen import DispatchMode, dispatch_modes
from gradfit.accumulate.list_writes import is_fused
from gradfit.accumulate.optimizer_access import can_be_taken_back
from gradfit.devices import free_cached_memory
from gradfit.tape.operators import info_of
from gradfit.tape.storage import flatten, written_tensors

_PLAIN = {torch.Tensor, torch.nn.Parameter}


class CountedWrites:
    """`wrote()` is whether any of `tensors` is not what it was when this was made, as far as torch
    counts.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._before = [(tensor, memory_of(tensor), version_of(tensor)) for tensor in tensors]

    def wrote(self) -> bool:
        """Whether one of the tensors was written to, or given other memory."""
        return any(
            memory_of(tensor) != memory or version_of(tensor) != version
            for tensor, memory, version in self._before
        )


class WriteWatch(DispatchMode):
    """Enter it around a step; `wrote()` is whether any of `tensors` is not what it was.

    An operation for which there was no memory is run once more: what cannot be made is not half
    made. One that writes to several tensors may have written to some of them: it is not repeated,
    and counts as a write even if it fails.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        tensors = [*tensors]
        self._counted = CountedWrites(tensors)
        self._memories = {*map(memory_of, tensors)}
        self._is_written = False  # from then on nobody need look at the others

    def wrote(self) -> bool:
        """Whether one of the tensors was written to, or given other memory."""
        return self._is_written or self._counted.wrote()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. Hot: an optimizer runs a dozen for each parameter."""
        kwargs = kwargs or {}
        targets = () if self._is_written else written_by(func, args, kwargs)
        if len(targets) > 1:
            self._note(targets)
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error) or len(written_by(func, args, kwargs)) > 1:
                raise
            failed = True
        else:
            failed = False
        if failed:  # outside of the handler: the traceback holds what the operation had allocated
            out = _once_more(func, args, kwargs)
        if targets:
            self._note(targets)
        return out

    def _note(self, targets: Iterable[torch.Tensor]) -> None:
        """These are written to."""
        if not self._memories.isdisjoint(map(memory_of, targets)):
            self._is_written = True


def all_are_counted(tensors: Iterable[torch.Tensor], optimizer: Any) -> bool:
    """Whether torch's counters tell all that a step of this optimizer writes to these tensors, so
    that nobody need listen.

    They do on an accelerator, too; there somebody listens all the same: an operation for which
    there was no memory often finds it when it is run once more, and a step has few, which take
    lists.
    """
    return (
        not dispatch_modes()
        and can_be_taken_back(optimizer)
        and not is_fused(optimizer)
        and all(tensor.is_cpu and type(tensor) in _PLAIN for tensor in tensors)
    )


def _once_more(func: Any, args: Any, kwargs: Any) -> Any:
    free_cached_memory()
    return func(*args, **kwargs)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to; all of them for a higher-order one, whose schema
    does not say.
    """
    if is_operator(func):
        return written_tensors(info_of(func), args, kwargs)
    return [
        leaf for leaf in flatten((args, tuple(kwargs.values()))) if isinstance(leaf, torch.Tensor)
    ]


def memory_of(tensor: torch.Tensor) -> int:
    """What stands for the memory that a tensor is in: its storage, or itself where it has none of
    its own.
    """
    tensor = local_part(tensor)
    try:
        return storage_key(tensor)
    except (RuntimeError, NotImplementedError):  # sparse
        return id(tensor)
