"""Projections to a vocabulary: which modules are, and the forward that makes their logits lazy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gradfit._torch import FakeTensor
from gradfit._torch_fsdp import is_unit
from gradfit._torch_listen import untraced
from gradfit.not_copied import NotCopied
from gradfit.tiling import lazy_functions  # noqa: F401  (what torch's functions do to lazy logits)
from gradfit.tiling.cut import Cut
from gradfit.tiling.lazy import Head, LazyLogits
from gradfit.tiling.whole_here import runs_whole

_PLAIN = (Tensor, nn.Parameter, FakeTensor, type(None))
_WIDENING = 8  # a layer this much wider than its input makes numbers that are worth not having


def find_heads(model: nn.Module) -> dict[str, bool]:
    """Names of the linear layers that may be projections to a vocabulary; whether they surely are.

    Surely: the model says so (`get_output_embeddings`), the layer is one of the widest inside of
    what the model says (a projection with an adapter), or the weights are an embedding's, too.
    Others are much wider than their input; what becomes of their results will show.
    """
    says = _output_embeddings(model)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads: dict[str, bool] = {}
    for name, module in _linear_layers(model):
        # Not `module.weight`, which a parametrization would compute.
        is_sure = id(module) in says or id(module._parameters.get("weight")) in embedded
        if is_sure or module.out_features >= _WIDENING * module.in_features:
            heads[name] = is_sure
    return heads


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if is_linear(module))


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer and nothing else."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _output_embeddings(model: nn.Module) -> set[int]:
    heads: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            # transformers' base class raises where there is none
            with contextlib.suppress(NotImplementedError, AttributeError):
                heads.update(map(id, _widest_in(getter())))
    return heads


def _widest_in(head: Any) -> list[nn.Module]:
    layers = [layer for _, layer in _linear_layers(head)] if isinstance(head, nn.Module) else []
    widest = max((layer.out_features for layer in layers), default=0)
    return [layer for layer in layers if layer.out_features == widest]


class LazyForward(NotCopied):
    """Stands in for the forward of a linear layer.

    Args:
        module: the layer.
        head: how its logits are cut, and what became of them.
    """

    _instead_of_copy = "Call remove() on what gf.tile returned, copy the model, and tile both."

    def __init__(self, module: nn.Linear, head: Head) -> None:
        self._module, self.head = module, head

    @untraced
    def __call__(self, input: Tensor) -> Tensor:
        module = self._module
        # Where somebody asks for the numbers anyway, the layer makes them in fewer steps.
        if runs_whole() or self.head.is_of_no_use or not _may_be_lazy(module, input):
            return nn.Linear.forward(module, input)
        self.head.is_trained = module.training
        return LazyLogits.project(input, module.weight, module.bias, self.head)


def _may_be_lazy(module: Any, input: Tensor) -> bool:
    """Not where somebody else decides what a product is (sharded or quantised weights), or waits
    for a gradient.
    """
    # FSDP2 frees a unit's weights right after its forward.
    is_watched = module._backward_hooks or module._backward_pre_hooks or is_unit(module)
    if is_watched:
        return False
    are_plain = all(type(each) in _PLAIN for each in (input, module.weight, module.bias))
    return are_plain and _may_be_multiplied(input, module.weight)


def _may_be_multiplied(input: Tensor, weight: Tensor) -> bool:
    return (
        input.dim() >= 1
        and input.shape[-1] == weight.shape[1]
        and input.dtype.is_floating_point
        and input.device == weight.device
    )


def make_lazy(
    model: nn.Module, names: dict[str, bool], cut: Cut, *, gradients_early: bool
) -> dict[str, Head]:
    """Give these layers their lazy forward."""
    heads = {}
    for name, is_sure in names.items():
        module: Any = model.get_submodule(name)
        heads[name] = Head(name, cut, says_so=is_sure, gradients_early=gradients_early)
        module.forward = LazyForward(module, heads[name])
    return heads
