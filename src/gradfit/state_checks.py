"""What a value read from a file must be, with types and bounds: a `StateError` that says where,
what and what not.

A check is a function of a place ("settings.seed") and a value. They are put together as the content
is nested:

>>> check = fields({"step": integer(0, 10), "names": list_of(text())})
>>> check("The state", {"step": 11, "names": []})
Traceback (most recent call last):
...
gradfit.errors.StateError: The state.step is 11, not an integer from 0 to 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gradfit.errors import StateError

Check = Callable[[str, Any], None]

MANY = 2**53
"""More steps, rows or bytes than there will be; beyond it a float is no longer exact."""


def wrong(where: str, value: Any, what: str) -> StateError:
    """The error for a value that is not what it must be."""
    is_long = isinstance(value, dict | list | tuple | torch.Tensor)
    shown = f"a {type(value).__name__}" if is_long else repr(value)
    return StateError(f"{where} is {shown[:60]}, not {what}.")


def integer(low: int, high: int = MANY) -> Check:
    """A whole number (no bool) within these bounds."""
    return partial(_check_number, (int,), low, high, f"an integer from {low} to {high}")


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A number (no bool, no NaN) within these bounds."""
    is_any = (low, high) == (-math.inf, math.inf)
    what = "a number" if is_any else f"from {low} to {high}"
    return partial(_check_number, (int, float), low, high, what)


def _check_number(
    kinds: tuple[type, ...], low: float, high: float, what: str, where: str, value: Any
) -> None:
    if type(value) not in kinds or not low <= value <= high:
        raise wrong(where, value, what)


def any_number(where: str, value: Any) -> None:
    """A number; a loss may be NaN."""
    if type(value) not in (int, float):
        raise wrong(where, value, "a number")


def boolean(where: str, value: Any) -> None:
    """True or false."""
    if type(value) is not bool:
        raise wrong(where, value, "true or false")


def text(*choices: str) -> Check:
    """Text, or one of these."""
    return partial(_check_text, choices)


def _check_text(choices: tuple[str, ...], where: str, value: Any) -> None:
    if type(value) is not str or (choices and value not in choices):
        raise wrong(where, value, f"one of {', '.join(choices)}" if choices else "text")


def optional(check: Check) -> Check:
    """The same, or nothing."""
    return lambda where, value: None if value is None else check(where, value)


def list_of(check: Check, most: int = 10_000) -> Check:
    """A list of such values, and no longer than this."""
    return partial(_check_list, check, most)


def _check_list(check: Check, most: int, where: str, value: Any) -> None:
    if type(value) is not list or len(value) > most:
        raise wrong(where, value, f"a list of at most {most}")
    for index, item in enumerate(value):
        check(f"{where}[{index}]", item)


def dict_of(check: Check) -> Check:
    """A dict from text to such values."""
    return partial(_check_dict, check)


