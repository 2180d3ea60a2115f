"""What of a user's may change gradients on their way: hooks and functions with a backward of their
own.

Asked only where gradients cannot be compared for want of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.autograd.function import BackwardCFunction

# whose functions have the gradients of what they compute
_WITH_TRUE_GRADIENTS = ("torch.", "gradfit.")


def gradient_changers(model: nn.Module, nodes: Iterable[Any]) -> list[str]:
    """Names of what may change gradients.

    Args:
        model: its hooks are looked at.
        nodes: of the loss's graph.
    """
    own = [node.name() for node in nodes if _is_own(node)]
    return [*_hooks_of_parameters(model), *_hooks_of_modules(model), *own]


def _hooks_of_parameters(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            yield f"a hook of {name!r}"


def _hooks_of_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"a backward hook of {name or type(module).__name__!r}"


def _is_own(node: Any) -> bool:
    if getattr(node, "_saved_scale_grad_by_freq", False):
        return True
    if not isinstance(node, BackwardCFunction):
        return False
    return not str(type(node)._forward_cls.__module__).startswith(_WITH_TRUE_GRADIENTS)  # type: ignore[attr-defined]
