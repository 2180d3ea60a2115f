"""A step of the optimizer over groups of its parameters, one after the other: the same bits, with
the temporaries of one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from gradfit._torch import add_innermost_hooks
from gradfit.errors import MisuseError
from gradfit.interrupts import uninterrupted
from gradfit.profiling.update_groups import may_be_cut


class GroupedStep:
    """A context in which `optimizer.step()` finds its `param_groups` cut into smaller ones.

    It is one call, so counters, schedulers and scalers see one step. Only the optimizer's own
    computation sees the smaller groups, which share their parameters and so all state with the real
    ones: hooks, whoever has added them, see the optimizer as it is.

    Args:
        optimizer: one that treats each parameter alone (`steps_each_parameter_alone`).
        groups: how many parameters each group has, in the optimizer's order; those that come after
            these, which were added since, are updated one by one.
    """

    def __init__(self, optimizer: Any, groups: Sequence[int]) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._own: Any = None  # the optimizer's own groups, while the smaller ones stand there
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        with uninterrupted():
            self._hooks = add_innermost_hooks(self._optimizer, self._begin, self._end)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the optimizer as it was, wherever its step was left; may be called again."""
        with uninterrupted():
            self._end()
            while self._hooks:
                self._hooks.pop().remove()

    def _begin(self, *_: Any) -> None:
        groups = self._optimizer.param_groups
        if not may_be_cut(self._optimizer, self._groups):
            raise MisuseError(
                f"The update is planned in {len(self._groups)} groups of parameters, and the"
                f" optimizer ({type(self._optimizer).__name__}) was changed so that it cannot be"
                " run so: its step was replaced, or parameters of another kind were added. Nothing"
                " was updated. Call gf.fit again."
            )
        for parameter in chain.from_iterable(group["params"] for group in groups):
            if parameter.grad is not None and parameter.grad.is_sparse:
                # torch then updates all parameters of its group in another way
                raise MisuseError(
                    "The update is planned in groups of parameters, and a gradient is sparse, so"
                    " nothing was updated. Make the embedding's gradient dense (sparse=False), or"
                    " pass fit a larger `memory`."
                )
        self._own = groups
        self._optimizer.param_groups = list(cut(groups, self._groups))

    def _end(self, *_: Any) -> None:
        if self._own is not None:
            self._optimizer.param_groups, self._own = self._own, None


def cut(param_groups: Sequence[dict[str, Any]], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """An optimizer's groups in smaller ones of so many parameters.

    >>> [group["params"] for group in cut([{"params": "abc"}, {"params": "de"}], [2, 1])]
    ['ab', 'c', 'd', 'e']
    """
    sizes = chain(counts, repeat(1))
    for group in param_groups:
        parameters, begin = group["params"], 0
        while begin < len(parameters):
            end = begin + next(sizes)
            yield {**group, "params": parameters[begin:end]}
            begin = end
