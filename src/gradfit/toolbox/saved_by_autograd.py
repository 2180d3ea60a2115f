"""What the graphs that are alive hold on to, read without unpacking, rebuilding or keeping any of
it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradfit import _torch
from gradfit.tape.values import Handle, OfSubclass, TapeValue
from gradfit.toolbox.autograd_nodes import leaf_of


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that an operation saved for its backward; `storage` tells which of them share
    memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: int
    is_parameter: bool


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """A storage's identity while it lives, and its bytes."""
    try:
        return _torch.storage_key(tensor), tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, or a wrapper
        return id(tensor), tensor.numel() * tensor.element_size()


def saved_by(node: Node) -> Iterator[tuple[str, Tensor]]:
    """The tensors a node holds: saved by autograd, inside what a hook packed, or on a custom
    Function's context.
    """
    for slot in _torch.saved_slots(node):
        for tensor in _tensors_in(slot.content):
            yield slot.name, tensor
    for name, value in getattr(node, "__dict__", {}).items():
        for tensor in _tensors_in(value):
            yield name, tensor


def parameter_storages(nodes: Iterable[Node]) -> set[int]:
    """The storages that belong to leaves and to modules: there with or without a graph, so never
    counted as saved.
    """
    owned = [leaf for leaf in map(leaf_of, nodes) if leaf is not None]
    # Leaves alone do not tell: a graph also saves frozen parameters, and buffers.
    for value in _living(nn.Parameter, nn.Module):
        owned += [value] if isinstance(value, nn.Parameter) else _buffers_of(value)
    return {storage_of(tensor)[0] for tensor in owned}


def _buffers_of(module: nn.Module) -> Iterator[Tensor]:
    """Its own; none while its `__init__` has not run, before which torch cannot list them."""
    return module.buffers(recurse=False) if "_parameters" in module.__dict__ else iter(())


def live_results() -> list[Tensor]:
    """Every tensor in this process that has a graph behind it.

    Not those of `torch.compile`, which have a shape and no memory, and which it keeps.
    """
    return [value for value in _living(Tensor) if _has_graph(value)]


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None and not isinstance(tensor, _torch.FakeTensor)
    except RuntimeError:  # a view whose base was changed under no_grad cannot say
        return False


def _living(*kinds: type) -> Iterator[Any]:
    """The objects of these kinds among all that live, of which there may be a million."""
    objects = gc.get_objects()
    # By type and not isinstance, which asks proxies for a __class__ and so wakes them up.
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return compress(objects, map(wanted.__contains__, map(type, objects)))


def _tensors_in(content: Any) -> Iterator[Tensor]:
    """Follow containers, and the handles of a recomputed scope, to the tensors that they keep
    alive.
    """
    # Without recursion: values of a tape are made of one another, as long as the forward is.
    stack: list[Any] = [content]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack += _held_by(value)


def _held_by(value: Any) -> Iterable[Any]:
    """What a container or a handle holds; nothing of any other object."""
    for kind, held in _HELD.items():
        if isinstance(value, kind):
            return held(value)
    return ()


def _held_by_value(value: TapeValue) -> Iterable[Any]:
    """What is kept of it, or else what it will be made from."""
    made_from = () if value.op is None else (*value.op.inputs, *value.op.written)
    return value.tensor, *made_from


_HELD: dict[type, Callable[[Any], Iterable[Any]]] = {
    Handle: lambda handle: (handle.value,),
    OfSubclass: lambda wrapped: (wrapped.content,),
    TapeValue: _held_by_value,
    tuple: iter,
    list: iter,
    dict: lambda mapping: mapping.values(),
}
