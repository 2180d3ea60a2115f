"""An operation with a gradient of one's own, from two plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit.arguments import read_callable, read_text
from gradfit.errors import MisuseError

Gradients = Tensor | None | Sequence[Tensor | None]


class CustomOp:
    """A differentiable operation made by `custom_op`; call it with tensors."""

    def __init__(
        self, forward: Callable[..., Tensor], backward: Callable[..., Gradients], name: str
    ) -> None:
        self.name = name
        self._forward = _with_inputs(forward, before=0)
        self._backward = _with_inputs(backward, before=1)
        # A class per operation, so that autograd's node, and with it every graph and error, carries
        # its name.
        self._function: Any = type(
            name,
            (torch.autograd.Function,),
            {
                "forward": staticmethod(self.forward),
                # apart from the forward, which is what lets torch.func differentiate it
                # (https://docs.pytorch.org/docs/stable/notes/extending.func.html)
                "setup_context": staticmethod(_save_inputs),
                "backward": staticmethod(
                    lambda ctx, grad_output: self.backward(grad_output, ctx.saved_tensors)
                ),
                "generate_vmap_rule": True,
            },
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        for position, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                raise MisuseError(
                    f"{self.name}: input {position} is a {type(value).__name__}, expected a tensor."
                    " Close over constants, or pass torch.tensor(value)."
                )
        result: Tensor = self._function.apply(*inputs)
        return result

    def forward(self, *inputs: Tensor) -> Tensor:
        """The result alone, outside of any graph."""
        output = self._forward((), inputs)
        if not isinstance(output, Tensor):
            raise MisuseError(
                f"{self.name}: forward returned a {type(output).__name__}, expected one tensor."
            )
        return output

    def backward(
        self, grad_output: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each input, once there is one for each and it has the input's shape."""
        returned = self._backward((grad_output,), inputs)
        gradients = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
        if len(gradients) != len(inputs):
            raise MisuseError(
                f"{self.name}: backward returned {len(gradients)} gradients, expected"
                f" {len(inputs)}, one for each input (None for one that has no gradient)."
            )
        for position, (gradient, value) in enumerate(zip(gradients, inputs, strict=True)):
            if gradient is not None:
                self._check_gradient(gradient, value, position)
        return gradients

    def _check_gradient(self, gradient: Any, value: Tensor, position: int) -> None:
        if not isinstance(gradient, Tensor):
            raise MisuseError(
                f"{self.name}: backward returned a {type(gradient).__name__} for input"
                f" {position}, expected a tensor of shape {tuple(value.shape)} or None."
            )
        if gradient.shape != value.shape:
            raise MisuseError(
                f"{self.name}: backward returned shape {tuple(gradient.shape)} for input"
                f" {position}, expected {tuple(value.shape)}, the shape of that input."
            )

    def __repr__(self) -> str:
        return f"CustomOp({self.name})"


def custom_op(
    forward: Callable[..., Tensor], backward: Callable[..., Gradients], *, name: str | None = None
) -> CustomOp:
    """Join a forward and its gradient into one operation.

    `forward(x, …)` returns a tensor; `backward(grad_output, x, …)` returns the gradient of each
    input, a tensor alone if there is only one. A parameter called `inputs` receives all of them as
    one list instead: `forward(inputs)`, `backward(grad_output, inputs)`. If `backward` is itself
    made of differentiable operations, the result can be differentiated again. `check_gradients`
    tells whether the two belong together.

    Args:
        forward: computes the result.
        backward: computes the gradients.
        name: for messages; None: the forward's.

    >>> double = custom_op(lambda x: x * 2, lambda grad_output, x: grad_output * 2, name="double")
    >>> x = torch.ones(2, requires_grad=True)
    >>> double(x).sum().backward(); x.grad
    tensor([2., 2.])
    """
    read_callable(forward, "forward", "a function of the inputs")
    read_callable(backward, "backward", "a function of the gradient and the inputs")
    if name is not None:
        read_text(name, "name", "for example 'double'")
    given = name if name is not None else getattr(forward, "__name__", "custom_op")
    # It becomes the name of a class, which "<lambda>" cannot be.
    return CustomOp(forward, backward, given if given.isidentifier() else "custom_op")


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _with_inputs(
    function: Callable[..., Any], *, before: int
) -> Callable[[tuple[Any, ...], tuple[Tensor, ...]], Any]:
    """How to hand a function its inputs: one by one, or as a list if that is what it asks for by
    name.
    """
    if _asks_for_a_list(_parameters_of(function)[before:]):
        return lambda first, inputs: function(*first, list(inputs))
    return lambda first, inputs: function(*first, *inputs)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # built-in functions may have no signature
        return []


def _asks_for_a_list(parameters: list[inspect.Parameter]) -> bool:
    """Whether there is one parameter for all inputs, called `inputs`."""
    if [parameter.name for parameter in parameters] != ["inputs"]:
        return False
    return parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
