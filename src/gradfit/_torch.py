"""The only file that touches private or version-dependent torch API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]

_make_subclass = torch.Tensor._make_subclass
_plain_tensor = torch.Tensor

storage_key = torch._C._storage_address  # the address of a tensor's StorageImpl: views share it
graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward pass


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """An alias without a graph that shares the version counter, made without passing through dispatch modes."""
    return _make_subclass(_plain_tensor, tensor)


def detached_in_dispatch(tensor: torch.Tensor) -> torch.Tensor:
    """The same inside a `__torch_dispatch__`, where autograd, which shares version counters, is switched off."""
    with torch._C._RestorePythonTLSSnapshot():
        return _make_subclass(_plain_tensor, tensor)


def inside_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, …) surrounds this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for _name in dir(torch._C.DispatchKey):
    if _name.startswith("Autocast"):
        _AUTOCAST_KEYS = _AUTOCAST_KEYS | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run operations where a dispatch mode saw them: below autograd and autocast, so that nothing is cast twice."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        yield


def schema_of(op: Any) -> Any:
    """An operator's schema: its arguments, which of them it writes to, and what its results alias."""
    return op._schema


def selective_policy(context: Any) -> Any:
    """The policy function of a context made by `torch.utils.checkpoint.create_selective_checkpoint_contexts`."""
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    return context.policy_fn if isinstance(context, _CachingTorchDispatchMode) else None


def has_freed_tensors(node: Node) -> bool:
    """Whether a backward pass has already taken what this operation saved."""
    for attribute in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        try:
            getattr(node, attribute, None)
        except RuntimeError as error:  # torch has one type for "freed" and "changed in place", only the text differs
            if "freed" in str(error):
                return True
    return False
