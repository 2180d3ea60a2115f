"""Memory that can be written to without torch knowing: rule 7 of `recorder.py`.

NumPy's, another library's that came by DLPack, a mapped file's, another process's: such memory has
an owner beside torch. And tensors that were made under inference mode have no version counter.

Frozen parameters are left out, though a loader may have mapped them from a file: they are large,
and not refilled.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from gradfit._torch import FakeTensor, base_of
from gradfit._torch_listen import unseen
from gradfit.tape.storage import copying

LARGE_BYTES = 1 << 20  # from here on no copy is held, but a digest


def is_unwatched(tensor: torch.Tensor) -> bool:
    """Whether what is in it can change, and its version counter not tell."""
    if tensor.is_inference():
        return not isinstance(tensor, torch.nn.Parameter | FakeTensor)
    if has_one_owner(tensor):
        return False
    return not isinstance(tensor, torch.nn.Parameter) and not isinstance(
        base_of(tensor), torch.nn.Parameter
    )


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Whether torch has allocated the memory for this process alone, so that nobody else has a
    storage or an array on it.
    """
    storage = tensor.untyped_storage()
    # An accelerator's storages all say that they are shared.
    return storage.resizable() and not (tensor.is_cpu and storage.is_shared())


def span_bytes(tensor: torch.Tensor) -> int:
    """From its first element to its last, gaps included: its storage may be a whole mapped file."""
    return _span(tensor) * tensor.element_size()


def copy_span(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, strides included, on memory of its own."""
    copying.now = True
    try:
        return _flat(tensor).clone().as_strided(tensor.size(), tensor.stride(), 0)
    finally:
        copying.now = False


def same_content(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same strides and the same bits, gaps included."""
    if (a.size(), a.stride(), a.dtype) != (b.size(), b.stride(), b.dtype):
        return False
    with unseen():  # looking is not an operation of the forward
        return torch.equal(_flat(a).view(torch.uint8), _flat(b).view(torch.uint8))


def digest_of(tensor: torch.Tensor) -> bytes:
    """A number for all of its bits."""
    with unseen():
        content: Any = _flat(tensor).view(torch.uint8).cpu().numpy()
    return hashlib.sha1(content, usedforsecurity=False).digest()  # as fast as copying


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the storages of two tensors overlap, though they may be two."""
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # which have no memory
        return False
    return a.device == b.device and _overlap(a.untyped_storage(), b.untyped_storage())


def _overlap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    return (
        one.data_ptr() < other.data_ptr() + other.nbytes()
        and other.data_ptr() < one.data_ptr() + one.nbytes()
    )


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((_span(tensor),), (1,), tensor.storage_offset())
