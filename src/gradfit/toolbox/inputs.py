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
    names: set[str | None] = set()
    places: dict[Tensor, int] = {}
    for position, item in enumerate(_items(source, argument)):
        name, tensor = _read_item(item, f"{argument}[{position}]")
        if tensor in places or (name is not None and name in names):
            first = places.get(tensor, position)
            raise MisuseError(
                f"{argument}[{position}] ({name or 'unnamed'}) is there twice, first at {first}."
                " Pass it once."
            )
        places[tensor] = position
        names.add(name)
        pairs.append((name, tensor))
    return pairs


def _items(source: Inputs, argument: str) -> Iterable[object]:
    """What a source holds: tensors, or pairs of a name and a tensor."""
    if isinstance(source, Tensor):
        return [source]
    if isinstance(source, nn.Module):
        return source.named_parameters()
    if isinstance(source, Mapping):
        return source.items()
    return read_list(source, argument, _EXPECTED)


def _read_item(item: object, place: str) -> tuple[str | None, Tensor]:
    name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
    if not isinstance(tensor, Tensor) or not isinstance(name, str | None):
        raise MisuseError(f"{place} is {type(tensor).__name__}, not a tensor. Pass {_EXPECTED}.")
    return name, tensor


def label(name: object, tensor: Tensor | None = None) -> str:
    """How an error calls a tensor: by its name, or by its shape."""
    if isinstance(name, str):
        return repr(name)
    shaped = name if isinstance(name, Tensor) else tensor
    return f"the tensor of shape {tuple(shaped.shape)}" if shaped is not None else "a tensor"
