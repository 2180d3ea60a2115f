"""Accumulation in three forms: weighed, as the plain loop of old, and in a window of your own.

python examples/accumulate_basics.py
"""

from __future__ import annotations

import torch
from torch import nn

import gradfit as gf


def weighed(model: nn.Module, data: torch.Tensor) -> None:
    """Unequal micro-batches: each says how many items its mean loss is about; the tail is
    flushed.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    acc = gf.GradientAccumulator(optimizer, steps=4, clip=1.0)
    for micro in data.split([5, 1, 7, 3, 6, 2]):
        acc.backward(model(micro).square().mean(), weight=len(micro))
        if result := acc.step():
            scheduler.step()
            print(f"updated with {result.weight} items, gradient norm {result.grad_norm:.3f}")
    result = acc.flush()
    print(f"the tail: {result.micro_batches} micro-batches, {result.weight} items")


def by_themselves(model: nn.Module, data: torch.Tensor) -> None:
    """The loop everybody has: backward passes are counted, and the optimizer sees scaled
    gradients.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    accumulator = gf.GradientAccumulator(steps=4)
    accumulator.enable_accumulation(model.parameters())
    for micro in data.split(2):
        model(micro).square().mean().backward()
        if accumulator.is_ready:
            optimizer.step()
            optimizer.zero_grad()
    print(f"{accumulator.windows} updates from {len(data) // 2} backward passes")


def own_update(model: nn.Module, data: torch.Tensor) -> None:
    """No optimizer at all: the update is yours."""
    acc = gf.GradientAccumulator(steps=2, parameters=model.parameters())
    for micro in data[:6].split([4, 2]):
        acc.backward(model(micro).square().mean(), weight=len(micro))

    def descend(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.01)

    acc.apply_gradients(descend)
    acc.reset_gradients()
    print("updated by hand")


def main() -> None:
    torch.manual_seed(0)
    data = torch.randn(24, 8)
    for form in (weighed, by_themselves, own_update):
        form(nn.Linear(8, 4), data)


if __name__ == "__main__":
    main()
