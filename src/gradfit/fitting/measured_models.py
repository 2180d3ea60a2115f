"""What was measured of a model holds for that model: one that is changed between two steps is
measured again.

Whether the losses of parts make that of the batch is measured by `fit`. A BatchNorm that is put in
later, a hook that clamps gradients, or a forward that was replaced can change the answer, and with
it whether a batch may be cut. So the plans of a step belong to the modules and hooks that they were
made with. Plans of hooks that come back, as those that are there in every other step, are
remembered.
"""

from __future__ import annotations

from typing import Any

from gradfit.batches.model_tree import ModelTree
from gradfit.fitting.planner import Planner
from gradfit.fitting.tested_plan import TestedPlan

_MOST = 4  # sets of hooks whose plans are remembered


class MeasuredModels:
    """Sees to it that a planner has the plans of the model as it is now."""

    def __init__(self, tree: ModelTree, planner: Planner) -> None:
        self._tree, self._planner = tree, planner
        self._plans: dict[tuple[Any, ...], tuple[TestedPlan, ...]] = {}  # by hooks
        self.are_measured()

    def are_measured(self) -> None:
        """The planner's plans are of the model as it is now."""
        self._walks, self._hooks = self._tree.walks, self._tree.hooks()

    def has_plans_of_this(self) -> bool:
        """Whether the planner's plans are of the model as it is now; if not, it goes by plans that
        are, or by none.
        """
        hooks = self._tree.hooks()
        if self._walks == self._tree.walks and self._hooks == hooks:
            return True
        if self._walks != self._tree.walks:
            self._plans.clear()
        else:
            if len(self._plans) >= _MOST:
                del self._plans[next(iter(self._plans))]
            self._plans[self._hooks] = self._planner.known
        self._planner.take_up(self._plans.pop(hooks, ()))
        self.are_measured()
        return False
