"""Nests of tensors and plain values as JSON text beside named tensors, and back, with nothing that
could run.

JSON has no tuples, no integer keys, no NaN and no tensors: those are written as an object with one
key that begins with "$". Everything else is refused when it is written, so that what is read can
only be data. So is what is too deep or too long to be read again. A list of many numbers is a
tensor in the file.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from gradfit._torch_distributed import shard_of
from gradfit.errors import StateError

_MAX_DEPTH = 64
_MAX_BITS = 256  # of an integer: any generator's state, and still a float
_LONG = 1024  # from so many numbers on, a list is written as a tensor


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tensor: `content`, which begins at `offset` of the whole, of `shape`."""

    content: Any
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def flatten(nest: Any, *, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A nest as what JSON can hold, and its tensors by name.

    Args:
        nest: Tensors, numbers, text, lists, tuples and dicts.
        name: Before the names of its tensors.

    >>> flatten({"lr": (0.1, float("inf")), "state": {0: torch.ones(2)}})[0]
    {'lr': {'$tuple': [0.1, {'$float': 'inf'}]}, 'state': {'$items': [[0, {'$tensor': 'state.0'}]]}}
    """
    tensors = _NamedTensors()
    return _Encoder(tensors).encode(nest, name, 0), tensors.by_name


def unflatten(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `flatten` was given; a `StateError` for anything it could not have written.

    Args:
        data: The JSON.
        tensors: The tensors that it refers to, by name.

    >>> unflatten({"$tuple": [1, {"$tensor": "a"}]}, {"a": torch.ones(1)})
    (1, tensor([1.]))
    """
    decoder = _Decoder(tensors)
    nest = decoder.decode(data, 0)
    unused = sorted(set(tensors) - decoder.used)
    if unused:
        raise StateError(
            f"The state has {len(unused)} tensors that nothing refers to, the first is"
            f" {unused[0]!r}."
        )
    return nest


# ------------------------------------------------------------------------------------ writing


class _Encoder:
    """Writes one nest; its tensors are added to those given."""

    def __init__(self, tensors: _NamedTensors) -> None:
        self._tensors = tensors

    def encode(self, value: Any, name: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise StateError(
                f"{name[:60]}… is nested more than {_MAX_DEPTH} deep, which a state file cannot"
                " hold."
            )
        if isinstance(value, bool | str | None):
            return value
        if isinstance(value, np.generic):
            value = value.item()
        for kind, encode in self._KINDS:
            if isinstance(value, kind):
                return encode(self, value, name, depth)
        raise _cannot_be_held(value, name)

    def _integer(self, value: int, name: str, depth: int) -> Any:
        return _checked_integer(int(value), name)

    def _float(self, value: float, name: str, depth: int) -> Any:
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}

    def _tensor(self, value: torch.Tensor, name: str, depth: int) -> Any:
        local = shard_of(value)
        if local is None:
            return {"$tensor": self._tensors.add(value, name)}
        content, offset = local
        return {"$piece": [self._tensors.add(content, name), list(value.shape), list(offset)]}

    def _tuple(self, value: tuple[Any, ...], name: str, depth: int) -> Any:
        return {"$tuple": self.encode(list(value), name, depth)}

    def _list(self, value: list[Any], name: str, depth: int) -> Any:
        numbers = _as_numbers(value)
        if numbers is not None:
            return {"$numbers": self._tensors.add(numbers, name)}
        return [self.encode(item, f"{name}.{n}", depth + 1) for n, item in enumerate(value)]

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int) -> Any:
        parts = [
            (key, self.encode(item, f"{name}.{key}".lstrip("."), depth + 1))
            for key, item in value.items()
        ]
        is_counter = isinstance(value, collections.Counter)
        if not is_counter and all(map(_is_plain_key, value)):
            return dict(parts)
        mark = "$counter" if is_counter else "$items"
        return {mark: [[self.encode(key, name, depth + 1), item] for key, item in parts]}

    _KINDS: ClassVar[tuple[tuple[type, Any], ...]] = (
        (int, _integer),
        (float, _float),
        (torch.Tensor, _tensor),
        (tuple, _tuple),
        (list, _list),
        (Mapping, _mapping),
    )


def _cannot_be_held(value: Any, name: str) -> StateError:
    return StateError(
        f"{name or 'The state'} is a {type(value).__module__}.{type(value).__name__}, which a"
        " state file cannot hold: only tensors, numbers, text, lists, tuples and dicts. Leave"
        " it out of state_dict()."
    )


def _is_plain_key(key: Any) -> bool:
    """Whether JSON has such a key, and it is no mark."""
    return type(key) is str and not key.startswith("$")


