"""What torch's functions do to lazy logits: stay lazy, reduce in tiles, or (what is not here) ask
for the numbers.

The rooms: rows in another arrangement, functions of single words and of softmax, what makes a few
numbers of each row, losses. Importing this file registers them all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfit.tiling import (  # noqa: F401
    lazy_arrangement,
    lazy_losses,
    lazy_reductions,
    lazy_word_by_word,
)
from gradfit.tiling.lazy import LazyLogits, described, gradient_askers
from gradfit.tiling.lazy_handlers import functions_named, handles

_DESCRIBING_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_cuda",
    "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn",
    "names", "_version", "_base", "is_sparse_csr", "output_nr", "itemsize",
)  # fmt: skip
_DESCRIBING_FUNCTIONS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "get_device", "__len__", "is_inference", "is_same_size", "has_names",
)  # fmt: skip

for _name in _DESCRIBING_PROPERTIES:
    if hasattr(getattr(Tensor, _name, None), "__get__"):
        described.add(getattr(Tensor, _name).__get__)
described.update(functions_named(*_DESCRIBING_FUNCTIONS))


# -------------------------------------------------------------------------------------- the graph's


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


@handles("register_hook")
def _register_hook(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """Of FSDP2, which gathers parameters when a gradient comes; anybody else's gets a gradient of
    all numbers.
    """
    return lazy.take_fsdp_hook(args[1]) if _is_of_fsdp(args[1]) else NotImplemented


for _function in functions_named("register_hook"):
    gradient_askers[_function] = lambda args, _: () if _is_of_fsdp(args[-1]) else args[0]
for _function in functions_named("retain_grad"):
    gradient_askers[_function] = lambda args, _: args
gradient_askers[torch.autograd.grad] = lambda args, kwargs: kwargs.get("inputs", args[1:2])


@handles("requires_grad_")
def _requires_grad(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    """What they do already; a leaf of its own has numbers of its own."""
    wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
    return lazy if lazy.requires_grad == wanted else NotImplemented


@handles("__format__")
def _format(lazy: LazyLogits, args: Any, kwargs: Any) -> Any:
    return object.__format__(lazy, *args[1:])
