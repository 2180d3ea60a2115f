"""Reading what users pass: one small set of checks, so that every mistake is named before anything
is changed.

Each check takes the value and the name of its parameter, and gives back the value or raises
`InvalidParameter`, whose text says what was passed, what is wrong with it and what to pass.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from gradfit.errors import InvalidParameter, MisuseError

Number = int | float
T = TypeVar("T")

MOST = 2**63 - 1  # what a tensor's int64 holds, and what a float can stand for


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
    text = _repr_or_kind(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _repr_or_kind(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def plain_number(value: Any) -> Any:
    """The Python number in a tensor or an array of one element; anything else as it is.

    >>> plain_number(torch.tensor([3])), plain_number("x")
    (3, 'x')
    """
    return value.item() if _holds_one_number(value) else value


def _holds_one_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta
    return hasattr(value, "item") and getattr(value, "size", None) == 1


def read_count(value: Any, name: str, *, minimum: int = 1) -> int:
    """A whole number of at least `minimum`; those of numpy too.

    >>> read_count(4, "steps")
    4
    """
    if not isinstance(value, Tensor):
        value = plain_number(value)
    instead = f"{name}={max(minimum, 4)}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, value, "is not a whole number", instead)
    if value < minimum:
        raise invalid(name, value, f"must be at least {minimum}", instead)
    if value > MOST:
        raise invalid(name, value, f"must be at most {MOST}", instead)
    return value


def read_index(value: Any, name: str, length: int) -> int:
    """A position in something of so many items; a negative one counts from the end."""
    position = read_count(value, name, minimum=-length)
    if position >= length:
        raise invalid(
            name,
            position,
            f"is out of range, there are {length}",
            f"{name}={max(0, length - 1)} or less",
        )
    return position


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
    number = plain_number(value)
    instead = f"{name}={like:g}"
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise invalid(name, value, "is not a number", instead)
    if not _is_finite(number):
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


def _is_finite(number: Number) -> bool:
    if isinstance(number, int):
        return abs(number) <= MOST
    return math.isfinite(number)


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
        raise invalid(
            name, value, "is not a text" if value != "" else "is empty", instead or f"{name}='…'"
        )
    return value


def read_callable(
    value: Any, name: str, instead: str, *, arguments: int | None = None
) -> Callable[..., Any]:
    """Something that can be called; with so many positional `arguments`, as far as its signature
    says.

    >>> read_callable(len, "fn", "a function of one tensor", arguments=1)
    <built-in function len>
    """
    if not callable(value):
        raise invalid(name, value, f"is a {type(value).__name__}, which is not callable", instead)
    if arguments is not None:
        _check_takes(value, arguments, name, instead)
    return value  # type: ignore[no-any-return]


def _check_takes(function: Any, arguments: int, name: str, instead: str) -> None:
    signature = _signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        plural = "s" if arguments != 1 else ""
        reason = f"cannot be called with {arguments} argument{plural} ({error})"
        raise invalid(name, function, reason, instead) from None


def _signature_of(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value.forward if isinstance(value, torch.nn.Module) else value)
    except (TypeError, ValueError):  # many built-in functions have none
        return None


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


def read_list(value: Any, name: str, instead: str) -> list[Any]:
    """The items of a list, a tuple or another collection; a text or a tensor is not meant as one.

    >>> read_list((1, 2), "sizes", "[8, 16]")
    [1, 2]
    """
    if isinstance(value, str | bytes | Mapping | Tensor | torch.nn.Module) or not isinstance(
        value, Iterable
    ):
        raise invalid(name, value, f"is a {type(value).__name__}", instead)
    return list(value)


def read_gradient(value: Any, name: str) -> Tensor:
    """A tensor of a type that gradients have."""
    tensor = read_tensor(value, name, "a gradient, which is a tensor")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise invalid(name, tensor, f"is {tensor.dtype}, which no gradient is", f"{name}.float()")
    return tensor


def read_device(value: Any, name: str) -> torch.device:
    """A device, or its name."""
    try:
        if isinstance(value, str):
            return torch.device(value)
        return read_instance(value, name, torch.device, "'cpu'")
    except RuntimeError as error:
        raise invalid(
            name, value, f"is no device ({str(error).splitlines()[0][:80]})", f"{name}='cpu'"
        ) from None


def read_dtype(value: Any, name: str) -> torch.dtype:
    """A floating point type."""
    if not isinstance(value, torch.dtype) or not (value.is_floating_point or value.is_complex):
        raise invalid(name, value, "is not a floating point type", f"{name}=torch.float32")
    return value


def check_arguments(
    model: Any, loss_fn: Any, *, split: Any = None, **flags: Any
) -> Callable[[Any, Any], Any]:
    """A model, a loss function (given back), how to split a batch, and switches that are True or
    False.
    """
    read_instance(model, "model", torch.nn.Module, "the torch.nn.Module to train")
    _check_depth(model)
    _check_initialised(model)
    read_callable(
        loss_fn, "loss_fn", "a function loss_fn(model, batch) that returns the loss", arguments=2
    )
    if split is not None:
        read_callable(
            split,
            "split",
            "a function split(batch, size) that gives the parts, or None",
            arguments=2,
        )
    for name, value in flags.items():
        read_flag(value, name)
    return loss_fn  # type: ignore[no-any-return]


def _check_initialised(model: torch.nn.Module) -> None:
    """A lazy module has parameters without a shape until it is first called."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise MisuseError(
                f"The parameter {name!r} has no shape yet: a lazy module gets it in its first call."
                " Call the model on a batch before, and make the optimizer after that."
            )


def _check_depth(model: torch.nn.Module) -> None:
    """torch walks modules inside modules by recursion, whatever is asked of them."""
    try:
        for _ in model.modules():
            pass
    except RecursionError:
        raise MisuseError(
            "model has modules inside modules deeper than Python lets torch walk"
            f" (sys.getrecursionlimit() is {sys.getrecursionlimit()}), so nothing was run. Call"
            " sys.setrecursionlimit(…) with some times its depth first."
        ) from None


def check_model(model: torch.nn.Module, *, fake: bool = False) -> None:
    """Refuse a model that cannot be trained as it stands; a `fake` one has no content."""
    absent = [name for name, one in model.named_parameters() if one.is_meta and not fake]
    if absent:
        raise MisuseError(
            f"{len(absent)} of the model's parameters are on the meta device, without content"
            f" ({absent[0]!r} is the first). Call model.to_empty(device=…) and initialise them;"
            " gf.profile(..., fake=True) and gf.estimate need no content."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MisuseError(
            "No parameter of the model requires a gradient. Call model.requires_grad_() on what to"
            " train."
        )
    if not model.training:
        raise MisuseError(
            "The model is in evaluation mode, so dropout and BatchNorm would not train. Call"
            " model.train() first."
        )


def check_optimizer(optimizer: Any) -> None:
    """An optimizer: torch's, or any other that steps."""
    if not _has_method(optimizer, "step") or not _has_method(optimizer, "zero_grad"):
        raise invalid(
            "optimizer", optimizer, "is no optimizer", "torch.optim.AdamW(model.parameters())"
        )


def _has_method(thing: Any, name: str) -> bool:
    return callable(getattr(thing, name, None))
