"""DDP: every rank has all parameters, and sums of its own in `.grad`; one all-reduce per bucket
makes them all ranks'.

Each bucket is filled with `factor · gradient`, reduced while the next one is filled, and then *is*
the gradient: the parameters' `.grad` become views of it, so that nothing is copied back, and at
most one bucket is there twice.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradfit import _torch_distributed as private
from gradfit.accumulate.processes import AllParts
from gradfit.distributed.shared_window import AllRanks
from gradfit.errors import MisuseError

BUCKET_BYTES = 25 * 2**20  # as DDP's own

# What each module's flags were before each accumulator that silences it, put back last one first.
_silent: weakref.WeakKeyDictionary[torch.nn.Module, list[dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)

_said: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose hooks were warned about


class Replicated(AllRanks):
    """The processes of a DDP module.

    DDP reads its flags when a forward begins, so they are changed for the time of the forward
    alone: whoever looks at them at any other moment sees what the user has set.
    """

    @property
    def reserved_bytes(self) -> int:  # type: ignore[override]
        return sum(private.ddp_bucket_bytes(module) for module in self.modules)

    @property
    def reduce_bytes(self) -> int:  # type: ignore[override]
        return min(2 * BUCKET_BYTES, self.reserved_bytes)  # one bucket on its way, one being filled

    def before_forward(self, module: Any) -> None:
        if self.filling:
            _require_no_join(module)
            _silent.setdefault(module, []).append(private.silence_ddp(module))

    def after_forward(self, module: Any) -> None:
        changed = _silent.get(module)
        if changed:
            private.restore_flags(module, changed.pop())

    def reduce(self, window: Any, whole: AllParts, factor: float) -> float:
        # DDP does it before each forward, which here is silenced: once per window, from the first
        # rank that has seen data.
        for module in self.modules:
            _say_that_hooks_are_not_called(module)
            if private.broadcasts_buffers(module) and whole.active:
                private.broadcast_buffers(module, whole.active[0])
        return super().reduce(window, whole, factor)

    def add_up(
        self, window: Any, present: tuple[int, ...], sparse: tuple[int, ...], factor: float
    ) -> None:
        with torch.no_grad():
            self._add_up_dense([window.tensors[at] for at in present if at not in sparse], factor)
            for at in sparse:
                _reduce_sparse(window.tensors[at], factor, self.group.handle)

    def _add_up_dense(self, tensors: list[Tensor], factor: float) -> None:
        pending: tuple[Any, list[Tensor], Tensor] | None = None
        for bucket in _buckets(tensors):
            flat = _fill(bucket, factor)
            work = dist.all_reduce(flat, group=self.group.handle, async_op=True)
            # The one before is waited for only now: this one was filled while it was on its way.
            if pending is not None:
                _take_out(*pending)
            pending = (work, bucket, flat)
        if pending is not None:
            _take_out(*pending)


def _require_no_join(module: Any) -> None:
    """Ranks that have joined answer DDP's own collectives; a window has others."""
    if private.is_joining(module):
        raise MisuseError(
            "A forward of a window runs inside of `with model.join():`, whose ranks without data"
            " would not answer at the window's end. Leave the context out: accumulator.flush(),"
            " called once by each rank at the end of its data, does what it is for."
        )


def _say_that_hooks_are_not_called(module: Any) -> None:
    names = private.communication_hooks(module)
    if names and module not in _said:
        _said.add(module)
        warnings.warn(
            f"DDP's communication hook {names[0]} is not called: a window's gradients are added up"
            " over the ranks once, in the types that they have. Leave register_comm_hook out; or,"
            " if the hook is wanted, run this model without gradfit's accumulator.",
            stacklevel=2,
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in buckets of one type and one device, the last ones first, as backward leaves
    them in the caches.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((_grad_dtype(tensor), tensor.device), []).append(tensor)
    for (dtype, _), members in kinds.items():
        yield from _cut_by_bytes(members[::-1], dtype.itemsize)


def _cut_by_bytes(tensors: list[Tensor], itemsize: int) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * itemsize
        if bucket and filled + size > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    yield bucket


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    """Of the gradient that there is, or will be."""
    if tensor.grad is not None:
        return tensor.grad.dtype
    return tensor.grad_dtype or tensor.dtype


def _fill(bucket: list[Tensor], factor: float) -> Tensor:
    """`factor` times the gradients, one after the other; zeros where this rank has none. Gives up
    the gradients.
    """
    flat = torch.empty(
        sum(t.numel() for t in bucket), dtype=_grad_dtype(bucket[0]), device=bucket[0].device
    )
    for tensor, place in zip(bucket, _places(bucket, flat), strict=True):
        _fill_place(place, tensor.grad, factor)
        tensor.grad = None
    return flat


def _fill_place(place: Tensor, gradient: Tensor | None, factor: float) -> None:
    if gradient is None:
        place.zero_()
    elif factor == 1.0:
        place.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=place)


def _take_out(work: Any, bucket: list[Tensor], flat: Tensor) -> None:
    work.wait()
    for tensor, place in zip(bucket, _places(bucket, flat), strict=True):
        tensor.grad = place


def _places(bucket: list[Tensor], flat: Tensor) -> Iterator[Tensor]:
    """Where each parameter's gradient lies in its bucket, with the parameter's own strides if they
    leave no holes.
    """
    offset = 0
    for tensor in bucket:
        dense = private.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        yield flat.as_strided(tensor.shape, stride, offset)
        offset += tensor.numel()


def _reduce_sparse(tensor: Tensor, factor: float, group: dist.ProcessGroup) -> None:
    gradient = tensor.grad
    # Sparse on every rank, whatever this one has, or the collectives do not match.
    if gradient is None:
        gradient = torch.zeros_like(tensor, dtype=_grad_dtype(tensor), layout=torch.sparse_coo)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    gradient = gradient.coalesce().mul_(factor)
    dist.all_reduce(gradient, group=group)
    tensor.grad = gradient
