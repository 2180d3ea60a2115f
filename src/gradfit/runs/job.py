"""A job: a model, its loss, its data and its optimizer, as the command line takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradfit.accumulate.accumulator_options import check as check_options
from gradfit.arguments import (
    check_arguments,
    check_model,
    invalid,
    read_count,
    read_flag,
    read_instance,
    read_mapping,
)
from gradfit.errors import MisuseError


@dataclass
class Job:
    """Everything `gradfit train` needs: what to train, on what, how, and in batches of which size.

    Args:
        model: The model, in training mode.
        loss_fn: `loss_fn(model, batch)` returns a mean loss, `(loss_sum, count)`, `(loss, logs)`
            or a `Loss`, as for `fit`.
        data: A tensor or a tuple or dict of tensors (rows along dim 0), a map-style
            `torch.utils.data.Dataset` of rows, or anything that can be iterated again and again
            and gives batches, such as a `DataLoader`. Rows are shuffled anew each epoch; batches
            come in their own order and are regrouped into `batch_size` rows.
        optimizer: A `torch.optim.Optimizer` of the model's parameters.
        batch_size: Rows that make one update.
        scheduler: A scheduler of `torch.optim.lr_scheduler`, stepped after each update.
        split: `split(batch, size)` gives the parts of a batch that is not cut along dim 0.
        fit_options: How each update is made, as `fit` takes it: any of `clip`, `scaler`, `dtype`,
            `on_nonfinite`, `offload` and `exact`.

    Raises:
        MisuseError: An argument cannot be right.

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
    fit_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self.model, self.loss_fn, split=self.split)
        read_instance(self.optimizer, "optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer")
        read_count(self.batch_size, "batch_size")
        if self.scheduler is not None and not _is_scheduler(self.scheduler):
            raise invalid(
                "scheduler",
                self.scheduler,
                "is no scheduler",
                "one of torch.optim.lr_scheduler, or None",
            )
        self._check_fit_options()
        check_model(self.model)
        self._check_parameters()

    def _check_parameters(self) -> None:
        mine = {id(parameter) for parameter in self.model.parameters()}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        strangers = [parameter for parameter in stepped if id(parameter) not in mine]
        if strangers:
            raise MisuseError(
                f"The optimizer holds {len(strangers)} parameters that are not the model's, the"
                f" first of shape {tuple(strangers[0].shape)}. Make the optimizer from"
                " model.parameters()."
            )

    @property
    def scaler(self) -> Any:
        """The loss scaler of `fit_options`, whose state is saved with the run's; None without
        one.
        """
        return self.fit_options.get("scaler")

    def _check_fit_options(self) -> None:
        instead = 'fit_options={"clip": 1.0}'
        options = read_mapping(self.fit_options, "fit_options", instead)
        for name in options:
            if name not in _FIT_OPTIONS:
                raise MisuseError(
                    f"fit_options has {name!r}, which is none of {', '.join(_FIT_OPTIONS)}. The "
                    "budget and the micro-batch are options of the command; batch_size, split and "
                    "the others are arguments of Job."
                )
        chosen = {**_FIT_OPTIONS, **options}
        for name in ("offload", "exact"):
            read_flag(chosen.pop(name), name)
        check_options(self.optimizer, steps=1, strategy=None, isolate=False, **chosen)


# What `fit` takes of them if they are left out.
_FIT_OPTIONS: dict[str, Any] = {
    "clip": None,
    "scaler": None,
    "dtype": None,
    "on_nonfinite": "raise",
    "offload": False,
    "exact": True,
}


def _is_scheduler(item: Any) -> bool:
    """Whether it steps, and is no optimizer, which steps too."""
    return callable(getattr(item, "step", None)) and not hasattr(item, "param_groups")
