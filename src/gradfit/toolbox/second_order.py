"""Second derivatives without the matrix that holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfit.arguments import invalid, read_callable, read_list
from gradfit.errors import MisuseError
from gradfit.toolbox.gradient_map import GradientMap, backward, trained_tensors
from gradfit.toolbox.inputs import Inputs, label

_Pairs = list[tuple[str | None, Tensor]]
Vector = Tensor | Sequence[Tensor] | Mapping[Any, Tensor]


def hessian_vector_product(
    loss: Tensor | Callable[..., Tensor], inputs: Inputs, vector: Vector
) -> Any:
    """The Hessian of `loss` in `inputs`, times `vector`, at the price of two backward passes.

    `loss` is a loss, or a function of the inputs that gives one. The result has the form of
    `inputs`: a tensor for a tensor, a list for a list, a `GradientMap` for a model or for names
    with tensors. `vector` is of that form too. The graph of `loss` is kept, so that the next vector
    can be asked for.

    Args:
        loss: a loss with its graph, or a function that computes one.
        inputs: what to differentiate by, twice.
        vector: of the inputs' form.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian_vector_product((x**3).sum(), x, torch.tensor([1.0, 1.0]))
    tensor([ 6., 12.])
    >>> x, vector = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    >>> hessian_vector_product(lambda x: (x**3).sum(), x, vector)
    tensor([ 0., 12.])
    """
    pairs = trained_tensors(inputs)
    directions = _directions(pairs, vector)
    if not isinstance(loss, Tensor):
        loss, pairs = _evaluate(loss, inputs, pairs)
    tensors = [tensor for _, tensor in pairs]
    first = backward(loss, inputs if isinstance(inputs, nn.Module) else tensors, create_graph=True)
    return _in_form_of(inputs, pairs, _products(first, tensors, directions))


def _in_form_of(inputs: Inputs, pairs: _Pairs, products: list[Tensor]) -> Any:
    """A tensor for a tensor, a list for a list, a map for what has names."""
    if isinstance(inputs, Tensor):
        return products[0]
    if not isinstance(inputs, nn.Module | Mapping):
        return products
    by_name = GradientMap()
    for (name, tensor), product in zip(pairs, products, strict=True):
        by_name.bind(name or tensor, tensor, product)
    return by_name


def _evaluate(fn: Callable[..., Tensor], inputs: Inputs, pairs: _Pairs) -> tuple[Tensor, _Pairs]:
    """A function's loss in inputs of its own, and those."""
    read_callable(fn, "loss", "a loss, or a function of the inputs", arguments=len(pairs))
    if isinstance(inputs, nn.Module | Mapping):
        raise MisuseError(
            "loss is a function, inputs has names. Pass the loss it gives, or the tensors in a"
            " list."
        )
    own: _Pairs = [(name, tensor.detach().requires_grad_()) for name, tensor in pairs]
    with torch.enable_grad():
        return fn(*(tensor for _, tensor in own)), own


def _products(first: GradientMap, tensors: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """The derivative of the first gradients along the directions."""
    curved = [
        (first[tensor], direction)
        for tensor, direction in zip(tensors, directions, strict=True)
        if tensor in first and first[tensor].requires_grad
    ]
    # A gradient that does not change (the loss is linear there) has no graph, and its part of the
    # product is zero.
    if not curved:
        return list(map(torch.zeros_like, tensors))
    gradients, vectors = zip(*curved, strict=True)
    products = torch.autograd.grad(
        gradients, tensors, vectors, allow_unused=True, retain_graph=True
    )
    return [
        torch.zeros_like(tensor) if product is None else product.detach()
        for tensor, product in zip(tensors, products, strict=True)
    ]


def _directions(pairs: list[tuple[str | None, Tensor]], vector: Vector) -> list[Tensor]:
    """One direction per input, checked before anything is computed."""
    directions = _in_order(pairs, vector)
    if len(directions) != len(pairs):
        raise MisuseError(
            f"vector holds {len(directions)} tensors, inputs {len(pairs)}. Pass one for each input."
        )
    for (name, tensor), direction in zip(pairs, directions, strict=True):
        _require_like(label(name, tensor), tensor, direction)
    return directions


def _in_order(pairs: list[tuple[str | None, Tensor]], vector: Vector) -> list[Tensor]:
    """The directions in the order of the inputs, whatever form they came in."""
    if isinstance(vector, Tensor):
        return [vector]
    if not isinstance(vector, Mapping):
        return read_list(vector, "vector", "one tensor for each of the inputs")
    missing = [label(*pair) for pair in pairs if _key(*pair) not in vector]
    if missing:
        raise MisuseError(
            f"vector has no entry for {', '.join(missing[:3])}. Pass one for each of the inputs."
        )
    return [vector[_key(*pair)] for pair in pairs]


def _key(name: str | None, tensor: Tensor) -> str | Tensor:
    return tensor if name is None else name


def _require_like(name: str, tensor: Tensor, direction: object) -> None:
    """A direction has its input's shape, type and device."""
    if not isinstance(direction, Tensor) or direction.shape != tensor.shape:
        given = (
            tuple(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        )
        raise MisuseError(
            f"vector for {name}, one of the inputs, is {given}, expected shape "
            f"{tuple(tensor.shape)}. Pass one of the same shape."
        )
    if direction.dtype != tensor.dtype or direction.device != tensor.device:
        kind = f"a {tensor.dtype} tensor on {tensor.device}, as that of the inputs is"
        raise invalid("vector", direction, f"is on {direction.device}", kind)
