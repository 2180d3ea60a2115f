"""Which of a loss's logs are counts, to be added up over the parts of a batch, and no means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfit.batches.additivity_record import Additivity, is_close
from gradfit.batches.compared_runs import Comparison, Run


def summed_logs(comparisons: Sequence[Comparison], verdict: Additivity) -> tuple[str, ...]:
    """The logs that add up over parts, and are not their mean over the items; where the rows do not
    tell, those that are whole numbers.
    """
    weight = _weight_by(verdict)
    whole = comparisons[0].whole.whole_logs
    return tuple(
        name
        for name in _logs_of_all(comparisons)
        if _is_sum(comparisons, name) and (name in whole or not _is_mean(comparisons, name, weight))
    )


def _logs_of_all(comparisons: Sequence[Comparison]) -> list[str]:
    """The logs that each whole has."""
    first, *others = (one.whole.logs for one in comparisons)
    return [name for name in first if all(name in logs for logs in others)]


def _weight_by(verdict: Additivity) -> Callable[[Run], float]:
    """What a part weighs, by what was judged of the loss."""
    if verdict.over == "items":
        return Run.items
    return partial(_divisor_or_rows, verdict.roles)


def _divisor_or_rows(roles: Sequence[str], run: Run) -> float:
    divisors = run.divisors or ()
    place = roles.index("adds") if "adds" in roles else len(divisors)
    return divisors[place] if place < len(divisors) else float(run.rows)


def _is_sum(comparisons: Sequence[Comparison], name: str) -> bool:
    return all(
        is_close(math.fsum(_logged(run, name) for run in one.parts), one.whole.logs[name])
        for one in comparisons
    )


def _is_mean(comparisons: Sequence[Comparison], name: str, weight: Callable[[Run], float]) -> bool:
    return all(
        is_close(
            math.fsum(weight(run) * _logged(run, name) for run in one.parts),
            weight(one.whole) * one.whole.logs[name],
        )
        for one in comparisons
    )


def _logged(run: Run, name: str) -> float:
    return run.logs.get(name, math.nan)


def whole_logs(logs: Mapping[str, Any]) -> frozenset[str]:
    """The names of those that are of a type for whole numbers."""
    return frozenset(name for name, value in logs.items() if _is_whole_number(value))


def _is_whole_number(value: Any) -> bool:
    """Whether a number is of a type for whole ones, and no truth value."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and value.dtype is not torch.bool
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
