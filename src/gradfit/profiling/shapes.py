"""Runs a model on shapes: its tensors have a size, a type and a device, but no memory.

Whole numbers and truth values are the exception. They are few, and they steer a model: which tokens
are padding, whether a mask is needed, how many items count. So what follows from them alone is
computed, and the model takes the way that it would take on a real batch. Whatever comes out of real
numbers has a shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradfit._torch import NEEDS_CONTENT, NO_FAKE_KERNEL, FakeTensor, fake_mode, storage_key
from gradfit._torch_listen import DispatchMode
from gradfit._torch_storage import StorageWatch, watch_storage
from gradfit.errors import UnsupportedOp
from gradfit.source_line import source_line
from gradfit.tape.operators import info_of
from gradfit.tape.storage import flatten, written_tensors

_LARGEST_BYTES = 64 << 20  # of a tensor of whole numbers that is really made
_MEASURE = "gf.profile(model, loss_fn, sample_batch, optimizer), without fake= and hardware="


class Shapes(DispatchMode):
    """Inside, operations give shapes, or whole numbers where these follow from other whole
    numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = fake_mode()
        # By address: storages of whole numbers into which something unknown was written.
        self._lost: dict[int, StorageWatch] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            item
            for item in flatten([args, list(kwargs.values())])
            if isinstance(item, torch.Tensor)
        ]
        if not all(map(self._is_known, tensors)):
            return self._unknown(func, args, kwargs)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except NEEDS_CONTENT:
            return func(*args, **kwargs)
        results = [item for item in flatten([out]) if isinstance(item, torch.Tensor)]
        if all(_is_whole(item) and item.nbytes <= _LARGEST_BYTES for item in results):
            return func(*args, **kwargs)
        return out

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except NEEDS_CONTENT:
            reason = (
                "depends on what is in a tensor (a routing, an .item(), a boolean index): a fake"
                " one has only a shape"
            )
            raise UnsupportedOp(_message(func, reason)) from None
        except NO_FAKE_KERNEL:
            reason = (
                "has no fake kernel (torch.library.register_fake), so its result's shape is not"
                " known"
            )
            raise UnsupportedOp(_message(func, reason)) from None
        except (
            RuntimeError,
            NotImplementedError,
        ) as error:  # fake kernels are stricter than real ones here and there
            reason = f"failed on fake tensors: {str(error).rstrip('.')}"
            raise UnsupportedOp(_message(func, reason, "If real ones pass, measure")) from error
        info = info_of(func)
        if info.writes:
            for target in written_tensors(info, args, kwargs):
                if not isinstance(target, FakeTensor):
                    self._lose(target)
                    # not the fake one that stood in for it
                    out = target if isinstance(out, torch.Tensor) else out
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _has_content(tensor) and storage_key(tensor) not in self._lost

    def _lose(self, tensor: torch.Tensor) -> None:
        watcher = watch_storage(
            tensor.untyped_storage(), lambda dead: self._lost.pop(dead.key, None)
        )
        watcher.key = storage_key(tensor)
        self._lost[watcher.key] = watcher


@contextmanager
def emptied(
    model: torch.nn.Module, shapes: Shapes, device: torch.device
) -> Iterator[Callable[[torch.Tensor, int], torch.Tensor]]:
    """Put shapes in the place of the model's tensors, and afterwards all of each module's
    attributes as they were.

    Gives the function that does the same to a tensor of the batch, with so many times its rows.
    """
    # a tied parameter is one tensor; the originals live, so the ids are theirs
    made: dict[int, torch.Tensor] = {}
    on_meta = next(model.parameters()).is_meta

    def empty(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
        where = device if on_meta or tensor.is_meta else tensor.device
        repeated = rows > 1 and tensor.dim() > 0
        if _has_content(tensor) and tensor.nbytes * rows <= _LARGEST_BYTES:
            return (torch.cat([tensor] * rows) if repeated else tensor.detach().clone()).to(where)
        with shapes.fake:
            if repeated:
                return torch.empty(
                    (tensor.size(0) * rows, *tensor.shape[1:]), dtype=tensor.dtype, device=where
                )
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=where
            )

    def swap(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in made:
                is_parameter = isinstance(item, torch.nn.Parameter)
                made[id(item)] = (
                    torch.nn.Parameter(empty(item), item.requires_grad)
                    if is_parameter
                    else empty(item)
                )
            return made[id(item)]
        # parameters and buffers: a new dict, as the forward may register some
        if type(item) is dict:
            return {
                key: swap(value) if isinstance(value, torch.Tensor) else value
                for key, value in item.items()
            }
        # an LSTM's flat weights
        if type(item) is list and any(isinstance(value, torch.Tensor) for value in item):
            return [swap(value) if isinstance(value, torch.Tensor) else value for value in item]
        return item

    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for present, original in attributes:
            present.update(
                {name: swap(item) for name, item in original.items() if name != "_modules"}
            )
        yield empty
    finally:
        for present, original in attributes:  # a cache that the forward filled with shapes goes too
            present.clear()
            present.update(original)
        made.clear()  # `swap` holds itself, and so this


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _has_content(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of whole numbers that are there to be read."""
    return _is_whole(tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _message(func: Any, reason: str, advice: str = "Measure") -> str:
    return (
        f"{func} at {source_line() or 'an unknown line'} {reason}. {advice} a real run instead:"
        f" {_MEASURE}."
    )