def _check_dict(check: Check, where: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise wrong(where, value, "a dict with names")
    for key, item in value.items():
        check(f"{where}.{key[:60]}", item)


def fields(checks: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """A dict with just these names; `others` may be there."""
    return partial(_check_fields, checks, others or {})


def _check_fields(
    checks: Mapping[str, Check], others: Mapping[str, Check], where: str, value: Any
) -> None:
    if not isinstance(value, dict):
        raise wrong(where, value, "a dict")
    written = {**checks, **others}
    _check_names(written, where, value)
    for key, check in written.items():
        if key in value:
            check(f"{where}.{key}", value[key])
        elif key in checks:
            raise StateError(f"{where} has no {key!r}.")


def _check_names(written: Mapping[str, Check], where: str, value: Mapping[Any, Any]) -> None:
    for key in value:
        if key not in written:
            raise StateError(f"{where} has {str(key)[:60]!r}, which gradfit does not write.")


def tensor(dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Check:
    """A tensor, of this type and shape where they are given."""
    return partial(_check_tensor, dtype, shape)


def _check_tensor(
    dtype: torch.dtype | None, shape: tuple[int, ...] | None, where: str, value: Any
) -> None:
    if not isinstance(value, torch.Tensor):
        raise wrong(where, value, "a tensor")
    if dtype is not None and value.dtype != dtype:
        raise StateError(f"{where} is of {value.dtype}, not {dtype}.")
    if shape is not None and tuple(value.shape) != shape:
        raise StateError(f"{where} has shape {tuple(value.shape)}, not {shape}.")


def same_kind(where: str, value: Any, here: Any) -> None:
    """A value that can stand in the place of the one there is: an option of an optimizer, say.

    A number for a number (finite, where the one here is), a tensor for one of its shape and type,
    a list for one of its length, a dict for one of its names. Where there is None or an empty
    list, nothing is known of what may come.

    Args:
        where: The place of the value, for the error.
        value: What was read from the file.
        here: What the job has in that place.
    """
    if here is None or (isinstance(here, list | dict) and not here):
        return
    if isinstance(here, bool) is not isinstance(value, bool):  # True is a number to Python
        raise wrong(where, value, f"as the job's, {here!r}")
    check = next((check for kind, check in _SAME_KIND if _are_both(kind, value, here)), _same_type)
    check(where, value, here)


def _are_both(kind: Any, value: Any, here: Any) -> bool:
    return isinstance(here, kind) and isinstance(value, kind)


def _same_type(where: str, value: Any, here: Any) -> None:
    """For a tensor a number will do."""
    is_number_for_tensor = isinstance(here, torch.Tensor) and isinstance(value, int | float)
    if type(here) is not type(value) and not is_number_for_tensor:
        raise wrong(where, value, f"a {type(here).__name__} as the job's")


def _same_number(where: str, value: float, here: float) -> None:
    too_large = isinstance(value, int) and abs(value) > 2**63
    if too_large or (math.isfinite(here) and not math.isfinite(value)):
        raise wrong(where, value, f"a number as the job's, {here!r}")


def _same_tensor(where: str, value: torch.Tensor, here: torch.Tensor) -> None:
    if here.shape != value.shape or here.dtype != value.dtype:
        saved, own = (f"{tuple(one.shape)} of {one.dtype}" for one in (value, here))
        raise StateError(f"{where} is {saved}, the job's {own}.")


def _same_items(where: str, value: Sequence[Any], here: Sequence[Any]) -> None:
    if type(here) is not type(value):
        raise wrong(where, value, f"a {type(here).__name__} as the job's")
    if len(here) != len(value):
        raise StateError(f"{where} has {len(value)} entries, the job's {len(here)}.")
    for index, (one, other) in enumerate(zip(value, here, strict=True)):
        same_kind(f"{where}[{index}]", one, other)


def _same_names(where: str, value: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    if here.keys() != value.keys():
        strange = sorted(map(str, here.keys() ^ value.keys()))[:3]
        raise StateError(f"{where} has other names than the job's: {strange}.")
    for key, other in here.items():
        same_kind(f"{where}.{key}", value[key], other)


_SAME_KIND: list[tuple[Any, Callable[[str, Any, Any], None]]] = [
    ((int, float), _same_number),
    (torch.Tensor, _same_tensor),
    ((list, tuple), _same_items),
    (dict, _same_names),
]


def each_number(most: float, but: type | tuple[type, ...] = ()) -> Check:
    """Of a record, every number that it holds, however deep, is one (no NaN), and from `-most` to
    `most`; but for those in records of some types.
    """
    return partial(_check_each_number, most, but)


def _check_each_number(most: float, but: Any, where: str, record: Any) -> None:
    """A profile has many thousands of them."""
    left = [("", record)]
    while left:
        name, item = left.pop()
        if isinstance(item, int | float):
            if not -most <= item <= most:
                raise wrong(f"{where}: {name}", item, f"from {-most} to {most}")
        elif isinstance(item, tuple | list):
            left += [(name, part) for part in item]
        elif isinstance(item, Mapping):
            left += [(name, part) for part in item.values()]
        elif not isinstance(item, but):
            names = getattr(item, "__dataclass_fields__", ())
            left += [(name, getattr(item, name)) for name in names]
