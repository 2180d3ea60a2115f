"""What a window asks of the other processes; alone there is nobody to ask.

A window that several processes fill ends with one *meeting*: each brings what its part weighs, all
learn what the whole weighs, and then the gradients are added up. Between two meetings no process
waits for another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradfit.accumulate.plain_backwards import NoPlainBackwards
from gradfit.accumulate.scaling import gradient_norm
from gradfit.accumulate.window_state import Total
from gradfit.arguments import Number
from gradfit.errors import MisuseError


class ProcessPart(NamedTuple):
    """What one process brings to the end of a window."""

    weights: dict[str, Number]
    """Every denominator by its term's name; that of the main loss is ""."""
    micro_batches: int
    skipped: int
    notes: dict[str, float]
    """Numbers to add up over all processes, such as losses."""
    base: float = 1.0
    """The loss scale that the sums carry."""
    scale: float = 1.0
    """The loss scale of this process by now; after a skipped micro-batch it may be lower than
    another's.
    """
    flushing: bool = False
    """It has no more to give, and takes part until nobody has."""
    joined: bool = False
    """It had no more to give before this window, and only keeps up."""
    present: tuple[int, ...] = ()
    """Positions of the parameters that have a gradient here."""
    sparse: tuple[int, ...] = ()
    broken: bool = False
    """It holds half a micro-batch: nobody can use this window."""
    leader: int | None = None
    """Of a whole: a rank that others, which only keep up, must follow; None if nobody does."""
    active: tuple[int, ...] = ()
    """Of a whole: the ranks that have brought anything."""


class AllParts(ProcessPart):
    """What all processes have brought together; `flushing` if nobody has more to give."""

    __slots__ = ()


class WindowOfProcess(Protocol):
    """What the processes need to know about a window."""

    tensors: list[Tensor]
    enabled: bool
    plain: NoPlainBackwards
    sources: Sequence[Any]


class SingleProcess:
    """One process: its part is the whole, its gradients are the gradients."""

    size = 1
    reserved_bytes = 0  # of communication buckets that are no tensors of Python's
    reduce_bytes = 0  # what `reduce` takes for a moment
    lockstep = False  # whether a forward here needs a backward here, for the others' sake

    @property
    def reduces(self) -> bool:
        """Whether gradients are not yet those of all processes when a window is full."""
        return self.size > 1 or self.lockstep

    def sources(self, tensors: list[Tensor]) -> Sequence[Any]:
        """Where each parameter's gradient adds up during a window."""
        return tensors

    def meet(self, part: AllParts) -> AllParts:
        """Learn what all processes hold, from what this one does."""
        return part

    def reduce(self, window: Any, whole: AllParts, factor: float) -> float:
        """Add up `factor` times the gradients of all processes in `.grad`; gives the factor that is
        still missing.
        """
        return factor

    def norm(self, gradients: list[Tensor]) -> float:
        """The norm of all gradients together, wherever their parts lie."""
        return gradient_norm(gradients)

    def spread_nonfinite(self, gradients: list[Tensor]) -> None:
        """If another process's part of the gradient is not finite, let this one's say so too."""

    def share_options(self, optimizer: Any, whole: AllParts, joined: bool) -> None:
        """Let a process that only keeps up step with the learning rate of those that have data."""

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Passes inside are of no window; other processes need not run any."""
        yield

    def failed(self, error: BaseException) -> None:
        """An error goes to the caller, who may or may not come back: leave word for those who
        wait.
        """

    def release(self) -> None:
        """The window is over: flags that were changed for it are put back."""

    def resume(self) -> None:
        """That the window is over was seen late, perhaps between the next one's first forward and
        its backward: its flags are changed again.
        """

    def close(self) -> None:
        """The window lets its tensors go."""


SINGLE_PROCESS = SingleProcess()


def present_in(
    sources: Sequence[Any], terms: Iterable[Total]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which parameters have a gradient, and which a sparse one."""
    sparse: dict[int, bool] = {}
    for at, gradient in _gradients_by_position(sources, terms):
        # once dense gradients are added to it, a sparse one is dense, too
        sparse[at] = gradient.is_sparse and sparse.get(at, True)
    return tuple(sorted(sparse)), tuple(sorted(at for at in sparse if sparse[at]))


def _gradients_by_position(
    sources: Sequence[Any], terms: Iterable[Total]
) -> Iterator[tuple[int, Tensor]]:
    for at, source in enumerate(sources):
        if source.grad is not None:
            yield at, source.grad
    for term in terms:
        yield from term.gradients.items()


def ranks_of(tensors: Iterable[Tensor], window: WindowOfProcess) -> SingleProcess:
    """Who shares these parameters: nobody, or the processes of the DDP or FSDP2 module they belong
    to.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return SINGLE_PROCESS
    from gradfit.distributed.shared_window import all_ranks  # which needs this module

    return all_ranks(list(tensors), window)


def wrapped_since(tensors: Iterable[Tensor], window: WindowOfProcess) -> MisuseError | None:
    """What to raise if a model was wrapped after its parameters came to the window: it would reduce
    by itself.
    """
    late = ranks_of(tensors, window)
    late.close()
    if late is SINGLE_PROCESS:
        return None
    return MisuseError(
        "The parameters were wrapped by DDP after the accumulator was made, so this backward is"
        " averaged over the ranks by DDP itself. Make the accumulator after"
        " DistributedDataParallel(model)."
    )
