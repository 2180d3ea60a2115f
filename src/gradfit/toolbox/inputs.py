"""The many ways to say "these tensors": one of them, a list, a model, names with tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from gradfit.arguments import read_list
from gradfit.errors import MisuseError

Inputs = Tensor | nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]

_EXPECTED = "a tensor, a list of tensors, a model, or names with tensors"


def named_tensors(source: Inputs, *, argument: str) -> list[tuple[str | None, Tensor]]:
    """Each tensor once, with its name where it has one; a tensor or a name given twice is a
    `MisuseError`.

    >>> [name for name, _ in named_tensors(nn.Linear(2, 1), argument="inputs")]
    ['weight', 'bias']
    """
    pairs: list[tuple[str | None, Tensor]] = []
    items: Iterable[object]
    if isinstance(source, Tensor):
        items = [source]
    elif isinstance(source, nn.Module):
        items = source.named_parameters()
    elif isinstance(source, Mapping):
        items = source.items()
    else:
        items = read_list(source, argument, _EXPECTED)
    names: set[str] = set()
    seen: dict[Tensor, int] = {}
    for position, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        if not isinstance(tensor, Tensor) or not isinstance(name, str | None):
            raise MisuseError(
                f"{argument}[{position}] is {type(tensor).__name__}, not a tensor. Pass"
                f" {_EXPECTED}."
            )
        if tensor in seen or name in names:
            first = seen.get(tensor, position)
            raise MisuseError(
                f"{argument}[{position}] ({name or 'unnamed'}) is there twice, first at {first}."
                " Pass it once."
            )
        seen[tensor] = position
        if name is not None:
            names.add(name)
        pairs.append((name, tensor))
    return pairs


def label(name: object, tensor: Tensor | None = None) -> str:
    """How an error calls a tensor: by its name, or by its shape."""
    if isinstance(name, str):
        return repr(name)
    shaped = name if isinstance(name, Tensor) else tensor
    return f"the tensor of shape {tuple(shaped.shape)}" if shaped is not None else "a tensor"
