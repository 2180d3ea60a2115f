"""Looking at gradients before they are added: what fits, what does not, and everything that is
wrong at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.loss_arguments import read_weight
from gradfit.arguments import read_list
from gradfit.errors import MisuseError


class GradientAccumulationValidator:
    """Checks that answer yes or no, and `explain()`, which says what was wrong with the last one.

    >>> validator = GradientAccumulationValidator()
    >>> losses = [torch.zeros(2), torch.tensor([1.0, float("nan")])]
    >>> validator.validate_accumulation(losses, [4, -1])
    False
    >>> for problem in validator.explain(): print(problem)
    batch_sizes[1]=-1 must be 0 or more, and finite. Pass how many items the loss is about.
    gradients[1] holds 1 NaN or infinite of 2 elements.
    """

    def __init__(self) -> None:
        self._problems: list[str] = []

    def validate_accumulation(
        self, gradients: Sequence[Tensor], batch_sizes: Sequence[int]
    ) -> bool:
        """Whether these gradients, each a mean over so many items, can be accumulated.

        Args:
            gradients: one of each batch.
            batch_sizes: items of each batch.
        """
        gradients = read_list(gradients, "gradients", "a list of gradients")
        batch_sizes = read_list(batch_sizes, "batch_sizes", "a list of numbers")
        problems = _problems_of_sizes(batch_sizes, len(gradients))
        first = next((one for one in gradients if isinstance(one, Tensor)), None)
        for position, gradient in enumerate(gradients):
            name = f"gradients[{position}]"
            problems += _problems_of(gradient, name)
            if isinstance(gradient, Tensor):
                problems += self._misfits(first, gradient, f"{name} does not fit the first")
        return self._remember(problems)

    def _misfits(self, one: Any, other: Any, what: str) -> list[str]:
        misfit = self.incompatibility(one, other)
        return [f"{what}: {misfit}."] if misfit else []

    def check_shape_compatibility(self, grad1: Tensor, grad2: Tensor) -> bool:
        """Whether two gradients can be added: the same shape, and on the same device.

        Args:
            grad1: a gradient.
            grad2: another one.
        """
        return self._remember(self._misfits(grad1, grad2, "grad2 does not fit grad1"))

    def validate_accumulated_shape(self, accumulated: Tensor, components: Sequence[Tensor]) -> bool:
        """Whether `accumulated` can be the sum or mean of these gradients.

        Args:
            accumulated: the result.
            components: what it was made from.
        """
        components = read_list(components, "components", "a list of gradients")
        problems = (
            [] if len(components) else ["components is empty: a sum of nothing has no shape."]
        )
        for position, component in enumerate(components):
            what = f"components[{position}] does not fit accumulated"
            problems += self._misfits(accumulated, component, what)
        return self._remember(problems)

    def explain(
        self, gradients: Sequence[Tensor] | None = None, batch_sizes: Sequence[int] | None = None
    ) -> list[str]:
        """Every problem of the last check, or of what is passed here; empty if there is none.

        Args:
            gradients: to check now; None: speak of the last check.
            batch_sizes: items of each of them.
        """
        if gradients is not None and batch_sizes is not None:
            self.validate_accumulation(gradients, batch_sizes)
        elif gradients is not None or batch_sizes is not None:
            raise MisuseError(
                "explain: gradients and batch_sizes go together. Pass both, or none for the last"
                " check."
            )
        return list(self._problems)

    @staticmethod
    def incompatibility(one: Any, other: Any) -> str | None:
        """Why two gradients cannot be added; None if they can.

        Args:
            one: a gradient.
            other: another one.
        """
        for value in (one, other):
            if not isinstance(value, Tensor):
                return f"a {type(value).__name__} is not a tensor"
        if one.shape != other.shape:
            return f"shape {tuple(other.shape)}, expected {tuple(one.shape)}"
        if one.device != other.device:
            return f"it is on {other.device}, expected {one.device}"
        if one.is_complex() != other.is_complex():
            return f"type {other.dtype}, expected {one.dtype}"
        return None

    def _remember(self, problems: list[str]) -> bool:
        self._problems = problems
        return not problems


def _problems_of_sizes(batch_sizes: Sequence[int], gradients: int) -> list[str]:
    """What is wrong with the sizes of so many gradients."""
    problems: list[str] = []
    if not gradients:
        problems.append("gradients is empty: there is nothing to accumulate.")
    if gradients != len(batch_sizes):
        problems.append(
            f"There are {gradients} gradients and {len(batch_sizes)} batch_sizes: one of each."
        )
    total: float = 0
    for position, size in enumerate(batch_sizes):
        try:
            total += read_weight(size, f"batch_sizes[{position}]")
        except MisuseError as error:
            problems.append(str(error))
    if not total and not problems:
        problems.append("batch_sizes are all 0: a mean over no items is not defined.")
    return problems


def _problems_of(gradient: Any, name: str) -> list[str]:
    if not isinstance(gradient, Tensor):
        return [f"{name} is a {type(gradient).__name__}, not a tensor."]
    if not (gradient.is_floating_point() or gradient.is_complex()):
        return [f"{name} is {gradient.dtype}, which no gradient is."]
    if gradient.is_meta:
        return [f"{name} is on {gradient.device}: it has no values."]
    return _problems_of_elements(gradient, name)


def _problems_of_elements(gradient: Tensor, name: str) -> list[str]:
    # Before, an element may be there several times: its value is their sum.
    values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
    bad = int((~values.isfinite()).sum().item())
    return [f"{name} holds {bad} NaN or infinite of {values.numel()} elements."] if bad else []