def _checked_integer(value: int, name: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise StateError(
            f"{name or 'A number'} has {value.bit_length()} bits; {_MAX_BITS} is the most in a"
            " state file."
        )
    return value


def _as_numbers(values: list[Any]) -> torch.Tensor | None:
    """A long list of integers, or of floats, as a tensor from which it is read again as it was;
    None for others.
    """
    if len(values) < _LONG:
        return None
    kinds = set(map(type, values))
    if kinds == {float}:
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    if kinds == {int} and -(2**63) <= min(values) <= max(values) < 2**63:
        return torch.tensor(values, dtype=torch.int64, device="cpu")
    return None


class _NamedTensors:
    """Tensors by name; one that is met again keeps its first name, so that it is one tensor again
    when it is read.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._by_storage: dict[int, list[str]] = {}

    def add(self, tensor: torch.Tensor, name: str) -> str:
        _check_dense(tensor, name)
        address = tensor.untyped_storage().data_ptr()
        in_storage = self._by_storage.setdefault(address, []) if tensor.numel() else []
        for other in in_storage:
            if _geometry(self.by_name[other]) == _geometry(tensor):
                return other
        unique = self._unique(name)
        # the format has no views
        self.by_name[unique] = tensor.detach().clone() if in_storage else tensor.detach()
        in_storage.append(unique)
        return unique

    def _unique(self, name: str) -> str:
        # a name in the file must be text that can be written
        name = name.encode("utf-8", "backslashreplace").decode()
        unique, count = name, 1
        while unique in self.by_name:
            count += 1
            unique = f"{name}~{count}"
        return unique


def _check_dense(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise StateError(
            f"{name} is a {tensor.layout} tensor, which a state file cannot hold. Make it dense."
        )


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


# ------------------------------------------------------------------------------------ reading


class _Decoder:
    """Reads one nest, and notes which tensors it `used`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors, self.used = tensors, set[str]()

    def decode(self, data: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise StateError(
                f"The state is nested more than {_MAX_DEPTH} deep, so gradfit did not write it."
            )
        if isinstance(data, list):
            return [self.decode(item, depth + 1) for item in data]
        if type(data) is int:
            return _checked_integer(data, "A number of the state")
        return self._dict(data, depth) if isinstance(data, dict) else data

    def _dict(self, data: dict[str, Any], depth: int) -> Any:
        """A dict, or what a dict with a mark for its only key stands for."""
        mark = next(iter(data), "")
        if len(data) != 1 or not mark.startswith("$"):
            return {key: self.decode(item, depth + 1) for key, item in data.items()}
        kind, decode = self._MARKS.get(mark, (None, None))
        if kind is None or not isinstance(data[mark], kind):
            raise StateError(f"The state has an unknown mark {mark!r}.")
        return decode(self, data[mark], depth)

    def _tensor(self, name: str, depth: int) -> Any:
        if name not in self._tensors:
            raise StateError(f"The state refers to a tensor {name!r} that is not in its file.")
        self.used.add(name)
        return self._tensors[name]

    def _float(self, text: str, depth: int) -> float:
        if text not in ("nan", "inf", "-inf"):
            raise StateError(f"The state has a $float {text[:60]!r}.")
        return float(text)

    def _tuple(self, content: list[Any] | dict[str, Any], depth: int) -> tuple[Any, ...]:
        if isinstance(content, dict) and list(content) != ["$numbers"]:  # of many numbers
            raise StateError("The state has a $tuple that is not a list.")
        return tuple(self.decode(content, depth))

    def _items(self, content: list[Any], depth: int) -> dict[Any, Any]:
        items = {}
        for pair in content:
            key, value = (self.decode(one, depth + 1) for one in _checked_pair(pair))
            try:
                items[key] = value
            except TypeError:
                raise StateError("The state has a dict with a key that is none.") from None
        return items

    def _counter(self, content: list[Any], depth: int) -> collections.Counter[Any]:
        counts = self._items(content, depth)
        if not all(type(count) is int for count in counts.values()):
            raise StateError("The state has a $counter that does not count.")
        return collections.Counter(counts)

    def _numbers(self, name: str, depth: int) -> list[Any]:
        content = self._tensor(name, depth)
        numbers = content if isinstance(content, torch.Tensor) else content[:]
        if numbers.dtype not in (torch.int64, torch.float64) or numbers.dim() != 1:
            shown = f"{tuple(numbers.shape)} of {numbers.dtype}"
            raise StateError(f"The state's {name!r} is no list of numbers: {shown}.")
        values: list[Any] = numbers.tolist()
        return values

    def _shard(self, data: list[Any], depth: int) -> Shard:
        if len(data) != 3 or not isinstance(data[0], str):
            raise StateError("The state has a $piece that names no tensor.")
        name, shape, offset = data
        content = self._tensor(name, depth)
        size = list(content.shape if isinstance(content, torch.Tensor) else content.get_shape())
        _check_piece(name, size, offset, shape)
        return Shard(content, tuple(shape), tuple(offset))

    _MARKS: ClassVar[dict[str, tuple[Any, Any]]] = {
        "$tensor": (str, _tensor),
        "$float": (str, _float),
        "$numbers": (str, _numbers),
        "$piece": (list, _shard),
        "$tuple": ((list, dict), _tuple),
        "$items": (list, _items),
        "$counter": (list, _counter),
    }


def _checked_pair(pair: Any) -> list[Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise StateError("The state has a dict that is not a list of pairs.")
    return pair


def _check_piece(name: str, size: list[int], offset: Any, shape: Any) -> None:
    """That so many elements at this place are within a tensor of this shape."""
    if not all(map(_are_sizes, (shape, offset))) or not len(shape) == len(offset) == len(size):
        raise StateError(
            f"The state's {name!r} is no piece of a tensor: {size} at {offset!r} of {shape!r}."
        )
    if any(at + n > total for at, n, total in zip(offset, size, shape, strict=True)):
        raise StateError(
            f"The state's {name!r} reaches beyond its tensor: {size} at {offset} of {shape}."
        )


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
