"""Loops over two parameters, and what somebody may do to their gradients in the middle of a window:
for the tests of the short ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class TwoParameters:
    """A model whose gradients are easy to say: `loss(x)` adds x to a's, and twice that to b's."""

    def __init__(self) -> None:
        self.a, self.b = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
        self.optimizer = torch.optim.SGD([self.a, self.b], lr=1.0)

    def loss(self, x: float) -> torch.Tensor:
        return ((self.a + 2 * self.b) * x).sum()

    @contextmanager
    def same_gradients(self) -> Iterator[None]:
        """What is inside adds nothing."""
        before = [None if one.grad is None else one.grad.clone() for one in (self.a, self.b)]
        yield
        for one, gradient in zip((self.a, self.b), before, strict=True):
            assert (one.grad is None) is (gradient is None)
            assert gradient is None or torch.equal(one.grad, gradient)  # type: ignore[arg-type]


def clear(loop: TwoParameters) -> None:
    loop.optimizer.zero_grad()


def fill_with_zeros(loop: TwoParameters) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def clear_one(loop: TwoParameters) -> None:
    loop.b.grad = None


def replace_one(loop: TwoParameters) -> None:
    assert loop.b.grad is not None
    loop.b.grad = loop.b.grad.clone()


def clip(loop: TwoParameters) -> None:
    nn.utils.clip_grad_norm_([loop.a, loop.b], 0.1)


TOUCHES = [clear, fill_with_zeros, clear_one, replace_one, clip]


class Dies(torch.autograd.Function):
    """Its backward is interrupted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt
