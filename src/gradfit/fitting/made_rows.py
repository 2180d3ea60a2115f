"""Rows that a trial makes of a batch, fewer or more than it has, and a loss that cannot be computed
of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradfit._torch import is_out_of_memory
from gradfit.batches.runner import MicroBatchRunner
from gradfit.errors import GradfitError, MisuseError
from gradfit.recompute.follow_plan import Diverged
from gradfit.tree import SPLIT_LISTS, rows_in_lists


def runner_of_rows(runner: MicroBatchRunner, batch: Any, rows: int) -> MicroBatchRunner:
    """A runner for so many rows that are made of this batch: what its loss function cannot do with
    them is a `MisuseError` that says what they are made of. The same runner where these are the
    batch's own rows, or the user's own `split` makes them.
    """
    if runner.split is not None or runner.rows(batch) == rows:
        return runner
    given = runner.loss_fn

    @functools.wraps(given)
    def loss_fn(model: torch.nn.Module, content: Any) -> Any:
        try:
            return given(model, content)
        except Exception as error:
            if isinstance(error, GradfitError | Diverged) or is_out_of_memory(error):
                raise
            raise _cannot_be_made(error, batch, runner.rows(batch), rows) from error

    return MicroBatchRunner(runner.model, loss_fn)


def _cannot_be_made(error: Exception, batch: Any, have: int, rows: int) -> MisuseError:
    lists = rows_in_lists(batch)
    if lists is not None:
        call = f"Of this batch {lists.text}. {SPLIT_LISTS}."
    elif rows > have:
        call = (
            f"Pass a batch of {rows} rows as sample_batch, or split=, a function (batch, size) ->"
            " parts."
        )
    else:
        call = "Pass split=, a function (batch, size) -> parts, or micro_batch='whole'."
    return MisuseError(
        f"Along dim 0, {rows} rows were made of a batch of {have}, and of these loss_fn raises"
        f" {type(error).__name__}: {str(error).removesuffix('.')}. {call}"
    )
