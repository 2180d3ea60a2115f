"""Compares a run with plain PyTorch's, bit by bit, once both are shown to be in one configuration.

Bits are equal only where the same kernels get the same numbers in the same layout: a key-value
cache that one of two models fills, another number of threads, or an evaluation mode rounds
differently, on some CPUs and not on others. So the operators that the two forward passes call are
compared first, with the shapes, strides and dtypes of what they are given; that fails on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# a whole step: makes its model anew, gives what it computed by name
Run = Callable[[], Mapping[str, torch.Tensor]]


def assert_same_bits(plain: Run, ours: Run) -> None:
    """Fail unless both are in one configuration and compute the same."""
    assert_one_configuration(plain, ours)
    settings = _settings()
    expected, actual = plain(), ours()
    assert _settings() == settings, "a run left torch's settings changed"
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])]
    assert not different, different


def assert_one_configuration(plain: Run, ours: Run) -> None:
    """Fail unless the two forward passes call the same operators with the same layouts."""
    expected, actual = forward_operators(plain), forward_operators(ours)
    for number, (a, b) in enumerate(zip(expected, actual, strict=False)):
        assert a == b, f"two configurations: operation {number} is {a} plainly and {b} otherwise"
    assert len(expected) == len(actual), (
        f"two configurations: {len(expected)} and {len(actual)} operations"
    )


def forward_operators(run: Run) -> list[str]:
    """The operators that a run calls outside of backward, with the layouts of their arguments."""
    with _Listing() as listing:
        run()
    return listing.calls


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in its storage as the tensor does: for a hook that keeps what autograd
    saves.

    `tensor.clone()` of a slice would be contiguous, and some kernels round differently there.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or type(tensor) is not torch.Tensor
    ):
        return tensor.clone()
    with torch.no_grad():
        storage = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class _Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1  # where one of the two replays
        # which autograd calls to save a result
        if not in_backward and func is not torch.ops.aten.detach.default:
            self.calls.append(f"{func}({', '.join(map(_layout, tree_leaves(args)))})")
        return func(*args, **(kwargs or {}))


def _layout(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    strides = tuple(leaf.stride()) if leaf.layout is torch.strided else leaf.layout
    return f"{leaf.dtype}{tuple(leaf.shape)}{strides}"


def _settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
