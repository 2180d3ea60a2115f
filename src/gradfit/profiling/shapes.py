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
from gradfit.batches.held_state import HeldState
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
        self._unknown: dict[int, StorageWatch] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(map(self._is_known, _tensors_in([args, list(kwargs.values())]))):
            return self._on_shapes(func, args, kwargs)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except NEEDS_CONTENT:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if all(map(_can_be_made, _tensors_in([out]))) else out

    def _on_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        # fake kernels are stricter than real ones here and there
        except (RuntimeError, NotImplementedError) as error:
            reason = f"failed on fake tensors: {str(error).rstrip('.')}"
            raise UnsupportedOp(_message(func, reason, "If real ones pass, measure")) from error
        return self._with_real_targets(func, args, kwargs, out)

    def _with_real_targets(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What an operation returned, where it wrote to whole numbers: these, whose content is
        unknown from now on, and not the fake ones that stood in for them.
        """
        info = info_of(func)
        targets = written_tensors(info, args, kwargs) if info.writes else []
        for target in targets:
            if not isinstance(target, FakeTensor):
                self._forget(target)
                out = target if isinstance(out, torch.Tensor) else out
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _has_content(tensor) and storage_key(tensor) not in self._unknown

    def _forget(self, tensor: torch.Tensor) -> None:
        watcher = watch_storage(
            tensor.untyped_storage(), lambda dead: self._unknown.pop(dead.key, None)
        )
        watcher.key = storage_key(tensor)
        self._unknown[watcher.key] = watcher


@contextmanager
def emptied(
    model: torch.nn.Module, shapes: Shapes, device: torch.device
) -> Iterator[Callable[[torch.Tensor, int], torch.Tensor]]:
    """Put shapes in the place of the model's tensors, and afterwards all of each module's
    attributes, and what is in them, as they were.

    Gives the function that does the same to a tensor of the batch, with so many times its rows.
    """
    stand_ins = _StandIns(shapes, device if next(model.parameters()).is_meta else None, device)
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    held = HeldState(original for _, original in attributes)
    try:
        for present, original in attributes:
            present.update(stand_ins.for_attributes(original))
        yield stand_ins.empty
    finally:
        for present, original in attributes:  # a cache that the forward filled with shapes goes too
            present.clear()
            present.update(original)
        held.restore()


class _StandIns:
    """Tensors of shapes alone in the place of others.

    `device` is where all of them are to be, None: where the others are; `meta_device` where those
    are to be that are nowhere.
    """

    def __init__(
        self, shapes: Shapes, device: torch.device | None, meta_device: torch.device
    ) -> None:
        self._fake, self._device, self._meta_device = shapes.fake, device, meta_device
        # A tied parameter is one tensor. By id: the originals live, so the ids are theirs.
        self._by_id: dict[int, torch.Tensor] = {}

    def for_attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._for_attribute(item)
            for name, item in attributes.items()
            if name != "_modules"
        }

    def _for_attribute(self, item: Any) -> Any:
        # parameters and buffers: a new dict, as the forward may register some
        if type(item) is dict:
            return {key: self._for_item(value) for key, value in item.items()}
        if _is_list_of_tensors(item):
            return [self._for_item(value) for value in item]
        return self._for_item(item)

    def _for_item(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in self._by_id:
            empty = self.empty(item)
            if isinstance(item, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, item.requires_grad)
            self._by_id[id(item)] = empty
        return self._by_id[id(item)]

    def empty(self, tensor: torch.Tensor, times: int = 1) -> torch.Tensor:
        """The tensor's shape, or its whole numbers, with so many times its rows."""
        where = self._where(tensor)
        repeated = times > 1 and tensor.dim() > 0
        if _has_content(tensor) and tensor.nbytes * times <= _LARGEST_BYTES:
            copy = torch.cat([tensor] * times) if repeated else tensor.detach().clone()
            return copy.to(where)
        with self._fake:
            if repeated:
                size = (tensor.size(0) * times, *tensor.shape[1:])
                return torch.empty(size, dtype=tensor.dtype, device=where)
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=where
            )

    def _where(self, tensor: torch.Tensor) -> torch.device:
        return self._device or (self._meta_device if tensor.is_meta else tensor.device)


def _is_list_of_tensors(item: Any) -> bool:
    """As an LSTM's flat weights are."""
    return type(item) is list and any(isinstance(value, torch.Tensor) for value in item)


def _tensors_in(nest: Any) -> list[torch.Tensor]:
    return [item for item in flatten(nest) if isinstance(item, torch.Tensor)]


def _can_be_made(tensor: torch.Tensor) -> bool:
    """Whether it is of whole numbers, and few enough."""
    return _is_whole(tensor) and tensor.nbytes <= _LARGEST_BYTES


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
