"""A job: a model, its loss, its data and its optimizer, as the command line takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradfit.arguments import check_arguments, invalid, read_count, read_instance
from gradfit.errors import MisuseError
from gradfit.profiling.measure import check_model


@dataclass
class Job:
    """Everything `gradfit train` needs: what to train, on what, how, and how many rows make one update.

    `data` is a tensor or a tuple or dict of tensors (rows along dim 0), a map-style `torch.utils.data.Dataset` of
    rows, or anything that can be iterated again and again and gives batches, such as a `DataLoader`. Rows are shuffled
    anew each epoch; batches come in their own order and are regrouped into `batch_size` rows. `scheduler` steps after
    each update.

    Args:
        model: in training mode.
        loss_fn: `loss_fn(model, batch)`, as `fit` takes it.
        data: rows, or batches of rows.
        optimizer: of the model's parameters.
        batch_size: rows of one update.
        scheduler: with `step()`; None: the learning rate stays.
        split: `split(batch, size)` gives the parts; without it lists and tensors are cut along dim
            0.

    >>> model = torch.nn.Linear(3, 1)
    >>> job = Job(
    ...     model,
    ...     lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
    ...     {"x": torch.ones(64, 3), "y": torch.zeros(64, 1)},
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     batch_size=16,
    ... )
    >>> job.batch_size
    16
    """

    model: torch.nn.Module
    loss_fn: Callable[[torch.nn.Module, Any], Any]
    data: Any
    optimizer: torch.optim.Optimizer
    batch_size: int
    scheduler: Any = None
    split: Callable[[Any, int], Iterable[Any]] | None = None

    def __post_init__(self) -> None:
        check_arguments(self.model, self.loss_fn, split=self.split)
        read_instance(self.optimizer, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer")
        read_count(self.batch_size, "batch_size")
        steps = callable(getattr(self.scheduler, "step", None)) and not hasattr(self.scheduler, "param_groups")
        if self.scheduler is not None and not steps:
            raise invalid("scheduler", self.scheduler, "is no scheduler", "one of torch.optim.lr_scheduler, or None")
        check_model(self.model)
        mine = {id(parameter) for parameter in self.model.parameters()}
        strangers = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in mine]
        if strangers:
            raise MisuseError(
                f"The optimizer holds {len(strangers)} parameters that are not the model's, the first of shape "
                f"{tuple(strangers[0].shape)}. Make the optimizer from model.parameters()."
            )
