"""Frozen dataclasses as JSON text and back: the one format every stage's record is written in."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gradfit.errors import StateError

R = TypeVar("R")
_VERSION = 1


def to_json(record: Any, *, indent: int | None = None) -> str:
    """Write a record as JSON text; `from_json` gives back an equal one."""
    return json.dumps(
        {"gradfit": type(record).__name__, "version": _VERSION, **_encode(record)},
        indent=indent,
        allow_nan=False,
    )


def from_json(cls: type[R], text: str) -> R:
    """Read what `to_json` wrote; anything else is a `StateError`, and no code is ever run."""
    data = _parsed(cls, text)
    _check_header(cls, data)
    data = {key: value for key, value in data.items() if key not in ("gradfit", "version")}
    try:
        return typing.cast(R, _read_as(typing.cast(Any, cls))(data))
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise StateError(f"This {cls.__name__} is damaged: {error}. Make it again.") from None


def _parsed(cls: type, text: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"This is not a {cls.__name__}: not JSON ({error}). Pass the text of to_json()."
        ) from None


def _check_header(cls: type, data: Any) -> None:
    """Refuse what is of another kind, or of another version of this format."""
    name = data.get("gradfit") if isinstance(data, dict) else type(data).__name__
    if name != cls.__name__:
        raise StateError(
            f"This JSON holds a {name}, not a {cls.__name__}. Call {name}.from_json() or pass"
            " another."
        )
    if data.get("version") != _VERSION:
        raise StateError(
            f"This {cls.__name__} has format {data.get('version')}, not {_VERSION}. Make it again."
        )


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _encode(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    return _encode_float(value) if isinstance(value, float) else value


def _encode_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no NaN and no infinity


def _read_float(data: Any) -> float:
    if type(data) not in (int, float) and data not in ("nan", "inf", "-inf"):
        raise TypeError(f"{data!r} is not a number")
    return float(data)


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


_Reader = Callable[[Any], Any]


@functools.cache
def _read_as(hint: Any) -> _Reader:
    """How JSON becomes a value of this type: built once per type, since a profile holds thousands
    of each.
    """
    if hasattr(hint, "__dataclass_fields__"):
        return _RecordReader(hint)
    if hint is float:
        return _read_float
    if hint in (int, str, bool):
        return functools.partial(_read_plain, hint)
    make = _COLLECTIONS.get(typing.get_origin(hint))
    return _as_it_is if make is None else make(typing.get_args(hint))


class _RecordReader:
    """Reads a dataclass. Its fields' types are looked up when the first is read, not before: a
    record may hold others of its own kind.
    """

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    @functools.cached_property
    def _readers(self) -> dict[str, _Reader]:
        hints = typing.get_type_hints(self._cls)
        return {name: _read_as(hints[name]) for name in _names(self._cls)}

    def __call__(self, data: Any) -> Any:
        readers = self._readers
        return self._cls(**{name: readers[name](item) for name, item in data.items()})


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        read_item = _read_as(arguments[0])
        return lambda data: tuple([read_item(item) for item in data])
    readers = [_read_as(argument) for argument in arguments]
    return lambda data: tuple([read(item) for read, item in zip(readers, data, strict=True)])


def _dict_reader(arguments: tuple[Any, ...]) -> _Reader:
    read_value = _read_as(arguments[1])
    return lambda data: {key: read_value(item) for key, item in data.items()}


def _optional_reader(arguments: tuple[Any, ...]) -> _Reader:
    read, *_ = [_read_as(argument) for argument in arguments if argument is not type(None)]
    return lambda data: None if data is None else read(data)


_COLLECTIONS: dict[Any, Callable[[tuple[Any, ...]], _Reader]] = {
    tuple: _tuple_reader,
    dict: _dict_reader,
    Mapping: _dict_reader,
    typing.Union: _optional_reader,
    types.UnionType: _optional_reader,
}


def _read_plain(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"{data!r} is not {kind.__name__}")
    return data


def _as_it_is(data: Any) -> Any:
    return data
