"""Whether there is as much memory as a budget says: what is run before the first step may run out
of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from gradfit._torch import is_out_of_memory
from gradfit._torch_fsdp import drop_gradients
from gradfit.devices import free_cached_memory
from gradfit.errors import BudgetInfeasible
from gradfit.fitting.step_to_plan import StepToPlan
from gradfit.units import format_bytes

_Way = TypeVar("_Way")
_Found = TypeVar("_Found")


def where_memory_lasts(
    step: StepToPlan,
    run: Callable[[_Way], _Found],
    ways: Sequence[_Way],
    *,
    doing: str = "was measured",
) -> _Found:
    """What `run` gives for the first of these ways for which memory does not run out.

    Raises:
        BudgetInfeasible: it does for all of them.
    """
    for way in ways:
        try:
            return run(way)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        drop_gradients(step.model)
        free_cached_memory()
    least = (step.limit_bytes * 11 // 10) + step.beside_bytes
    raise BudgetInfeasible(
        f"Memory ran out while a step {doing}, below the budget of"
        f" {format_bytes(step.budget_bytes)}: there is less of it than that, or a cap on it."
        " Nothing was changed. Free some, or lower the batch size and `memory`.",
        min_bytes=least,
    )
