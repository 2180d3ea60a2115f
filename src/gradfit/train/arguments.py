"""What `fit`, `profile` and `audit` are given: checked before a model is touched."""

from __future__ import annotations

from typing import Any

import torch

from gradfit.arguments import invalid, read_callable, read_flag, read_instance


def check_arguments(model: Any, loss_fn: Any, *, split: Any = None, **flags: Any) -> None:
    """A model, a loss function, how to split a batch, and switches that are True or False."""
    read_instance(model, "model", torch.nn.Module, "the torch.nn.Module to train")
    read_callable(loss_fn, "loss_fn", "a function loss_fn(model, batch) that returns the loss")
    if split is not None:
        read_callable(split, "split", "a function split(batch, size) that gives the parts, or None")
    for name, value in flags.items():
        read_flag(value, name)


def check_optimizer_given(optimizer: Any) -> None:
    """An optimizer, where one is needed."""
    if optimizer is None or isinstance(optimizer, int):
        raise invalid("optimizer", optimizer, "is no optimizer", "torch.optim.AdamW(model.parameters())")
