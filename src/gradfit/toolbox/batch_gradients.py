"""Accumulating gradients that somebody else computed, from batches of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfit.accumulate.loss_arguments import read_weight
from gradfit.accumulate.scaling import gradient_norm
from gradfit.accumulate.strategy import FixedStepCount, FixedTargetBatch, Strategy
from gradfit.accumulate.window_state import Total, add_scaled
from gradfit.arguments import Number, read_count
from gradfit.errors import MisuseError
from gradfit.toolbox.gradient_map import GradientMap
from gradfit.toolbox.gradient_validator import GradientAccumulationValidator

Gradient = Tensor | GradientMap


class DynamicBatchAccumulator:
    """The mean gradient over all items of batches whose sizes differ: Σ size·gradient / Σ size.

    Full when `target_batch_size` items, `steps` batches, or what a `strategy` asks for have come
    in. float16 and bfloat16 are added up in float32.

    Args:
        target_batch_size: items that fill it.
        steps: batches that fill it.
        strategy: says when it is full. Give one of the three.

    >>> accumulator = DynamicBatchAccumulator(target_batch_size=6)
    >>> accumulator.accumulate(torch.tensor([1.0]), 4)
    >>> accumulator.accumulate(torch.tensor([4.0]), 2)
    >>> accumulator.is_complete(), accumulator.get_accumulated_gradient()
    (True, tensor([2.]))
    """

    def __init__(
        self,
        target_batch_size: int | None = None,
        steps: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        _require_one_of(target_batch_size=target_batch_size, steps=steps, strategy=strategy)
        self.strategy: Strategy = _read_strategy(target_batch_size, steps, strategy)
        self._begin()

    @property
    def accumulated_gradient(self) -> Gradient | None:
        """The mean over what has come in so far; None if nothing has."""
        return self._mean() if self._total.weight else None

    @property
    def accumulated_batch_size(self) -> Number:
        """How many items have come in."""
        return self._total.weight

    @property
    def current_step(self) -> int:
        """How many batches have come in."""
        return self._steps

    @property
    def target_batch_size(self) -> Number:
        """How many items fill the window: given, or expected from what has come in so far."""
        if isinstance(self.strategy, FixedTargetBatch):
            return self.strategy.batch_size
        average = self._total.weight / self._steps if self._steps else 0
        expected = self.strategy.expected_weight(average)
        return round(expected) if expected == round(expected) else expected

    @property
    def accumulation_count(self) -> int:
        """How many batches fill the window: given, or expected from what has come in so far."""
        if isinstance(self.strategy, FixedStepCount):
            return self.strategy.steps
        progress = self.get_progress()
        return self._steps if progress >= 1 or not progress else -int(-self._steps // progress)

    def accumulate(self, batch_gradient: Gradient, batch_size: int) -> None:
        """Add the mean gradient over `batch_size` items; a size of 0 adds nothing, whatever the
        gradient holds.

        Args:
            batch_gradient: a tensor or a `GradientMap`: the mean over the batch's items.
            batch_size: its number of items.
        """
        size = read_weight(batch_size, "batch_size")
        values = _values(batch_gradient)
        if self._sums is not None:
            self._check(batch_gradient, values)
        self._steps += 1
        # Left out, and not multiplied by zero, which leaves a NaN a NaN.
        if size:
            self._add(batch_gradient, values, size / self._divisor_for(size))
            self._total.weight += size
        is_measured = size and self.strategy.needs_norms
        self.strategy.observe(size, _squared_norm(values) if is_measured else None)

    def is_complete(self) -> bool:
        """Whether enough has come in."""
        return self._steps > 0 and self.strategy.is_complete(self._steps, self._total.weight)

    def get_accumulated_gradient(self) -> Gradient:
        """The mean over all items that have come in; what the window lacks does not matter."""
        if not self._total.weight:
            raise MisuseError(
                "Nothing was accumulated, so there is no mean. Call accumulate(gradient,"
                " batch_size) first."
            )
        return self._mean()

    def get_progress(self) -> float:
        """How full the window is, from 0 to 1."""
        return self.strategy.progress(self._steps, self._total.weight) if self._steps else 0.0

    def reset(self) -> None:
        """Begin the next window."""
        if self._steps:
            is_measured = self._total.weight and self.strategy.needs_norms
            squared = _squared_norm(_values(self._mean())) if is_measured else None
            self.strategy.end_window(self._total.weight, squared)
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._total = Total()
        self._sums: dict[Any, Tensor] | None = None
        self._like: Gradient | None = None

    def _check(self, gradient: Gradient, values: dict[Any, Tensor]) -> None:
        sums = self._sums or {}
        if isinstance(gradient, Tensor) != (None in sums):
            raise MisuseError(
                "batch_gradient: a tensor and a GradientMap cannot be added. Pass the same kind"
                " always."
            )
        for key in values.keys() & sums.keys():
            problem = GradientAccumulationValidator.incompatibility(sums[key], values[key])
            if problem:
                raise MisuseError(
                    f"{_place(key)} does not fit what was accumulated: {problem}. Call reset() for"
                    " a new shape."
                )

    def _divisor_for(self, size: Number) -> float:
        """What the sums are divided by until the window is full and its weight known.

        They could overflow otherwise: so it is about what will come in, and grows if more does.
        """
        if self._total.divisor is None:
            self._total.divisor = float(self.strategy.expected_weight(size)) or float(size)
        if self._total.lacks_room(size):
            self._total.make_room(size, (self._sums or {}).values())
        return self._total.divisor

    def _add(self, gradient: Gradient, values: dict[Any, Tensor], factor: float) -> None:
        if self._sums is None:
            self._sums, self._like = {}, gradient
        with torch.no_grad():
            for key, value in values.items():
                # Copied before it is scaled: a gradient that was passed in stays as it is.
                self._sums[key] = add_scaled(
                    self._sums.get(key), value.detach().to(_wide(value.dtype), copy=True), factor
                )

    def _mean(self) -> Gradient:
        dtypes = {key: value.dtype for key, value in _values(self._like).items()}
        means = {
            key: (total * self._total.factor).to(dtypes.get(key, total.dtype))
            for key, total in (self._sums or {}).items()
        }
        if None in means:
            return means[None]
        result = GradientMap()
        for key, mean in means.items():
            result.bind(key, self._tensor_of(key), mean)
        return result

    def _tensor_of(self, key: Any) -> Tensor | None:
        """The tensor that a gradient belongs to, if the first map that came in had it."""
        like = self._like
        return like.tensor(key) if isinstance(like, GradientMap) and key in like else None

    def __repr__(self) -> str:
        return (
            f"DynamicBatchAccumulator({self.strategy!r}, {self._steps} batches,"
            f" {self._total.weight} items)"
        )


def _require_one_of(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        passed = " and ".join(given) or "none of target_batch_size, steps and strategy"
        raise MisuseError(
            f"Got {passed}: one must say when the window is full. Pass target_batch_size=64."
        )


def _read_strategy(target_batch_size: int | None, steps: int | None, strategy: Any) -> Strategy:
    if target_batch_size is not None:
        return FixedTargetBatch(read_count(target_batch_size, "target_batch_size"))
    if steps is not None:
        return FixedStepCount(steps)
    if not isinstance(strategy, Strategy):
        raise MisuseError(
            f"strategy is a {type(strategy).__name__}. Pass FixedTargetBatch(n) or another"
            " strategy."
        )
    return strategy


def _squared_norm(values: dict[Any, Tensor]) -> float:
    return gradient_norm(list(values.values())) ** 2


def _place(key: Any) -> str:
    """How an error calls one of the gradients that were passed."""
    if key is None:
        return "batch_gradient"
    return f"batch_gradient[{key!r}]" if isinstance(key, str) else "one"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _values(gradient: Any) -> dict[Any, Tensor]:
    """Gradients by key; a tensor alone has the key None."""
    if isinstance(gradient, GradientMap):
        return dict(gradient.items())
    if not isinstance(gradient, Tensor):
        raise MisuseError(
            f"batch_gradient is a {type(gradient).__name__}. Pass a tensor or a GradientMap."
        )
    if not (gradient.is_floating_point() or gradient.is_complex()):
        raise MisuseError(
            f"batch_gradient is {gradient.dtype}. Pass a gradient, in floating point."
        )
    return {None: gradient}
