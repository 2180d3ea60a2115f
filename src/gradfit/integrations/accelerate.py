"""Hugging Face `accelerate`: an accumulator for what `accelerator.prepare` returned."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from gradfit.accumulate.accumulator import GradientAccumulator
from gradfit.errors import MisuseError


def accumulator(accelerator: Accelerator, optimizer: Any, **options: Any) -> GradientAccumulator:
    """A `GradientAccumulator` for a prepared optimizer, with the accelerator's loss scaler.

    Call its `backward` and `step` in the place of `accelerator.backward` and `optimizer.step`;
    `options` are `GradientAccumulator`'s. Autocast, devices and DDP stay accelerate's.

    Args:
        accelerator: made with `gradient_accumulation_steps=1`.
        optimizer: as `accelerator.prepare` returned it.
        options: of `GradientAccumulator`, `steps=` for one; not `scaler=`.

    >>> import torch
    >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> acc = accumulator(accelerator, optimizer, steps=2)
    >>> for rows in (torch.ones(4, 3), torch.ones(2, 3)):
    ...     acc.backward(model(rows).square().mean(), weight=len(rows))
    ...     _ = acc.step()
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise MisuseError(
            "This accelerator has"
            f" gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, by which it"
            " divides losses and skips steps itself. Make it with 1, and pass steps= here."
        )
    if "scaler" in options:
        raise MisuseError("scaler= is the accelerator's own. Leave it out.")
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return GradientAccumulator(inner, scaler=getattr(accelerator, "scaler", None), **options)
