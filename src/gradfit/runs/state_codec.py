"""Nests of tensors and plain values as JSON text beside named tensors, and back, with nothing that could run.

JSON has no tuples, no integer keys, no NaN and no tensors: those are written as an object with one key that begins
with "$". Everything else is refused when it is written, so that what is read can only be data. So is what is too deep
or too long to be read again. A list of many numbers is a tensor in the file.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradfit._torch_distributed import shard_of
from gradfit.errors import StateError

_MAX_DEPTH = 64
_MAX_BITS = 256  # of an integer: any generator's state, and still a float
_LONG = 1024  # from so many numbers on, a list is written as a tensor


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor that is sharded over the ranks: `content`, which begins at `offset` of `shape`."""

    content: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def flatten(nest: Any, *, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A nest as what JSON can hold, and its tensors by name.

    >>> flatten({"lr": (0.1, float("inf")), "state": {0: torch.ones(2)}})[0]
    {'lr': {'$tuple': [0.1, {'$float': 'inf'}]}, 'state': {'$items': [[0, {'$tensor': 'state.0'}]]}}
    """
    tensors = _Tensors()
    return _encode(nest, name, tensors, 0), tensors.by_name


def unflatten(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `flatten` was given; a `StateError` for anything it could not have written.

    >>> unflatten({"$tuple": [1, {"$tensor": "a"}]}, {"a": torch.ones(1)})
    (1, tensor([1.]))
    """
    used: set[str] = set()
    nest = _decode(data, tensors, used, 0)
    unused = sorted(set(tensors) - used)
    if unused:
        raise StateError(f"The state has {len(unused)} tensors that nothing refers to, the first is {unused[0]!r}.")
    return nest


def _encode(value: Any, name: str, tensors: _Tensors, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateError(f"{name[:60]}… is nested more than {_MAX_DEPTH} deep, which a state file cannot hold.")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return _checked_integer(int(value), name)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor):
        shard = shard_of(value)
        if shard is None:
            return {"$tensor": tensors.add(value, name)}
        return {"$piece": [tensors.add(shard[0], name), list(value.shape), list(shard[1])]}
    if isinstance(value, tuple):
        return {"$tuple": _encode(list(value), name, tensors, depth)}
    if isinstance(value, list):
        numbers = _as_numbers(value)
        if numbers is not None:
            return {"$numbers": tensors.add(numbers, name)}
        return [_encode(item, f"{name}.{index}", tensors, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        parts = [(key, _encode(item, f"{name}.{key}".lstrip("."), tensors, depth + 1)) for key, item in value.items()]
        if isinstance(value, collections.Counter):
            return {"$counter": [[_encode(key, name, tensors, depth + 1), count] for key, count in parts]}
        if all(type(key) is str and not key.startswith("$") for key, _ in parts):
            return dict(parts)
        return {"$items": [[_encode(key, name, tensors, depth + 1), item] for key, item in parts]}
    raise StateError(
        f"{name or 'The state'} is a {type(value).__module__}.{type(value).__name__}, which a state file cannot hold: "
        "only tensors, numbers, text, lists, tuples and dicts. Leave it out of state_dict()."
    )


def _checked_integer(value: int, name: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise StateError(
            f"{name or 'A number'} has {value.bit_length()} bits; {_MAX_BITS} is the most in a state file."
        )
    return value


def _as_numbers(values: list[Any]) -> torch.Tensor | None:
    """A long list of integers, or of floats, as a tensor from which it is read again as it was; None for others."""
    if len(values) < _LONG:
        return None
    kinds = set(map(type, values))
    if kinds == {float}:
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return torch.tensor(values, dtype=torch.int64, device="cpu")
    return None


class _Tensors:
    """Tensors by name; one that is met again keeps its first name, so that it is one tensor again when it is read."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}

    def add(self, tensor: torch.Tensor, name: str) -> str:
        if tensor.layout is not torch.strided:
            raise StateError(f"{name} is a {tensor.layout} tensor, which a state file cannot hold. Make it dense.")
        address = tensor.untyped_storage().data_ptr()
        known = self._by_storage.setdefault(address, []) if tensor.numel() else []
        for other in known:
            if _geometry(self.by_name[other]) == _geometry(tensor):
                return other
        name = name.encode("utf-8", "backslashreplace").decode()  # a name in the file must be text that can be written
        unique, count = name, 1
        while unique in self.by_name:
            count += 1
            unique = f"{name}~{count}"
        self.by_name[unique] = tensor.detach().clone() if known else tensor.detach()  # the format has no views
        known.append(unique)
        return unique


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _decode(data: Any, tensors: Mapping[str, torch.Tensor], used: set[str], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateError(f"The state is nested more than {_MAX_DEPTH} deep, so gradfit did not write it.")
    if isinstance(data, list):
        return [_decode(item, tensors, used, depth + 1) for item in data]
    if type(data) is int:
        return _checked_integer(data, "A number of the state")
    if not isinstance(data, dict):
        return data
    mark = next(iter(data), "")
    if len(data) != 1 or not mark.startswith("$"):
        return {key: _decode(item, tensors, used, depth + 1) for key, item in data.items()}
    content = data[mark]
    if mark == "$tensor" and isinstance(content, str):
        return _look_up(content, tensors, used)
    if mark == "$piece" and isinstance(content, list) and len(content) == 3:
        return _piece(content, tensors, used)
    if mark == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if mark == "$numbers" and isinstance(content, str):
        return _numbers(_look_up(content, tensors, used), content)
    if mark == "$tuple" and isinstance(items := _decode(content, tensors, used, depth), list):
        return tuple(items)
    if mark in ("$items", "$counter") and isinstance(content, list):
        try:
            pairs = [(_decode(k, tensors, used, depth + 1), _decode(v, tensors, used, depth + 1)) for k, v in content]
            found = dict(pairs)
        except (TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"The state has a {mark} that is not a list of pairs.") from None
        if mark == "$items":
            return found
        if not all(type(count) is int for count in found.values()):
            raise StateError("The state has a $counter that does not count.")
        return collections.Counter(found)
    raise StateError(f"The state has an unknown mark {mark!r}.")


def _numbers(content: Any, name: str) -> list[Any]:
    numbers = content if isinstance(content, torch.Tensor) else content[:]
    if numbers.dtype not in (torch.int64, torch.float64) or numbers.dim() != 1:
        raise StateError(f"The state's {name!r} is no list of numbers: {tuple(numbers.shape)} of {numbers.dtype}.")
    found: list[Any] = numbers.tolist()
    return found


def _look_up(name: Any, tensors: Mapping[str, Any], used: set[str]) -> Any:
    if not isinstance(name, str) or name not in tensors:
        raise StateError(f"The state refers to a tensor {name!r} that is not in its file.")
    used.add(name)
    return tensors[name]


def _piece(data: list[Any], tensors: Mapping[str, Any], used: set[str]) -> Piece:
    name, shape, offset = data
    content = _look_up(name, tensors, used)
    size = list(content.shape if isinstance(content, torch.Tensor) else content.get_shape())
    numbers = [shape, offset, size]
    whole = all(isinstance(one, list) and all(type(n) is int and n >= 0 for n in one) for one in numbers)
    if not whole or not len(shape) == len(offset) == len(size):
        raise StateError(f"The state's {name!r} is no piece of a tensor: {size} at {offset!r} of {shape!r}.")
    if any(at + n > total for at, n, total in zip(offset, size, shape, strict=True)):
        raise StateError(f"The state's {name!r} reaches beyond its tensor: {size} at {offset} of {shape}.")
    return Piece(content, tuple(shape), tuple(offset))
