"""Operations that look at shapes only: what they make is rebuilt without what they looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import gradfit as gf


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def noise(kind: str, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        makers: dict[str, Any] = {
            "empty_like": lambda: torch.empty_like(h).bernoulli_(0.5).div_(0.5),
            "new_empty": lambda: h.new_empty(h.shape).uniform_(),
            "new_empty_strided": lambda: h.new_empty_strided((4, 3), (1, 4)).normal_(),
            "zeros_like": lambda: torch.zeros_like(h).add_(2),
            "ones_like": lambda: torch.ones_like(h),
            "new_full": lambda: h.new_full((4, 3), 5.0),
            "full_like": lambda: torch.full_like(h, fill_value=3.0, dtype=torch.float64),
            "rand_like": lambda: torch.rand_like(h),
            "randn_like": lambda: torch.randn_like(h),
        }
        result: torch.Tensor = makers[kind]()
        return result


def run(kind: str, transposed: bool, scope: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(3)
    x, w, v = (torch.randn(shape, requires_grad=True) for shape in ((4, 5), (5, 3), (4, 3)))
    with gf.CheckpointScope("a", enabled=scope):
        h = x @ w
        h = h.t().contiguous().t() if transposed else h
        # exp: what is saved has to be rebuilt, not only filled
        y = (noise(kind, h).exp() * v).sum()
    with Products() as products:
        y.backward()
    assert v.grad is not None
    return v.grad, products.found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "zeros_like",
        "ones_like",
        "new_full",
        "full_like",
        "rand_like",
        "randn_like",
    ],
)
def test_bit_identical(kind: str, transposed: bool) -> None:
    expected, _ = run(kind, transposed, scope=False)
    found, _ = run(kind, transposed, scope=True)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    "kind", ["empty_like", "new_empty", "zeros_like", "new_full", "full_like", "rand_like"]
)
def test_the_product_is_not_replayed(kind: str) -> None:
    assert run(kind, False, scope=True)[1] == 0


def test_a_mask_of_dropout_costs_no_product() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6)
    x = torch.randn(3, 6, requires_grad=True)

    class Replays(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with gf.CheckpointScope("a"):
        y = F.dropout(layer(x), 0.5).sum()
    with Replays() as replays:
        y.backward()
    assert "aten.bernoulli_.float" in replays.names
    assert "aten.addmm.default" not in replays.names


@pytest.mark.parametrize(
    "make", [torch.zeros_like, torch.ones_like, torch.rand_like, torch.empty_like]
)
def test_odd_strides_where_a_size_is_one(make: Any) -> None:
    """A batch of one row, and one of its steps: contiguous, and yet with another stride than a new
    tensor's.
    """
    gradients = []
    for scope in (False, True):
        torch.manual_seed(3)
        w = torch.randn(5, 3, requires_grad=True)
        with gf.CheckpointScope("a", enabled=scope):
            steps = (torch.randn(1, 4, 5) @ w).tanh()
            state = make(steps[:, 0])
            if make is torch.empty_like:
                state.fill_(0.5)
            for number in range(4):
                state = torch.sigmoid(state + steps[:, number] * state.exp())
            loss = state.square().sum()
        loss.backward()
        gradients.append(w.grad)
    assert torch.equal(*gradients)
