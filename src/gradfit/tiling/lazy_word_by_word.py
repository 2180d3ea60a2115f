"""Functions of single numbers on lazy logits, which stay lazy: scaling, soft-capping, casts; and
softmax, which treats each row by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfit._torch import map_nest
from gradfit.tiling.lazy import LazyLogits, handlers
from gradfit.tiling.lazy_handlers import (
    bound,
    functions_named,
    handles,
    has_refused,
    operand,
    over_words,
)

_OF_SINGLE_NUMBERS = (
    "mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__",
    "__rtruediv__", "__rdiv__", "add", "__add__", "__radd__", "sub", "subtract", "__sub__",
    "__rsub__", "rsub", "neg", "negative", "__neg__", "pow", "__pow__", "__rpow__", "square",
    "sqrt", "rsqrt", "reciprocal", "abs", "absolute", "exp", "exp2", "expm1", "log", "log2",
    "log1p", "logaddexp", "tanh", "sigmoid", "logsigmoid", "softplus", "relu", "gelu", "silu",
    "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "masked_fill", "nan_to_num",
    "where", "isnan", "isinf", "isfinite", "logical_not", "__invert__", "eq", "ne", "lt", "le",
    "gt", "ge",
)  # fmt: skip


def _word_by_word(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """With numbers, tensors without rows, tensors of the same rows, and other lazy logits beside
    them.
    """
    operands = map_nest(lambda item: operand(lazy, item), (list(args), kwargs))
    if has_refused(operands):
        return NotImplemented
    return lazy.apply(function, tuple(operands[0]), operands[1], (function, args, kwargs))


for _function in functions_named(*_OF_SINGLE_NUMBERS):
    handlers[_function] = functools.partial(_word_by_word, _function)

# Python asks these of both sides, and torch has them as the functions above under other names.
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    handlers[getattr(Tensor, _name)] = functools.partial(_word_by_word, getattr(Tensor, _name))


def _like(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Something new of the same shape or type, for which no number is needed."""
    stand_in = torch.empty((), dtype=lazy.dtype, device=lazy.device).expand(lazy.shape)
    return function(*(stand_in if each is lazy else each for each in args), **kwargs)


for _function in functions_named(
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
):  # fmt: skip
    handlers[_function] = functools.partial(_like, _function)


# -------------------------------------------------------------------------------------------- casts


def _cast(dtype: torch.dtype, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return NotImplemented if len(args) > 1 or kwargs else _as_type(lazy, dtype)


for _name, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
):
    handles(_name)(functools.partial(_cast, _dtype))


def _as_type(lazy: LazyLogits, dtype: torch.dtype, *, copy: bool = False) -> Any:
    if lazy.dtype is dtype and not copy:
        return lazy
    origin = (Tensor.to, (lazy, dtype), {"copy": copy})
    return lazy.apply(Tensor.to, (lazy.expression, dtype), {}, origin)


@handles("to")
def _to(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if kwargs.get("memory_format") is not None:
        return NotImplemented
    said = [(kwargs.get("dtype"), kwargs.get("device")), *map(_type_and_device, args[1:])]
    if None in said:
        return NotImplemented
    dtype, device = map(_last_said, zip(*said, strict=True))
    if device is not None and not _same_device(device, lazy.device):
        return NotImplemented
    return _as_type(lazy, dtype or lazy.dtype, copy=bool(kwargs.get("copy", False)))


def _last_said(items: tuple[Any, ...]) -> Any:
    """The last that is not None; None if all are."""
    return next((item for item in reversed(items) if item is not None), None)


def _type_and_device(item: Any) -> tuple[torch.dtype | None, Any] | None:
    """What an argument of `to` says; None if it says something else."""
    if isinstance(item, torch.dtype | None):
        return item, None
    if isinstance(item, Tensor):
        return item.dtype, item.device
    is_device = isinstance(item, str | torch.device | int) and not isinstance(item, bool)
    return (None, item) if is_device else None


def _same_device(one: Any, other: torch.device) -> bool:
    device = torch.device(one)
    return device.type == other.type and (device.index is None or device.index == other.index)


@handles("type_as")
def _type_as(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], LazyLogits) or args[1].device != lazy.device:
        return NotImplemented
    return _as_type(lazy, args[1].dtype)


@handles("cpu")
def _cpu(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return lazy if lazy.device.type == "cpu" else NotImplemented


# ------------------------------------------------------------------------------------------ softmax


def _softmax(function: Any, lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    plain = F.log_softmax if "log" in function.__name__ else F.softmax
    names = ("dim", "_stacklevel", "dtype") if function is plain else ("dim", "dtype")
    dim, *_, dtype = bound(names, args, kwargs, (None,) * len(names))
    if not over_words(lazy, dim):
        return NotImplemented
    as_it_was = {"dim": lazy.class_dim, "dtype": dtype}
    of_tile = {"dim": -1, "dtype": dtype}
    return lazy.apply(plain, (lazy.expression,), of_tile, (plain, (lazy,), as_it_was))


for _function in functions_named("softmax", "log_softmax"):
    handlers[_function] = functools.partial(_softmax, _function)
