"""Reading what users pass: one small set of checks, so that every mistake is named before anything is changed.

Each check takes the value and the name of its parameter, and gives back the value or raises `InvalidParameter`, whose
text says what was passed, what is wrong with it and what to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradfit.errors import InvalidParameter

Number = int | float
T = TypeVar("T")

_MOST = 2**63 - 1  # what a tensor's int64 holds, and what a float can stand for


def invalid(name: str, value: Any, reason: str, instead: str) -> InvalidParameter:
    """The error for a parameter: what was passed, why it cannot be, what to pass.

    >>> print(invalid("steps", 0, "must be at least 1", "steps=4"))
    steps=0 must be at least 1. Pass steps=4.
    """
    text = f"{name}={show(value)} {reason}. Pass {instead}."
    return InvalidParameter(text, name=name, reason=reason)


def show(value: Any) -> str:
    """A value in an error: short, and without the numbers of a tensor.

    >>> show(torch.zeros(2, 3)), show("x" * 200)[-12:]
    ('<tensor of shape (2, 3), torch.float32>', 'xxxxxxxxxxx…')
    """
    if isinstance(value, Tensor):
        return f"<tensor of shape {tuple(value.shape)}, {value.dtype}>"
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, int) and abs(value) > 10**30:
        return f"<a number of {value.bit_length()} bits>"  # Python refuses to print very long ones
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:79] + "…"


def read_count(value: Any, name: str, *, minimum: int = 1) -> int:
    """A whole number of at least `minimum`; those of numpy too.

    >>> read_count(4, "steps")
    4
    """
    if hasattr(value, "item") and getattr(value, "shape", None) == () and not isinstance(value, Tensor):
        value = value.item()  # numpy's integers
    instead = f"{name}={max(minimum, 4)}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, value, "is not a whole number", instead)
    if value < minimum:
        raise invalid(name, value, f"must be at least {minimum}", instead)
    if value > _MOST:
        raise invalid(name, value, f"must be at most {_MOST}", instead)
    return value


def read_number(
    value: Any,
    name: str,
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    below: float = math.inf,
    maximum: float = math.inf,
    like: float = 1.0,
) -> Number:
    """A finite number within its bounds; `like` is the one that the error proposes.

    >>> read_number(0.5, "momentum", minimum=0, below=1)
    0.5
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "meta" else value
    if hasattr(number, "item") and getattr(number, "shape", None) == () and not isinstance(number, Tensor):
        number = number.item()  # numpy's numbers
    instead = f"{name}={like:g}"
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise invalid(name, value, "is not a number", instead)
    if (isinstance(number, int) and abs(number) > _MOST) or not math.isfinite(number):
        raise invalid(name, number, "must be a finite number", instead)
    for holds, reason in (
        (number > above, f"must be more than {above:g}"),
        (number >= minimum, f"must be at least {minimum:g}"),
        (number < below, f"must be less than {below:g}"),
        (number <= maximum, f"must be at most {maximum:g}"),
    ):
        if not holds:
            raise invalid(name, number, reason, instead)
    return number


def read_flag(value: Any, name: str) -> bool:
    """True or False, and nothing that only behaves like one."""
    if not isinstance(value, bool):
        raise invalid(name, value, "is not True or False", f"{name}=True or {name}=False")
    return value


def read_choice(value: Any, name: str, choices: Collection[str]) -> str:
    """One of a few words.

    >>> read_choice("mean", "reduction", ("mean", "sum"))
    'mean'
    """
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, value, "is not known", f"{name}=" + " or ".join(map(repr, choices)))
    return value


def read_text(value: Any, name: str, instead: str | None = None) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise invalid(name, value, "is not a text" if value != "" else "is empty", instead or f"{name}='…'")
    return value


def read_callable(value: Any, name: str, instead: str) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise invalid(name, value, f"is a {type(value).__name__}, which is not callable", instead)
    return value  # type: ignore[no-any-return]


def read_instance(value: Any, name: str, kind: type[T] | tuple[type[T], ...], instead: str) -> T:
    """An object of one kind, or of one of several."""
    if not isinstance(value, kind):
        raise invalid(name, value, f"is a {type(value).__name__}", instead)
    return value


def read_tensor(value: Any, name: str, instead: str = "a tensor") -> Tensor:
    """A tensor."""
    return read_instance(value, name, Tensor, instead)


def read_mapping(value: Any, name: str, instead: str) -> Mapping[Any, Any]:
    """A mapping."""
    return read_instance(value, name, Mapping, instead)
